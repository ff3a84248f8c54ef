"""The checkpoint's tokenizer, equivalent to that of ``transformers``, without importing it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer as TokenizerCore

from moonpool.conductor.text.checkpoint_json import read_json
from moonpool.conductor.text.detokenizer import Detokenizer, DetokenizerFactory, decode_all
from moonpool.runtime.errors import ConfigError

# The library's thread pool would take cores from the nodes.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# About 1 ms on the event loop. Longer texts go to a thread: the library releases the GIL.
MAX_INLINE_CHARS = 2048

# Special tokens that chat templates may use.
SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


def fingerprint_of(*parts: bytes) -> str:
    """A short digest of all parts."""
    digest = blake2b(digest_size=6)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()


class Tokenizer:
    """Immutable; safe to use from any thread."""

    def __init__(
        self, core: TokenizerCore, config: Mapping[str, Any] | None = None, fingerprint: str = ""
    ) -> None:
        """``fingerprint``: of its file."""
        self._core = core
        self.fingerprint = fingerprint
        self.config = dict(config or {})  # tokenizer_config.json
        self.special_tokens = _special_tokens(self.config)
        core.no_truncation()
        core.no_padding()
        self._detokenizers = DetokenizerFactory(core)

    @classmethod
    def from_checkpoint(cls, path: Path) -> Tokenizer:
        """Read ``tokenizer.json`` and, if present, ``tokenizer_config.json`` below ``path``.

        Raises:
            ConfigError: a file is missing or invalid.
        """
        file = path / "tokenizer.json"
        if not file.exists():
            raise ConfigError(
                f"{file} does not exist: convert a tokenizer.model by loading it with transformers and "
                "save_pretrained",
                "model.path",
            )
        try:
            core = TokenizerCore.from_file(str(file))
        except Exception as error:  # the library raises plain Exception
            raise ConfigError(f"{file} cannot be read: {error}", "model.path") from error
        return cls(core, read_json(path / "tokenizer_config.json"), fingerprint_of(file.read_bytes()))

    @property
    def vocab_size(self) -> int:
        """Ids below this have a text; the model may have more."""
        return int(self._core.get_vocab_size())

    def token_id(self, text: str) -> int | None:
        """The id of the token that is written as ``text``; None: there is none."""
        found: int | None = self._core.token_to_id(text)
        return found

    @property
    def detokenizer_kind(self) -> str:
        return self._detokenizers.kind

    async def encode(self, text: str, *, add_special_tokens: bool) -> npt.NDArray[np.int32]:
        """int32 [num_tokens]. ``add_special_tokens``: those that tokenizer.json adds, such as a BOS.

        As in transformers, the add_bos_token of tokenizer_config.json is ignored.
        """
        if len(text) <= MAX_INLINE_CHARS:
            return self.encode_now(text, add_special_tokens=add_special_tokens)
        return await asyncio.to_thread(self.encode_now, text, add_special_tokens=add_special_tokens)

    def encode_now(self, text: str, *, add_special_tokens: bool) -> npt.NDArray[np.int32]:
        # Only the batch form releases the GIL and computes no offsets.
        (encoding,) = self._core.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return np.array(encoding.ids, dtype=np.int32)

    def decode(self, token_ids: Iterable[int], *, skip_special: bool = True) -> str:
        return decode_all(self._detokenizers.new(skip_special=skip_special), map(int, token_ids))

    def detokenizer(
        self, context: Sequence[int] | npt.NDArray[np.int32] = (), *, skip_special: bool = True
    ) -> Detokenizer:
        """A detokenizer for the tokens after ``context``, the prompt."""
        return self._detokenizers.new(context, skip_special=skip_special)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token; special tokens by their name; empty for an id without text."""
        return self._detokenizers.token_bytes(token_id)


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Name -> text. Files have a token as a text or as an object with ``content``."""
    found: dict[str, str] = {}
    for name in SPECIAL_NAMES:
        value = config.get(name)
        content = value.get("content") if isinstance(value, dict) else value
        if isinstance(content, str):
            found[name] = content
    return found
