"""Blocks on their way from the pool to host memory."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from moonpool.kvstore.blocks.keys import BlockKey
from moonpool.kvstore.tiers import metrics
from moonpool.kvstore.tiers.copier import Copier
from moonpool.kvstore.tiers.host import HostTier
from moonpool.kvstore.tiers.in_transit import InTransit
from moonpool.kvstore.tiers.protocols import PoolTier
from moonpool.runtime.errors import MoonpoolError
from moonpool.runtime.service.vital import vital

_log = logging.getLogger(__name__)

# Copied at once in one turn of the event loop: about 0.1 ms, as long as waking a thread takes. The rest is
# copied on a thread in batches, because reads of host memory use that thread too.
_INLINE_NBYTES = 1 << 20
_BATCH_NBYTES = 16 << 20


@dataclass(slots=True, eq=False)
class _Demotion:
    key: BlockKey
    parent: BlockKey | None
    slot: int
    block: int  # of the pool
    is_wanted: bool = True


class Demoter:
    """Copy blocks that the pool drops. Their bytes must stay until ``copied`` returns.

    Until a block is copied it is found in ``demoting`` and in no tier.
    """

    def __init__(
        self, host: HostTier, pool: PoolTier | None, copier: Copier, on_finished: Callable[[BlockKey], None]
    ) -> None:
        """``on_finished(key)``: host memory holds the block now, or had no room for it after all."""
        self.demoting: InTransit[_Demotion] = InTransit()
        self._host = host
        self._pool = pool
        # Their slots cannot be evicted: they may not fill host memory.
        self._max_demoting = max(host.capacity // 2, 1)
        self._batch_blocks = max(_BATCH_NBYTES // host.layout.block_nbytes, 1)
        self._copier = copier
        self._on_finished = on_finished
        self._inline_nbytes = 0
        self._waiting: deque[_Demotion] = deque()
        self._task: asyncio.Task[None] | None = None

    def add(self, key: BlockKey, parent: BlockKey | None, block: int) -> bool:
        """Keep this block of the pool. False: host memory has no room for it."""
        while len(self.demoting) >= self._max_demoting and self._waiting:
            self._abandon(self._waiting.popleft())
        slot = self._host.reserve(key, parent)
        if slot is None:
            return False
        demotion = _Demotion(key, parent, slot, block)
        if self._task is None and self._copies_inline():
            try:
                (checksum,) = self._copy([demotion])
            except BaseException:
                self._host.abandon(slot)
                raise
            self._host.fill(slot, key, parent, checksum)
            return True
        self.demoting.add(key, demotion)
        self._waiting.append(demotion)
        if self._task is None:
            self._task = vital(self._run(), "demote")
        return True

    async def copied(self) -> None:
        """Wait until no block of the pool is being read."""
        while self._task is not None:
            await asyncio.shield(self._task)

    async def arrived(self, keys: Iterable[BlockKey]) -> None:
        """Wait until those of these blocks that are being demoted are in host memory."""
        if self.demoting and any(key in self.demoting for key in keys):
            await self.copied()

    def forget(self, key: BlockKey) -> None:
        demotion = self.demoting.take(key)
        if demotion is not None:
            demotion.is_wanted = False

    def drop_descendants(self, key: BlockKey) -> list[BlockKey]:
        """A block is in no tier any more: forget the blocks directly after it. Returns those."""
        gone = self.demoting.after(key)
        for each in gone:
            self.forget(each)
        return gone

    def _copies_inline(self) -> bool:
        assert self._pool is not None
        if self._pool.needs_loop:
            return False
        if not self._inline_nbytes:
            try:
                asyncio.get_running_loop().call_soon(self._begin_turn)
            except RuntimeError:
                return True  # no loop runs on this thread
        self._inline_nbytes += self._host.layout.block_nbytes
        return self._inline_nbytes <= _INLINE_NBYTES

    def _begin_turn(self) -> None:
        self._inline_nbytes = 0

    async def _run(self) -> None:
        try:
            while self._waiting:
                num_blocks = min(len(self._waiting), self._batch_blocks)
                demotions = [self._waiting.popleft() for _ in range(num_blocks)]
                try:
                    checksums = await self._copier.run(partial(self._copy, demotions))
                except Exception as error:
                    # All that wait for these blocks must go on, the writer to disk too.
                    expected = isinstance(error, MoonpoolError)
                    _log.log(
                        logging.WARNING if expected else logging.ERROR,
                        "%d blocks of the pool were not kept in host memory: %s",
                        num_blocks,
                        error,
                        exc_info=not expected,
                    )
                    metrics.EVICTED_BLOCKS.labels("pool", "failed").inc(num_blocks)
                    for demotion in demotions:
                        self._abandon(demotion)
                    continue
                for demotion, checksum in zip(demotions, checksums, strict=True):
                    self._finish(demotion, checksum)
        finally:
            self._task = None

    def _copy(self, demotions: Sequence[_Demotion]) -> list[int]:
        assert self._pool is not None
        spans = [self._host.bytes_of(demotion.slot) for demotion in demotions]
        return self._pool.copy_out([demotion.block for demotion in demotions], spans)

    def _finish(self, demotion: _Demotion, checksum: int) -> None:
        if not demotion.is_wanted:
            self._host.abandon(demotion.slot)
            return
        self.demoting.take(demotion.key)
        self._host.fill(demotion.slot, demotion.key, demotion.parent, checksum)
        self._on_finished(demotion.key)

    def _abandon(self, demotion: _Demotion) -> None:
        """Drop a block that is not copied: what the pool drops later was used later."""
        self._host.abandon(demotion.slot)
        if demotion.is_wanted:
            self.demoting.take(demotion.key)
            self._on_finished(demotion.key)
