"""Blocks on their way from the pool to host memory."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from moonpool.kvstore.blocks.keys import BlockKey
from moonpool.kvstore.tiers.copier import Copier
from moonpool.kvstore.tiers.host import HostTier
from moonpool.kvstore.tiers.in_transit import InTransit
from moonpool.kvstore.tiers.protocols import PoolTier
from moonpool.runtime.errors import MoonpoolError

_log = logging.getLogger(__name__)

# Copied at once in one turn of the event loop: about 0.1 ms, what waking a thread takes. The rest is copied
# on a thread, so much at a time, because reads of host memory use that thread too.
_INLINE_NBYTES = 1 << 20
_BATCH_NBYTES = 16 << 20


@dataclass(slots=True, eq=False)
class _Coming:
    key: BlockKey
    parent: BlockKey | None
    slot: int
    block: int  # of the pool
    is_wanted: bool = True


class Demoter:
    """The pool drops a block at once; its bytes stay until ``copied`` says that they are not needed any more.
    Until then the block is found here (``coming``), and nowhere else."""

    def __init__(
        self, host: HostTier, pool: PoolTier | None, copier: Copier, on_settled: Callable[[BlockKey], None]
    ) -> None:
        """``on_settled(key)``: host memory holds the block now, or, had it no room after all, does not."""
        self.coming: InTransit[_Coming] = InTransit()
        self._host = host
        self._pool = pool
        # Blocks on their way have slots that cannot be evicted: they may not fill host memory.
        self._max_coming = max(host.stats.num_blocks // 2, 1)
        self._batch_blocks = max(_BATCH_NBYTES // host.layout.block_nbytes, 1)
        self._copier = copier
        self._on_settled = on_settled
        self._inline_nbytes = 0
        self._waiting: deque[_Coming] = deque()
        self._task: asyncio.Task[None] | None = None

    @property
    def is_copying(self) -> bool:
        return self._task is not None

    def take(self, key: BlockKey, parent: BlockKey | None, block: int) -> bool:
        """Keep this block of the pool. False: host memory has no place for it."""
        while len(self.coming) >= self._max_coming and self._waiting:
            self._leave_out(self._waiting.popleft())
        slot = self._host.reserve(key, parent)
        if slot is None:
            return False
        coming = _Coming(key, parent, slot, block)
        if self._task is None and self._copies_inline():
            (checksum,) = self._copy([coming])
            self._host.commit(slot, key, parent, checksum)
            return True
        self.coming.add(key, coming)
        self._waiting.append(coming)
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run(), name="demote")
        return True

    async def copied(self) -> None:
        """Wait until nothing of the pool is being read."""
        while self._task is not None:
            await asyncio.shield(self._task)

    async def arrived(self, keys: Iterable[BlockKey]) -> None:
        """Wait until these blocks are in host memory, as far as they were on their way."""
        if self.coming and any(key in self.coming for key in keys):
            await self.copied()

    def forget(self, key: BlockKey) -> None:
        """The block is removed: do not keep it."""
        block = self.coming.pop(key)
        if block is not None:
            block.is_wanted = False

    def give_up(self, key: BlockKey) -> list[BlockKey]:
        """A block is in no tier any more: forget what was coming after it. Returns those."""
        gone = self.coming.after(key)
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
                return True  # nobody's loop is held up
        self._inline_nbytes += self._host.layout.block_nbytes
        return self._inline_nbytes <= _INLINE_NBYTES

    def _begin_turn(self) -> None:
        self._inline_nbytes = 0

    async def _run(self) -> None:
        try:
            while self._waiting:
                num_blocks = min(len(self._waiting), self._batch_blocks)
                blocks = [self._waiting.popleft() for _ in range(num_blocks)]
                try:
                    checksums = await self._copier.run(partial(self._copy, blocks))
                except MoonpoolError as error:
                    _log.warning("%d blocks of the pool did not come to host memory: %s", num_blocks, error)
                    for block in blocks:
                        self._leave_out(block)
                    continue
                for block, checksum in zip(blocks, checksums, strict=True):
                    self._copied(block, checksum)
        finally:
            self._task = None

    def _copy(self, blocks: Sequence[_Coming]) -> list[int]:
        assert self._pool is not None
        spans = [self._host.bytes_of(block.slot) for block in blocks]
        return self._pool.copy_out([block.block for block in blocks], spans)

    def _copied(self, block: _Coming, checksum: int) -> None:
        if not block.is_wanted:
            self._host.abandon(block.slot)
            return
        self.coming.pop(block.key)
        self._host.commit(block.slot, block.key, block.parent, checksum)
        self._on_settled(block.key)

    def _leave_out(self, block: _Coming) -> None:
        """Not copied: what the pool drops later was used later."""
        self._host.abandon(block.slot)
        if block.is_wanted:
            self.coming.pop(block.key)
            self._on_settled(block.key)
