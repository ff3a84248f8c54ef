"""Texts of single tokens, from the tokenizer's description of its decoder."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer as TokenizerCore


class PieceTable:
    """The text or bytes of each token, computed at first use; shared by all sequences."""

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
            # A model's vocabulary is often padded beyond its tokenizer's: those ids have no text.
            piece = self._empty
        else:
            piece = self._convert(content)
        self._known[token_id] = piece
        return piece


@dataclass(frozen=True, slots=True)
class SentencePieceStyle:
    """How a SentencePiece-like decoder treats tokens."""

    space: str  # the character for a space in tokens
    byte_fallback: bool  # tokens like <0xE4> are bytes
    strip_first_space: bool  # removes one space at the beginning of the text
    first_token_bare: bool  # removes the spaces of the first token (Metaspace)


def special_contents(core: TokenizerCore) -> frozenset[str]:
    """Tokens that are not text, such as the end of a sequence."""
    return frozenset(token.content for token in core.get_added_tokens_decoder().values() if token.special)


def byte_level_bytes(token: str) -> bytes:
    """Bytes of a GPT-2 token: each is a printable character; other tokens are plain text."""
    try:
        return bytes([_BYTE_OF[character] for character in token])
    except KeyError:
        return token.encode()


def sentencepiece_piece(token: str, style: SentencePieceStyle) -> str | bytes:
    """The bytes of a byte token, or the text of another one."""
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
    """The steps of a tokenizer's decoder as its file describes them; [] without a decoder."""
    description = json.loads(core.to_str())["decoder"]
    if description is None:
        return []
    return list(description["decoders"]) if description["type"] == "Sequence" else [description]


def sentencepiece_style(steps: Sequence[dict[str, Any]]) -> SentencePieceStyle | None:
    """The style of these decoder steps; None: another kind of decoder."""
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
