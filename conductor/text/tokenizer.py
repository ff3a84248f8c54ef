"""The checkpoint's tokenizer: text to token ids and back, as ``transformers`` would, without importing it."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer as TokenizerCore

from moonpool.conductor.text.detokenizer import Detokenizer, DetokenizerFactory, decode_all
from moonpool.runtime.errors import ConfigError

# One text at a time: the library's thread pool would only take a core from the nodes.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# About 1 ms of the loop. Longer texts go to a thread: the library lets go of the interpreter there.
MAX_INLINE_CHARS = 8192

# The special tokens chat templates may name.
SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


def fingerprint_of(*parts: bytes) -> str:
    """Equal where all parts are; short enough to be compared by eye."""
    digest = blake2b(digest_size=6)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()


class Tokenizer:
    """Immutable after construction; safe to use from any thread."""

    def __init__(
        self, core: TokenizerCore, config: Mapping[str, Any] | None = None, fingerprint: str = ""
    ) -> None:
        """``fingerprint``: of the file it was read from."""
        self._core = core
        self.fingerprint = fingerprint
        self.config = dict(config or {})  # tokenizer_config.json
        self.special_tokens = _special_tokens(self.config)
        core.no_truncation()
        core.no_padding()
        self._detokenizers = DetokenizerFactory(core)

    @classmethod
    def from_checkpoint(cls, path: Path) -> Tokenizer:
        """Read ``tokenizer.json`` and, where there is one, ``tokenizer_config.json`` below ``path``.

        Raises:
            ConfigError: a file is missing or cannot be read; says which and what to do.
        """
        file = path / "tokenizer.json"
        if not file.exists():
            raise ConfigError(
                f"{file} does not exist: Moonpool reads tokenizers in that form; a checkpoint with only a "
                "tokenizer.model gets one by loading it once with transformers and save_pretrained",
                "model.path",
            )
        try:
            core = TokenizerCore.from_file(str(file))
        except Exception as error:  # the library raises plain Exception for anything wrong in the file
            raise ConfigError(f"{file} cannot be read: {error}", "model.path") from error
        return cls(core, read_json(path / "tokenizer_config.json"), fingerprint_of(file.read_bytes()))

    @property
    def vocab_size(self) -> int:
        """Ids below this have a text; a model may know more."""
        return int(self._core.get_vocab_size())

    @property
    def detokenizer_kind(self) -> str:
        return self._detokenizers.kind

    async def encode(self, text: str, *, add_special_tokens: bool) -> npt.NDArray[np.int32]:
        """[num_tokens]. ``add_special_tokens``: with what tokenizer.json puts around a text, such as a BOS.

        As in transformers, the add_bos_token of tokenizer_config.json has no say beside a tokenizer.json.
        """
        if len(text) <= MAX_INLINE_CHARS:
            return self.encode_now(text, add_special_tokens=add_special_tokens)
        return await asyncio.to_thread(self.encode_now, text, add_special_tokens=add_special_tokens)

    def encode_now(self, text: str, *, add_special_tokens: bool) -> npt.NDArray[np.int32]:
        # The batch form, because it alone runs without the interpreter lock and does not compute offsets.
        (encoding,) = self._core.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return np.array(encoding.ids, dtype=np.int32)

    def decode(self, token_ids: Iterable[int], *, skip_special: bool = True) -> str:
        return decode_all(self._detokenizers.new(skip_special=skip_special), map(int, token_ids))

    def detokenizer(
        self, context: Sequence[int] | npt.NDArray[np.int32] = (), *, skip_special: bool = True
    ) -> Detokenizer:
        """For the tokens that follow ``context``, the prompt: its text is not repeated."""
        return self._detokenizers.new(context, skip_special=skip_special)

    def token_bytes(self, token_id: int) -> bytes:
        """What one token stands for; a special token for its name; an id without text for nothing."""
        return self._detokenizers.token_bytes(token_id)


def read_json(path: Path) -> dict[str, Any]:
    """An optional JSON object of a checkpoint; {} when the file is not there.

    Raises:
        ConfigError: it is there and is not a JSON object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}", "model.path") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} is not a JSON object", "model.path")
    return value


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Name -> text. The files write a token as a text or as an object with its ``content``."""
    found: dict[str, str] = {}
    for name in SPECIAL_NAMES:
        value = config.get(name)
        content = value.get("content") if isinstance(value, dict) else value
        if isinstance(content, str):
            found[name] = content
    return found
