"""An external engine in our index: its events become entries of a node."""

from __future__ import annotations

from collections.abc import AsyncIterable, Callable, Iterator

import numpy as np
import numpy.typing as npt

from moonpool.kvstore.blocks.keys import BlockKey, chain
from moonpool.kvstore.blocks.tier import Tier
from moonpool.kvstore.events import metrics
from moonpool.kvstore.events.messages import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    Hash,
    KvEvent,
)
from moonpool.kvstore.events.subscriber import Lost
from moonpool.kvstore.index.node_publisher import IndexPublisher
from moonpool.kvstore.index.redis.kv_index import KVIndex
from moonpool.kvstore.index.redis.node_record import NodeRecord
from moonpool.runtime.config.options import IndexOptions

# Storage that others reach as well as the engine, or a word of later versions, is not the engine's own.
_LOCAL = (None, "LOCAL")
# Of one engine: 64 million tokens in blocks of 16.
_MAX_BLOCKS = 1 << 22
_TIERS = {"GPU": Tier.POOL, "CPU": Tier.HOST, "STORAGE": Tier.SSD}


class ExternalNode:
    """The engine's hashes are its own; its events contain the tokens, from which our keys are computed. The
    engine's block size may be a multiple of ours."""

    def __init__(
        self,
        index: KVIndex,
        record: NodeRecord,
        options: IndexOptions,
        *,
        block_size: int,
        root_of: Callable[[str], bytes],
    ) -> None:
        """``block_size``: tokens of our blocks. ``root_of``: the root key of an adapter's chains ("": none),
        see ``blocks.keys.root_key``."""
        self.record = record
        self.publisher = IndexPublisher(index, lambda: self.record, options, self._held)
        self._block_size = block_size
        self._root_of = root_of
        self._blocks: dict[Hash, tuple[BlockKey, ...]] = {}  # the engine's block as ours, one or more
        self._tiers: dict[Hash, set[Tier]] = {}

    async def follow(self, batches: AsyncIterable[EventBatch | Lost]) -> None:
        """Apply ``batches`` until they end. Start ``publisher`` before, close it afterwards."""
        async for batch in batches:
            if isinstance(batch, Lost):
                # Removals may be missing: better no hits than stale ones.
                self._clear()
                continue
            for event in batch.events:
                self.apply(event)

    def apply(self, event: KvEvent) -> None:
        if isinstance(event, BlockStored):
            if event.locality in _LOCAL:
                self._store(event)
            else:
                _skip("remote", len(event.block_hashes))
        elif isinstance(event, BlockRemoved):
            if not event.group_idx and event.locality in _LOCAL:
                for name in event.block_hashes:
                    self._remove(name, _TIERS.get(event.medium or "GPU"))
        elif isinstance(event, AllBlocksCleared):
            self._clear()

    def _held(self) -> Iterator[tuple[BlockKey, Tier]]:
        for name, tiers in self._tiers.items():
            for key in self._blocks[name]:
                yield key, min(tiers)

    def _store(self, event: BlockStored) -> None:
        tier = _TIERS.get(event.medium or "GPU")
        previous = self._parent_key(event)
        if tier is None or previous is None:
            return
        for number, name in enumerate(event.block_hashes):
            if name not in self._blocks:
                if len(self._blocks) >= _MAX_BLOCKS:
                    _skip("full", len(event.block_hashes) - number)
                    return
                reason, part = self._tokens(event, number)
                if reason:
                    _skip(reason, len(event.block_hashes) - number)
                    return
                self._blocks[name] = tuple(chain(previous, part, self._block_size))
            keys = self._blocks[name]
            previous = keys[-1]
            tiers = self._tiers.setdefault(name, set())
            tiers.add(tier)
            for key in keys:
                self.publisher.stored(key, min(tiers))

    def _tokens(self, event: BlockStored, number: int) -> tuple[str, npt.NDArray[np.int32]]:
        """The reason why the tokens do not identify a block of the event ("": they do), and the tokens."""
        size, extra_keys = event.block_size, event.extra_keys or ()
        part = np.asarray(event.token_ids[number * size : (number + 1) * size], dtype=np.int32)
        extra = extra_keys[number] if number < len(extra_keys) else None
        is_unnamed = event.lora_id and event.lora_name is None
        if is_unnamed or any(each != event.lora_name for each in extra or ()):
            return "extra", part
        return "size" if len(part) < size or size % self._block_size else "", part

    def _parent_key(self, event: BlockStored) -> bytes | None:
        """The key before the event's blocks; None, counted: unknown."""
        reason = "orphan"
        if event.group_idx or event.kv_cache_spec_kind not in (None, "full_attention"):
            reason = "group"
        elif event.parent_block_hash is None:
            return self._root_of(event.lora_name or "")
        elif (parent := self._blocks.get(event.parent_block_hash)) is not None:
            return parent[-1]
        _skip(reason, len(event.block_hashes))
        return None

    def _remove(self, name: Hash, tier: Tier | None) -> None:
        tiers = self._tiers.get(name)
        if tiers is None or tier is None:
            return
        tiers.discard(tier)
        keys = self._blocks[name]
        if tiers:
            for key in keys:
                self.publisher.stored(key, min(tiers))
            return
        del self._tiers[name], self._blocks[name]
        for key in reversed(keys):
            self.publisher.removed(key)

    def _clear(self) -> None:
        for keys in self._blocks.values():
            for key in keys:
                self.publisher.removed(key)
        self._blocks, self._tiers = {}, {}


def _skip(reason: str, count: int) -> None:
    metrics.skipped_blocks.labels(reason).inc(count)
