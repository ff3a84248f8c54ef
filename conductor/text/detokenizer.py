"""Incremental detokenization in constant time per token, equal to decoding all tokens at once.

The texts that a ``Detokenizer`` returns, joined, equal ``tokenizer.decode`` of all its ids. Tokenizers with
one of the two common decoders (byte-level BPE, and SentencePiece with ▁ and byte tokens) use a table of token
texts, all others decode a short window again.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer as TokenizerCore

from moonpool.conductor.text.vocabulary import (
    PieceTable,
    SentencePieceStyle,
    byte_level_bytes,
    decoder_steps,
    sentencepiece_piece,
    sentencepiece_style,
)

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

# A run of byte tokens is valid UTF-8 or not as a whole, so it waits for its end. Longer runs (a script
# outside the vocabulary, without spaces) are decoded character by character.
MAX_PENDING_BYTES = 64

# Prompt tokens that affect the text after it: an incomplete character, and that a text has begun.
CONTEXT_TOKENS = 8


class Detokenizer(Protocol):
    """The text of one sequence. ``push`` holds back incomplete characters."""

    def push(self, token_id: int) -> str: ...

    def complete(self) -> str:
        """The complete characters held back so far; called at the end of a prompt."""
        ...

    def flush(self) -> str:
        """The rest, at the end; incomplete characters become U+FFFD."""
        ...


class ByteLevelDetokenizer:
    """GPT-2 style: every token is bytes, and the text is their UTF-8."""

    __slots__ = ("_decode", "_pieces")

    def __init__(self, pieces: PieceTable) -> None:
        self._pieces = pieces
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def push(self, token_id: int) -> str:
        return self._decode(self._pieces[token_id])

    def complete(self) -> str:
        return ""

    def flush(self) -> str:
        return self._decode(b"", True)


class SentencePieceDetokenizer:
    """▁ is a space; ``<0x..>`` tokens are bytes, and a run of them is text if it is valid UTF-8."""

    __slots__ = ("_at_start", "_pieces", "_run", "_style")

    def __init__(self, pieces: PieceTable, style: SentencePieceStyle) -> None:
        self._pieces = pieces
        self._style = style
        self._run = b""
        self._at_start = True

    def push(self, token_id: int) -> str:
        piece = self._pieces[token_id]
        if type(piece) is bytes:
            self._run += piece
            return self.complete() if len(self._run) > MAX_PENDING_BYTES else ""
        if piece is None:
            return ""
        if self._at_start and self._style.first_token_bare:
            self._at_start = False
            return str(piece.replace(" ", ""))
        if self._run:
            piece = self._end_run() + piece
        return self._begin(piece) if self._at_start else str(piece)

    def complete(self) -> str:
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        text = decoder.decode(self._run)
        self._run = decoder.getstate()[0]
        return self._begin(text)

    def flush(self) -> str:
        return self._begin(self._end_run())

    def _begin(self, text: str) -> str:
        if not (self._at_start and text):
            return text
        self._at_start = False
        return text[1:] if self._style.strip_first_space and text[0] == " " else text

    def _end_run(self) -> str:
        run, self._run = self._run, b""
        try:
            return run.decode()
        except UnicodeDecodeError:
            return REPLACEMENT * len(run)


class WindowDetokenizer:
    """For any other decoder: decodes a short window with and without each new token."""

    __slots__ = ("_core", "_ids", "_read", "_skip_special")

    def __init__(self, core: TokenizerCore, skip_special: bool) -> None:
        self._core = core
        self._skip_special = skip_special
        self._ids: list[int] = []
        self._read = 0  # the text of _ids[:_read] has been returned

    def push(self, token_id: int) -> str:
        self._ids.append(token_id)
        text = self._unread()
        incomplete = not text or text.endswith(REPLACEMENT)
        if incomplete and len(self._ids) - self._read < MAX_PENDING_BYTES:
            return ""
        return self._advance(text)

    def complete(self) -> str:
        return "" if self._unread().endswith(REPLACEMENT) else self.flush()

    def flush(self) -> str:
        return self._advance(self._unread())

    def _unread(self) -> str:
        before = self._core.decode(self._ids[: self._read], skip_special_tokens=self._skip_special)
        both = self._core.decode(self._ids, skip_special_tokens=self._skip_special)
        return both[len(before) :]

    def _advance(self, text: str) -> str:
        self._ids = self._ids[-CONTEXT_TOKENS:]
        self._read = len(self._ids)
        return text


class DetokenizerFactory:
    """Makes detokenizers for one tokenizer, of the kind that its decoder needs."""

    def __init__(self, core: TokenizerCore) -> None:
        self._core = core
        self.kind = "window"
        self._pieces: tuple[PieceTable, PieceTable] | None = None
        steps = decoder_steps(core)
        self._style = sentencepiece_style(steps)
        if [step["type"] for step in steps] == ["ByteLevel"]:
            self._use("byte-level", byte_level_bytes, b"")
        elif self._style is not None:
            style = self._style
            self._use("sentencepiece", lambda token: sentencepiece_piece(token, style), None)
        if self.kind != "window" and not self._agrees():
            self.kind, self._pieces = "window", None

    def new(
        self, context: Sequence[int] | npt.NDArray[np.int32] = (), *, skip_special: bool = True
    ) -> Detokenizer:
        """A detokenizer for the tokens after ``context``, the prompt."""
        detokenizer = self._bare(skip_special)
        for token_id in context[-CONTEXT_TOKENS:]:
            detokenizer.push(int(token_id))
        detokenizer.complete()
        return detokenizer

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token; special tokens by their name."""
        if self._pieces is None:
            return self._core.decode([token_id], skip_special_tokens=False).encode()
        piece = self._pieces[0][token_id]
        return piece.encode() if isinstance(piece, str) else piece or b""

    def _bare(self, skip_special: bool) -> Detokenizer:
        if self._pieces is None:
            return WindowDetokenizer(self._core, skip_special)
        pieces = self._pieces[skip_special]
        if self._style is not None:
            return SentencePieceDetokenizer(pieces, self._style)
        return ByteLevelDetokenizer(pieces)

    def _use(self, kind: str, convert: Callable[[str], Any], empty: Any) -> None:
        self.kind = kind
        self._pieces = (
            PieceTable(self._core, False, convert, empty),
            PieceTable(self._core, True, convert, empty),
        )

    def _agrees(self) -> bool:
        """Whether the table agrees with the tokenizer on a sample of the vocabulary."""
        size = self._core.get_vocab_size()
        spread = list(range(0, size, max(1, size // 512)))
        # All of the first tokens, usually bytes and special tokens. In short parts, because long runs of byte
        # tokens are decoded early on purpose.
        ids = spread + spread[::-1] + list(range(min(size, 300)))
        return all(self._same(ids[start : start + 32]) for start in range(0, len(ids), 32))

    def _same(self, ids: list[int]) -> bool:
        return decode_all(self.new(), ids) == self._core.decode(ids, skip_special_tokens=True)


def decode_all(detokenizer: Detokenizer, token_ids: Iterable[int]) -> str:
    """The whole text of ``token_ids``."""
    return "".join([*map(detokenizer.push, token_ids), detokenizer.flush()])
