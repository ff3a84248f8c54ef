"""Keeps a copy of the index equal to Redis: read every node's log once, then follow the stream.

A gap in the stream, another instance of the index or a different history makes it read everything again; the
former state stays in use and is replaced node by node.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from moonpool.kvstore.errors import ChangesCorrupt, EntryCorrupt, EntryRefused
from moonpool.kvstore.index import metrics
from moonpool.kvstore.index.mirror_state import MirrorState
from moonpool.kvstore.index.redis.entries import Event, skipped
from moonpool.kvstore.index.redis.kv_index import KVIndex, StreamPosition

_log = logging.getLogger(__name__)

# Longest turn before other tasks of the loop run.
_SLICE_S = 0.002


class LeaseWatch:
    """Decides when an expired lease may be believed. A heartbeat can also be late because Redis or this
    process stood still: only after a whole lease without a break in Redis's answers may a silent node be
    dropped."""

    def __init__(self, ttl_s: float) -> None:
        self._ttl_s = ttl_s
        self._since: float | None = None
        self._last_s = 0.0

    def disconnected(self) -> None:
        self._since = None

    def answered(self, asked_s: float, now_s: float) -> bool:
        """Redis answered at ``now_s`` a question of ``asked_s``. True: expired leases may be believed."""
        most_s = self._ttl_s / 2
        if self._since is None or asked_s - self._last_s > most_s or now_s - asked_s > most_s:
            self._since = now_s
        self._last_s = now_s
        return now_s - self._since >= self._ttl_s


class MirrorBehind(Exception):
    """The stream cannot be followed from the copy's position. ``connect`` reads everything again."""

    def __init__(self, cause: str, message: str) -> None:
        super().__init__(message)
        self.cause = cause


class Follower:
    """``connect`` and then ``follow``, from one task; both raise ``IndexUnavailable``."""

    def __init__(
        self,
        index: KVIndex,
        copy: MirrorState,
        *,
        lease_ttl_s: float,
        clock: Callable[[], float],
        tick_s: float,
    ) -> None:
        self.instance = ""
        self.seq = 0  # of the newest event applied
        self.lag_s = 0.0
        self.advanced = asyncio.Event()  # set whenever something was applied
        self.suspects: set[str] = set()  # nodes to read again at the next tick
        self._index = index
        self._copy = copy
        self._ttl_s = lease_ttl_s
        self._clock = clock
        self._tick_s = min(tick_s, lease_ttl_s / 6)
        self._leases = LeaseWatch(lease_ttl_s)
        self._last: Event | None = None  # the newest event applied, to recognise the history
        self._cause = "start"  # why everything must be read; empty: not needed
        self._behind: tuple[int, float] | None = None  # a number not reached yet, and when it was seen
        self._next_tick = 0.0

    def disconnected(self, cause: str = "") -> None:
        """Redis does not answer, or (with a cause) everything must be read again."""
        self._leases.disconnected()
        self._cause = cause or self._cause

    async def connect(self) -> None:
        tip = await self._index.watch()
        cause = self._cause or await self._resume_obstacle(tip)
        if cause:
            metrics.mirror_snapshots.labels(cause).inc()
            await self._read_all(tip, keep_missing=cause not in ("start", "gap"))
            self._cause = ""
        self._next_tick = 0.0
        self.advanced.set()

    async def _resume_obstacle(self, tip: StreamPosition) -> str:
        """The cause to read everything; empty: the stream continues from the last applied event."""
        if tip.instance != self.instance:
            return "instance"
        # After a fail-over the tail may be lost and its numbers reused: compare the event itself.
        if tip.seq < self.seq or (self._last is not None and await self._index.event(self.seq) != self._last):
            return "history"
        return ""

    async def _read_all(self, tip: StreamPosition, keep_missing: bool) -> None:
        """Replace the state node by node. Concurrent changes are in the logs, the stream or both; applying
        them twice is harmless."""
        copy, found = self._copy, set()
        copy.forget_events()
        for node_id in await self._index.node_ids():
            if await self._read_node(node_id):
                found.add(node_id)
        for node_id in copy.nodes.keys() - found:
            if keep_missing or node_id in copy.missing:
                # Redis lost its data, not the nodes: they are about to register again.
                copy.missing.setdefault(node_id, self._clock() + 2 * self._ttl_s)
            else:
                copy.leave(node_id, "left")
        self.instance, self.seq, self._last = tip.instance, tip.seq, None
        self._behind = None  # a number of the stream before

    async def _read_node(self, node_id: str) -> bool:
        """Replay one node's log, without what cannot be used. False: the node is gone, or its record cannot
        be used and never could."""
        position, life = 0, (-1, 0)
        while True:
            try:
                page = await self._index.read_log(node_id, position)
            except EntryCorrupt:
                # Its next heartbeat replaces the record. ``MirrorCheck`` has it read again.
                return node_id in self._copy.nodes
            if page is None:
                return False
            if (page.epoch, page.life) != life or page.base > position > 0:
                # The first page, or the log was trimmed or restarted meanwhile.
                try:
                    self._copy.begin(page)
                except EntryCorrupt as error:
                    self._index.skip_record(node_id, b"%d %d" % (page.epoch, page.life), error)
                    return node_id in self._copy.nodes
                self._index.unreadable.pop(node_id, None)
                began, position, life = position, page.base, (page.epoch, page.life)
                if began > page.base:
                    continue  # another log: its first batches were not asked for
            for batch in page.batches:
                try:
                    self._copy.change(node_id, batch)
                except ChangesCorrupt as error:
                    skipped("a batch in the log", node_id, error)
            position = max(position, page.base) + len(page.batches)
            await asyncio.sleep(0)
            if not page.batches:
                self._copy.read_to(page, position)
                return True

    async def follow(self) -> None:
        """Run forever. Raises ``MirrorBehind``."""
        while True:
            if self._clock() >= self._next_tick:
                await self._tick()
            wait_s = max(self._next_tick - self._clock(), 0.001)
            events = await self._index.read_events(self.seq, count=256, block_s=wait_s)
            started = self._clock()
            for event in events:
                if event.seq != self.seq + 1:
                    raise MirrorBehind(
                        "gap", f"events {self.seq + 1} to {event.seq - 1} are gone from the stream"
                    )
                self._copy.apply(event)
                self.seq, self._last = event.seq, event
                if self._clock() - started > _SLICE_S:
                    await asyncio.sleep(0)
                    started = self._clock()
            if not events and self._behind is not None and self.seq < self._behind[0]:
                raise MirrorBehind("gap", f"events up to {self._behind[0]} are gone from the stream")
            if events:
                metrics.mirror_events.inc(len(events))
                self.advanced.set()

    async def _tick(self) -> None:
        """A few times a second: check the instance, the lag and the leases."""
        copy, asked_s = self._copy, self._clock()
        tip = await self._index.watch()
        now_s = self._clock()
        self._next_tick = now_s + self._tick_s
        if tip.instance != self.instance:
            raise MirrorBehind("instance", "Redis has lost the index it had")
        if tip.seq < self.seq:
            raise MirrorBehind("history", f"the stream ends at {tip.seq}, {self.seq} was seen")
        if self._leases.answered(asked_s, now_s):
            await self._drop_lapsed(tip)
        for node_id in [name for name, until_s in copy.missing.items() if until_s <= now_s]:
            copy.leave(node_id, "lapsed")
        self.suspects |= copy.doubted
        copy.doubted = set()
        while self.suspects:
            node_id = next(iter(self.suspects))
            is_there = await self._read_node(node_id)
            self.suspects.discard(node_id)  # only now: Redis may not have answered
            if not is_there and node_id in copy.nodes:
                copy.leave(node_id, "left")
        if self._behind is None or self.seq >= self._behind[0]:
            self._behind = (tip.seq, now_s) if self.seq < tip.seq else None
        self.lag_s = now_s - self._behind[1] if self._behind else 0.0
        metrics.mirror_lag.set(self.lag_s)
        metrics.mirror_blocks.set(copy.blocks.num_blocks)
        metrics.mirror_nodes.set(len(copy.nodes))

    async def _drop_lapsed(self, tip: StreamPosition) -> None:
        copy = self._copy
        for node_id in tip.lapsed:
            record = copy.nodes.get(node_id)
            if record is None:
                # It died while no mirror ran, or it left a moment ago.
                if await self._index.drop_unread(node_id):
                    metrics.lapsed_nodes.inc()
                    _log.warning("node %s dropped: its lease ended before this mirror knew it", node_id)
            elif await self._index.drop(node_id, record.epoch, life=copy.seen[node_id].life):
                _log.warning("node %s (epoch %d) dropped: its lease ended", node_id, record.epoch)
        for node_id in [name for name, seen in copy.seen.items() if self._index.expired(seen.number)]:
            if node_id not in copy.missing:
                overdue = EntryRefused("expired", "its lease in Redis goes on, its record was not renewed")
                skipped("the lease", node_id, overdue)
                copy.leave(node_id, "lapsed")
