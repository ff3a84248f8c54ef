"""What single tokens stand for, read from how the checkpoint's tokenizer describes its decoder."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer as TokenizerCore


class PieceTable:
    """What each token stands for, worked out when first seen; shared by all sequences of one tokenizer."""

    def __init__(
        self, core: TokenizerCore, skip_special: bool, convert: Callable[[str], Any], empty: Any
    ) -> None:
        self._core = core
        self._convert = convert
        self._empty = empty
        self._skip = special_contents(core) if skip_special else frozenset()
        self._known: dict[int, Any] = {}

    def __getitem__(self, token_id: int) -> Any:
        piece = self._known.get(token_id)
        return piece if piece is not None else self._look_up(token_id)

    def _look_up(self, token_id: int) -> Any:
        content = self._core.id_to_token(token_id)
        if content is None or content in self._skip:
            # A model's vocabulary is often padded past its tokenizer's: those ids have no text.
            piece = self._empty
        else:
            piece = self._convert(content)
        self._known[token_id] = piece
        return piece


@dataclass(frozen=True, slots=True)
class SentencePieceStyle:
    """What a SentencePiece-like decoder does to the tokens of a sequence."""

    space: str  # what stands for a space inside tokens
    byte_fallback: bool  # tokens like <0xE4> are bytes
    strip_first_space: bool  # one space at the beginning of the whole text goes away
    first_token_bare: bool  # the first token loses its spaces (the Metaspace decoder)


def special_contents(core: TokenizerCore) -> frozenset[str]:
    """The tokens that are no text, such as the end of a sequence."""
    return frozenset(token.content for token in core.get_added_tokens_decoder().values() if token.special)


def byte_level_bytes(token: str) -> bytes:
    """GPT-2 writes each byte as a printable character; a token with any other character is plain text."""
    try:
        return bytes([_BYTE_OF[character] for character in token])
    except KeyError:
        return token.encode()


def sentencepiece_piece(token: str, style: SentencePieceStyle) -> str | bytes:
    """A byte token gives bytes, any other its text."""
    if style.byte_fallback and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes([int(token[3:5], 16)])
        except ValueError:
            pass
    return token.replace(style.space, " ")


def _byte_of() -> dict[str, int]:
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    shifted = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(shifted)}


_BYTE_OF = _byte_of()


def decoder_steps(core: TokenizerCore) -> list[dict[str, Any]]:
    """The decoder of a tokenizer as its file describes it, a step an object; [] when it has none."""
    description = json.loads(core.to_str())["decoder"]
    if description is None:
        return []
    return list(description["decoders"]) if description["type"] == "Sequence" else [description]


def sentencepiece_style(steps: Sequence[dict[str, Any]]) -> SentencePieceStyle | None:
    """The style those decoder steps amount to, or None when they are of another kind."""
    if not steps:
        return None
    first, *rest = steps
    if first["type"] == "Metaspace" and not rest:
        bare = first.get("prepend_scheme", "always") != "never"
        return SentencePieceStyle(first["replacement"], False, False, bare)
    if first["type"] != "Replace" or first["content"] != " " or "String" not in first["pattern"]:
        return None
    names = [step["type"] for step in rest]
    if names not in (
        ["ByteFallback", "Fuse"],
        ["ByteFallback", "Fuse", "Strip"],
        ["Fuse"],
        ["Fuse", "Strip"],
    ):
        return None
    if names[-1] == "Strip" and (rest[-1]["content"], rest[-1]["start"], rest[-1]["stop"]) != (" ", 1, 0):
        return None
    return SentencePieceStyle(
        first["pattern"]["String"], "ByteFallback" in names, names[-1] == "Strip", first_token_bare=False
    )
