"""Marks: some blocks of each prompt, remembered so that the part a hit did not reach can be explained."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

from moonpool.kvstore.blocks.keys import BlockKey

# Blocks that are remembered, and the most of one prompt besides its last.
_REMEMBERED = 1 << 16
_MOST_MARKS = 16

_Value = TypeVar("_Value")


class _Generations(Generic[_Value]):
    """A map that forgets what was not written lately, half of its capacity at a time."""

    def __init__(self) -> None:
        self._young: dict[bytes, _Value] = {}
        self._old: dict[bytes, _Value] = {}

    def get(self, key: bytes) -> _Value | None:
        found = self._young.get(key)
        return self._old.get(key) if found is None else found

    def put(self, key: bytes, value: _Value) -> None:
        self._young[key] = value
        if len(self._young) >= _REMEMBERED // 2:
            self._young, self._old = {}, self._young

    def __len__(self) -> int:
        return len(self._young) + len(self._old)


@dataclass(frozen=True, slots=True)
class Mark:
    """What was known of one block of a prompt, and so of all blocks before it."""

    block: int
    first_s: float | None  # when it first came; None: only equal tokens came, of another root of keys


class Marks:
    """At most 9 MB each for keys and tokens; some 50 µs for a prompt of 2,048 tokens.

    Marks lie at multiples of a power of two, so those of prompts with a common beginning coincide. A key, and
    a digest of tokens, name all tokens before the block's end.
    """

    def __init__(self) -> None:
        self._first_s: _Generations[float] = _Generations()
        self._roots: _Generations[bytes] = _Generations()  # the latest, by tenant and tokens

    def __len__(self) -> int:
        return len(self._first_s)

    def put(
        self,
        tenant: str,
        root: bytes,
        token_ids: npt.NDArray[np.int32],
        keys: Sequence[BlockKey],
        block_size: int,
        now_s: float,
    ) -> list[Mark]:
        """Remember a prompt with the blocks ``keys``, at least one; return its blocks that were known."""
        digest, end = blake2b(tenant.encode() + b"\0", digest_size=8), 0
        tokens = memoryview(token_ids.tobytes())
        found = []
        for i in _marked(len(keys)):
            begin, end = end, 4 * (i + 1) * block_size
            digest.update(tokens[begin:end])
            name, key = digest.digest(), keys[i]
            seen_root, first_s = self._roots.get(name), self._first_s.get(key)
            self._roots.put(name, root)
            self._first_s.put(key, now_s if first_s is None else first_s)
            if first_s is not None or seen_root not in (None, root):
                found.append(Mark(i, first_s))
        return found


def _marked(num_blocks: int) -> Iterator[int]:
    step = 1
    while num_blocks > _MOST_MARKS * step:
        step *= 2
    yield from range(0, num_blocks - 1, step)
    yield num_blocks - 1
