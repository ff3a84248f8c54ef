"""A node's entries in the index: its lease, its record, and its blocks."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Protocol

from moonpool.kvstore.blocks.keys import BlockKey
from moonpool.kvstore.blocks.tier import Tier
from moonpool.kvstore.errors import EntryCorrupt, EpochSuperseded, IndexUnavailable, NodeUnknown
from moonpool.kvstore.index import metrics
from moonpool.kvstore.index.redis.changes import REMOVED, decode, encode, split
from moonpool.kvstore.index.redis.entries import skipped
from moonpool.kvstore.index.redis.kv_index import KVIndex
from moonpool.kvstore.index.redis.node_record import NodeRecord
from moonpool.runtime.config.options import IndexOptions
from moonpool.runtime.failures import FailureClass
from moonpool.runtime.observing import failures
from moonpool.runtime.service.vital import cancel_and_wait, vital

_log = logging.getLogger(__name__)

_RETRY_S = (0.02, 0.05, 0.1, 0.2, 0.5)
# Blocks in one call: enough to amortise the call, few enough not to block Redis.
BATCH_BLOCKS = 1024
_TIDY_BATCHES = 16


class Listener(Protocol):
    """Informed of a node's blocks, with Redis or without."""

    def stored(self, key: BlockKey, tier: Tier) -> None:
        """The node holds the block, the fastest copy in ``tier``."""

    def removed(self, key: BlockKey) -> None:
        """No tier holds the block any more."""


class IndexPublisher:
    """``stored`` and ``removed`` return at once and never fail; a task on the loop publishes.

    While Redis is lost nothing is collected: afterwards the node registers again and publishes all its
    blocks.
    """

    def __init__(
        self,
        index: KVIndex,
        record_fn: Callable[[], NodeRecord],
        options: IndexOptions,
        held_fn: Callable[[], Iterable[tuple[BlockKey, Tier]]],
    ) -> None:
        """``record_fn`` returns the node's current record (node_id and epoch never change); ``held_fn``
        returns every block with its fastest tier."""
        self.connected = False
        self.listeners: list[Listener] = []
        self.superseded = False  # another process has our node id in a newer epoch: publish nothing more
        self._index = index
        self._record_fn = record_fn
        self._held_fn = held_fn
        self._ttl_s = options.lease_ttl_s
        self._interval_s = options.publish_interval_s
        self._held: dict[BlockKey, Tier] = {}  # as in the index once ``_pending`` is published
        self._pending: dict[BlockKey, Tier | None] = {}  # None: removed
        self._collecting = False  # changes go to ``_pending``: from registering until Redis is lost
        self._complete = False  # every block held at registration is published
        self._log_base = 0  # position of the oldest batch of our log
        self._log_blocks = 0  # changes in our log
        self._next_heartbeat = 0.0  # 0: the record was announced and is not published yet
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()  # nothing is left to publish
        self._task: asyncio.Task[None] | None = None

    def stored(self, key: BlockKey, tier: Tier = Tier.POOL) -> None:
        if self._held.get(key) is not tier:
            self._held[key] = tier
            self._change(key, tier)
            for listener in self.listeners:
                listener.stored(key, tier)

    def removed(self, key: BlockKey) -> None:
        if self._held.pop(key, None) is not None:
            self._change(key, None)
            for listener in self.listeners:
                listener.removed(key)

    def retract(self, keys: Iterable[BlockKey]) -> int:
        """Publish the removal of those keys that this node does not hold, whatever the index says: another
        node was told of them. Only the owner can do that without a race. Returns how many."""
        stale = [key for key in keys if key not in self._held]
        for key in stale:
            self._change(key, None)
        return len(stale)

    def announce(self) -> None:
        """Publish the node's record now, not at the next heartbeat."""
        self._idle.clear()
        self._next_heartbeat = 0.0
        self._wake.set()

    def _change(self, key: BlockKey, tier: Tier | None) -> None:
        self._idle.clear()
        if self._collecting:
            self._pending[key] = tier
            self._wake.set()

    async def flush(self) -> None:
        """Wait until everything so far is in Redis, however long Redis is lost."""
        await self._idle.wait()

    async def start(self) -> None:
        """Register. Returns after the first attempt: ``connected`` tells its outcome; attempts go on."""
        try:
            await self._register()
        except (IndexUnavailable, EpochSuperseded) as error:
            self._lost(error)
        self._task = vital(self._run(), "index publisher")

    async def close(self) -> None:
        """Leave the index, if Redis answers within a second."""
        if self._task is None:
            return
        await cancel_and_wait(self._task)
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
                # NodeUnknown: Redis answers, but dropped this node or lost its data: do not wait.
                if not isinstance(error, NodeUnknown):
                    await asyncio.sleep(_RETRY_S[min(attempt, len(_RETRY_S) - 1)])
                    attempt += 1

    async def _register(self) -> None:
        self._held = dict(self._held_fn())
        self._pending = dict(self._held)
        self._collecting = True
        self._complete = not self._held
        self._idle.clear()
        # Before the call: what is announced during it needs a heartbeat.
        self._next_heartbeat = time.monotonic() + self._ttl_s / 3
        base = await self._index.register(self._record_fn(), self._ttl_s, complete=self._complete)
        metrics.registrations.inc()
        self._log_base, self._log_blocks = base, 0
        self._wake.set()
        self._set_connected(True)

    def _lost(self, error: Exception) -> None:
        self._collecting = False
        self._pending = {}
        self._idle.clear()
        self.superseded = isinstance(error, EpochSuperseded)
        level = logging.ERROR if self.superseded else logging.WARNING
        if self.connected or self._task is None:
            failures.count(FailureClass.INDEX, "lost")
            until = "any more" if self.superseded else "for now"
            _log.log(level, "this node's blocks are not published %s: %s", until, error)
        self._set_connected(False)

    def _set_connected(self, connected: bool) -> None:
        self.connected = connected
        metrics.publisher_connected.set(connected)

    async def _publish_forever(self) -> None:
        while True:
            await self._heartbeat_if_due()
            await self._publish_pending()
            await self._tidy_log()
            if not self._pending and self._next_heartbeat:
                self._idle.set()
            await self._pause()

    async def _pause(self) -> None:
        """Wait for a change, then a little longer, so that one call carries many."""
        try:
            async with asyncio.timeout(max(self._next_heartbeat - time.monotonic(), 0.0)):
                await self._wake.wait()
                await asyncio.sleep(self._interval_s)
        except TimeoutError:
            pass
        self._wake.clear()

    async def _heartbeat_if_due(self) -> None:
        if time.monotonic() >= self._next_heartbeat:
            # Before the call: what is announced during it needs another one.
            self._next_heartbeat = time.monotonic() + self._ttl_s / 3
            await self._index.heartbeat(self._record_fn(), self._ttl_s)

    async def _publish_pending(self) -> None:
        # Later changes are published after these, so a key's changes stay in order.
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
        """Keep our log in Redis within 1.5 times its live entries: append those of its oldest batches that
        are still true, and drop these batches."""
        record = self._record_fn()
        while self._log_blocks > 1.5 * len(self._held) + 8 * BATCH_BLOCKS:
            try:
                page = await self._index.read_log(record.node_id, self._log_base, _TIDY_BATCHES)
                if page is None or page.epoch != record.epoch or page.base != self._log_base:
                    raise NodeUnknown(record.node_id, record.epoch)
                if b"" in page.batches:  # what is not ours was refused
                    raise NodeUnknown(record.node_id, record.epoch)
                named = [
                    (BlockKey(key), op)
                    for batch in page.batches
                    for op, packed in decode(batch)
                    for key in split(packed)
                ]
            except EntryCorrupt as error:
                # Registering again replaces the record and the log.
                skipped("the log", record.node_id, error)
                raise NodeUnknown(record.node_id, record.epoch) from error
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
