"""Why the blocks of a prompt were not loaded."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from hashlib import blake2b
from typing import Generic, TypeVar

from moonpool.connectors.vllm.engine_request import EngineRequest
from moonpool.kvstore.blocks.keys import BlockKey

# Why the first missing block of a prompt was neither in the engine nor loaded: the first that applies.
REASONS = {
    "failed": "its load failed, so it was computed",
    "slower": "a node has it, and computing was predicted to be faster than loading",
    "pending": "it was saved or seen moments ago, and is not in the index now",
    "evicted": "this engine saved it or saw it in the index before, and no node has it any more",
    "layout": "a node has it for engines of another layout (dtype, checkpoint, instruction set, version)",
    "salted": "the same tokens came before with another cache_salt",
    "adapter": "the same tokens came before with another LoRA adapter",
    "new": "this engine has not seen it before",
}

# Blocks and beginnings of prompts that are remembered; the least recently seen is dropped first.
_REMEMBERED = 1 << 16
# A block that was saved longer ago has been published.
_PENDING_S = 5.0

Value = TypeVar("Value")


class SeenBlocks:
    """What this engine knows of blocks that no node has now. Bounded; a few microseconds a request."""

    def __init__(self, block_size: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._block_size = block_size
        self._clock = clock
        self._blocks = _Latest[float]()  # when it was seen first
        self._heads = _Latest[tuple[str, str]]()  # salt and adapter of the last prompt with these tokens

    def saw(self, keys: Sequence[BlockKey]) -> None:
        """These blocks are saved now, or are in the index."""
        now_s = self._clock()
        for key in keys:
            self._blocks.put(key, self._blocks.get(key, now_s))

    def head(self, request: EngineRequest) -> str:
        """Return "salted" or "adapter" if its first tokens came before with others, else an empty text."""
        own = request.cache_salt or "", str(getattr(request.lora_request, "lora_name", ""))
        tokens = ",".join(map(str, request.all_token_ids[: self._block_size]))
        head = blake2b(tokens.encode(), digest_size=16).digest()
        before = self._heads.get(head, own)
        self._heads.put(head, own)
        if before[0] != own[0]:
            return "salted"
        return "adapter" if before[1] != own[1] else ""

    def why_missing(self, key: BlockKey) -> str:
        """Return "pending" or "evicted"; empty: it has not been seen."""
        seen_s = self._blocks.get(key, -1.0)
        if seen_s < 0:
            return ""
        return "pending" if self._clock() - seen_s < _PENDING_S else "evicted"


class _Latest(Generic[Value]):
    """A map of the ``_REMEMBERED`` keys used last."""

    def __init__(self) -> None:
        self._values: OrderedDict[Hashable, Value] = OrderedDict()

    def get(self, key: Hashable, default: Value) -> Value:
        return self._values.get(key, default)

    def put(self, key: Hashable, value: Value) -> None:
        self._values[key] = value
        self._values.move_to_end(key)
        if len(self._values) > _REMEMBERED:
            self._values.popitem(last=False)
