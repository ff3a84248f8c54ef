"""A node's voice in the index: its lease, its load, and the blocks it holds."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Protocol

from moonpool.kvstore.blocks.keys import BlockKey
from moonpool.kvstore.blocks.tier import Tier
from moonpool.kvstore.errors import EpochSuperseded, IndexUnavailable, NodeUnknown
from moonpool.kvstore.index import metrics
from moonpool.kvstore.index.redis.changes import REMOVED, decode, encode, split
from moonpool.kvstore.index.redis.kv_index import KVIndex
from moonpool.kvstore.index.redis.node_record import NodeRecord
from moonpool.runtime.config.options import IndexOptions

_log = logging.getLogger(__name__)

_RETRY_S = (0.02, 0.05, 0.1, 0.2, 0.5)
# Blocks in one call: enough that the call's own cost vanishes, few enough that Redis is never held up.
BATCH_BLOCKS = 1024
_TIDY_BATCHES = 16


class Listener(Protocol):
    """Hears what a node says it holds, whether Redis is there or not."""

    def stored(self, key: BlockKey, tier: Tier) -> None:
        """The block is held, its fastest copy now in ``tier``."""

    def removed(self, key: BlockKey) -> None:
        """The block is held in no tier any more."""


class IndexPublisher:
    """``stored`` and ``removed`` return at once and never fail; a task on the loop publishes.

    While Redis is lost nothing is gathered: when it is back, the node registers again and publishes all it
    holds.
    """

    def __init__(
        self,
        index: KVIndex,
        record_fn: Callable[[], NodeRecord],
        options: IndexOptions,
        held_fn: Callable[[], Iterable[tuple[BlockKey, Tier]]],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``record_fn`` gives the node's record with its load as it is now (same node_id and epoch for ever);
        ``held_fn`` gives every block it holds now, with its fastest tier, in any order."""
        self.connected = False
        self.listeners: list[Listener] = []
        self.superseded = False  # another process runs under our node id with a newer epoch: silent for good
        self._index = index
        self._record_fn = record_fn
        self._held_fn = held_fn
        self._ttl_s = options.lease_ttl_s
        self._interval_s = options.publish_interval_s
        self._clock = clock
        self._held: dict[BlockKey, Tier] = {}  # what the index says, or will once ``_pending`` is published
        self._pending: dict[BlockKey, Tier | None] = {}  # None: removed
        self._gathering = (
            False  # changes go to ``_pending``: set from just before we register until Redis is lost
        )
        self._complete = False  # all that was held when we registered is published
        self._log_base = 0  # position of the oldest batch of our log
        self._log_blocks = 0  # changes in our log
        self._next_heartbeat = 0.0
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()  # nothing is left to publish
        self._task: asyncio.Task[None] | None = None

    def stored(self, key: BlockKey, tier: Tier = Tier.POOL) -> None:
        """The block is held, its fastest copy now in ``tier``."""
        if self._held.get(key) is not tier:
            self._held[key] = tier
            self._change(key, tier)
            for listener in self.listeners:
                listener.stored(key, tier)

    def removed(self, key: BlockKey) -> None:
        """The block is held in no tier any more."""
        if self._held.pop(key, None) is not None:
            self._change(key, None)
            for listener in self.listeners:
                listener.removed(key)

    def retract(self, keys: Iterable[BlockKey]) -> int:
        """Somebody was told that this node holds these blocks. Publishes the removal of those it does not
        hold, whatever the index says of them; only their owner can do that without a race. Returns how many.
        """
        stale = [key for key in keys if key not in self._held]
        for key in stale:
            self._change(key, None)
        return len(stale)

    def announce(self) -> None:
        """Publish the node's record now, not at the next heartbeat: its state has changed."""
        self._idle.clear()
        self._next_heartbeat = 0.0
        self._wake.set()

    def _change(self, key: BlockKey, tier: Tier | None) -> None:
        self._idle.clear()
        if self._gathering:
            self._pending[key] = tier
            self._wake.set()

    async def flush(self) -> None:
        """Wait until everything said so far is in Redis (however long Redis stays away)."""
        await self._idle.wait()

    async def start(self) -> None:
        """Register. Returns after the first attempt: ``connected`` says whether Redis was there; if it was
        not, attempts go on."""
        try:
            await self._register()
        except (IndexUnavailable, EpochSuperseded) as error:
            self._lost(error)
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Leave the index, if Redis answers within a second."""
        if self._task is None:
            return
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._task = None
        record = self._record_fn()
        try:
            async with asyncio.timeout(1.0):
                await self._index.deregister(record.node_id, record.epoch)
        except (IndexUnavailable, TimeoutError) as error:
            _log.warning("node %s could not leave the index; its lease will end: %s", record.node_id, error)
        self._set_connected(False)

    async def _run(self) -> None:
        attempt = 0
        while not self.superseded:
            try:
                if not self.connected:
                    await self._register()
                attempt = 0
                await self._publish_forever()
            except (IndexUnavailable, NodeUnknown, EpochSuperseded) as error:
                self._lost(error)
                # NodeUnknown: we were dropped, or Redis has lost its data. It answers: no need to wait.
                if not isinstance(error, NodeUnknown):
                    await asyncio.sleep(_RETRY_S[min(attempt, len(_RETRY_S) - 1)])
                    attempt += 1
            except Exception:
                _log.exception("index publisher stopped; this node's lease will end")
                self._set_connected(False)
                raise

    async def _register(self) -> None:
        self._held = dict(self._held_fn())
        self._pending = dict(self._held)
        self._gathering = True
        self._complete = not self._held
        self._idle.clear()
        base = await self._index.register(self._record_fn(), self._ttl_s, complete=self._complete)
        metrics.registrations.inc()
        self._log_base, self._log_blocks = base, 0
        self._next_heartbeat = self._clock() + self._ttl_s / 3
        self._wake.set()
        self._set_connected(True)

    def _lost(self, error: Exception) -> None:
        self._gathering = False
        self._pending = {}
        self._idle.clear()
        self.superseded = isinstance(error, EpochSuperseded)
        level = logging.ERROR if self.superseded else logging.WARNING
        if self.connected or self._task is None:
            _log.log(level, "this node's blocks are not published for now: %s", error)
        self._set_connected(False)

    def _set_connected(self, connected: bool) -> None:
        self.connected = connected
        metrics.publisher_connected.set(connected)

    async def _publish_forever(self) -> None:
        while True:
            await self._heartbeat_if_due()
            await self._publish_pending()
            await self._tidy_log()
            if not self._pending:
                self._idle.set()
            await self._pause()

    async def _pause(self) -> None:
        """Until there is something to say; then a little longer, so that one call says much."""
        try:
            async with asyncio.timeout(max(self._next_heartbeat - self._clock(), 0.0)):
                await self._wake.wait()
                await asyncio.sleep(self._interval_s)
        except TimeoutError:
            pass
        self._wake.clear()

    async def _heartbeat_if_due(self) -> None:
        if self._clock() >= self._next_heartbeat:
            await self._index.heartbeat(self._record_fn(), self._ttl_s)
            self._next_heartbeat = self._clock() + self._ttl_s / 3

    async def _publish_pending(self) -> None:
        # What is said from here on goes out after this, so a key's changes stay in order.
        pending, self._pending = self._pending, {}
        record = self._record_fn()
        left = len(pending)
        changes = iter(pending.items())
        while batch := list(islice(changes, BATCH_BLOCKS)):
            left -= len(batch)
            stored = {key: tier for key, tier in batch if tier is not None}
            removed = [key for key, tier in batch if tier is None]
            self._complete, last = self._complete or not left, not self._complete and not left
            await self._index.publish_changes(
                record.node_id, record.epoch, encode(stored, removed), complete=last
            )
            self._log_blocks += len(batch)
            metrics.published_blocks.labels("stored").inc(len(stored))
            metrics.published_blocks.labels("removed").inc(len(removed))
            await self._heartbeat_if_due()

    async def _tidy_log(self) -> None:
        """Keep our log in Redis within half again of what it has to say: repeat what still holds of its
        oldest batches at its end, and drop them."""
        record = self._record_fn()
        while self._log_blocks > 1.5 * len(self._held) + 8 * BATCH_BLOCKS:
            page = await self._index.read_log(record.node_id, self._log_base, _TIDY_BATCHES)
            if page is None or page.epoch != record.epoch or page.base != self._log_base:
                raise NodeUnknown(record.node_id, record.epoch)
            named = [
                (BlockKey(key), op)
                for batch in page.batches
                for op, packed in decode(batch)
                for key in split(packed)
            ]
            live = {key: self._held[key] for key, op in named if op != REMOVED and key in self._held}
            await self._index.publish_changes(
                record.node_id,
                record.epoch,
                b"",
                quiet=encode(live, ()),
                base=self._log_base,
                trim=len(page.batches),
            )
            self._log_base += len(page.batches)
            self._log_blocks += len(live) - len(named)
            await self._heartbeat_if_due()
