"""A copy of the index in this process, kept up to date by the stream of changes.

It reads every node's log once, then follows the stream. A hole in the stream's numbers, another instance of
the index, or a history that differs from the one seen makes it read everything again; what it knew meanwhile
stays in use and is replaced node by node. While Redis is lost it keeps what it has.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence

from kvstore import metrics
from kvstore.block_map import BlockMap
from kvstore.changes import REMOVED, decode
from kvstore.errors import ChangesCorrupt, IndexUnavailable
from kvstore.index import Event, KVIndex, Tip
from kvstore.keys import BlockKey
from kvstore.lease_watch import LeaseWatch
from kvstore.node_record import NodeRecord, RecordCorrupt
from kvstore.prefix_map import PrefixMap
from kvstore.tier import Tier

_log = logging.getLogger(__name__)

# Work done in one go before the loop's other tasks get their turn.
_SLICE_S = 0.002
_RETRY_S = (0.02, 0.05, 0.1, 0.2, 0.5)


class _Behind(Exception):
    """The stream cannot be followed from where the mirror stands."""

    def __init__(self, cause: str, message: str) -> None:
        super().__init__(message)
        self.cause = cause


class IndexMirror:
    """``nodes`` and ``longest_prefix`` answer at once from memory, whether Redis is there or not."""

    def __init__(
        self,
        index: KVIndex,
        *,
        lease_ttl_s: float = 3.0,
        on_joined: Callable[[NodeRecord], None] | None = None,
        on_heard: Callable[[NodeRecord], None] | None = None,
        on_left: Callable[[NodeRecord, str], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
        tick_s: float = 0.5,
    ) -> None:
        """``lease_ttl_s``: the nodes' own; how long Redis must have been watched before a silent node is
        dropped. ``tick_s``: how often the stream's end and the leases are looked at.

        ``on_joined`` is called for every new life of a node, ``on_heard`` for every later record of one,
        ``on_left`` with the record and why; a node that
        comes back with a new epoch leaves first. Both run on the loop, after the mirror has changed.
        """
        self.nodes: dict[str, NodeRecord] = {}
        self.connected = False
        self.lag_s = 0.0
        self._index = index
        self._map = BlockMap()
        self._ttl_s = lease_ttl_s
        self._on_joined = on_joined or (lambda record: None)
        self._on_heard = on_heard or (lambda record: None)
        self._on_left = on_left or (lambda record, reason: None)
        self._clock = clock
        self._tick_s = min(tick_s, lease_ttl_s / 6)
        self._leases = LeaseWatch(lease_ttl_s)
        self._instance = ""
        self._seq = 0  # of the newest event applied
        self._last: Event | None = None  # that event, to recognise the history by
        self._cause = "start"  # why everything must be read; empty: it need not
        self._behind: tuple[int, float] | None = None  # a number not reached yet, and when it was seen
        self._missing: dict[
            str, float
        ] = {}  # nodes a new instance does not know (yet): until when they are kept
        self._next_tick = 0.0
        self._applied = asyncio.Event()
        self._sweep_due = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    # ------------------------------------------------------------------ questions

    def longest_prefix(self, keys: Sequence[BlockKey]) -> dict[str, int]:
        """How many leading blocks of the chain each node holds, in any tier; nodes with none are left out."""
        return self._map.longest_prefix(keys)

    def prefix_map(self, keys: Sequence[BlockKey], among: int = -1) -> PrefixMap:
        """The same for clusters of many nodes; ``among``: a mask of their slots' flags."""
        return self._map.prefix_map(keys, among)

    def slow_blocks(
        self, keys: Sequence[BlockKey], prefixes: Mapping[str, int]
    ) -> Mapping[str, tuple[int, int]]:
        """Of each node's prefix, as ``longest_prefix`` has it: blocks in host memory and on SSD. Nodes with
        neither are left out.
        """
        return self._map.slow_blocks(keys, prefixes)

    def slot_of(self, node_id: str) -> int:
        """The node's place in masks, for as long as it lives; -1: unknown."""
        return self._map.slot_of(node_id)

    def flag_of(self, node_id: str) -> int:
        """The bit that stands for the node in masks; 0: unknown."""
        return self._map.flag_of(node_id)

    def tier_of(self, node_id: str, key: BlockKey) -> Tier | None:
        """The fastest tier in which the node holds the block; None: it does not."""
        return self._map.tier_of(node_id, key)

    def num_blocks_of(self, node_id: str) -> int:
        """Blocks the node holds; 0 for an unknown node."""
        return self._map.num_held(node_id) if node_id in self.nodes else 0

    @property
    def num_blocks(self) -> int:
        return self._map.num_blocks

    @property
    def lag(self) -> float:
        """Seconds the mirror was behind the stream when last looked (a few times a second)."""
        return self.lag_s

    # ------------------------------------------------------------------ life

    async def start(self) -> None:
        """Read the index and follow it from now on. Raises ``IndexUnavailable``; nothing runs then."""
        await self._connect()
        self._tasks = [asyncio.create_task(self._run()), asyncio.create_task(self._sweep())]

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []
        self._set_connected(False)

    async def caught_up(self) -> None:
        """Wait until everything published before this call is in the mirror. Raises ``IndexUnavailable``."""
        tip = await self._index.watch()
        while self._seq < tip.seq or self._instance != tip.instance:
            self._applied.clear()
            await self._applied.wait()
        while self._map.sweep():  # noqa: ASYNC110 (it is the work)
            await asyncio.sleep(0)

    async def _run(self) -> None:
        attempt = 0
        try:
            while True:
                try:
                    if not self.connected:
                        await self._connect()
                    attempt = 0
                    await self._follow()
                except _Behind as behind:
                    _log.warning("index mirror reads everything again: %s", behind)
                    self._cause = behind.cause
                    self._set_connected(False)
                except IndexUnavailable as error:
                    if self.connected:
                        _log.warning("index mirror keeps what it has: %s", error)
                    self._set_connected(False)
                    await asyncio.sleep(_RETRY_S[min(attempt, len(_RETRY_S) - 1)])
                    attempt += 1
        except Exception:
            _log.exception("index mirror stopped; it keeps what it has")
            self._set_connected(False)
            raise

    async def _sweep(self) -> None:
        while True:
            await self._sweep_due.wait()
            if not self._map.sweep():
                self._sweep_due.clear()
            await asyncio.sleep(0)

    def _set_connected(self, connected: bool) -> None:
        self.connected = connected
        metrics.mirror_connected.set(connected)
        if not connected:
            self._leases.lost()

    # ------------------------------------------------------------------ reading everything

    async def _connect(self) -> None:
        tip = await self._index.watch()
        cause = self._cause or await self._why_not_resume(tip)
        if cause:
            metrics.mirror_snapshots.labels(cause).inc()
            await self._read_all(tip, keep_missing=cause not in ("start", "gap"))
            self._cause = ""
        self._set_connected(True)
        self._next_tick = 0.0
        self._applied.set()

    async def _why_not_resume(self, tip: Tip) -> str:
        """Empty when the stream goes on from the event last applied; else the cause to read everything."""
        if tip.instance != self._instance:
            return "instance"
        # After a fail-over the tail may be lost and its numbers given out again: compare the event itself.
        if tip.seq < self._seq or (
            self._last is not None and await self._index.event(self._seq) != self._last
        ):
            return "history"
        return ""

    async def _read_all(self, tip: Tip, keep_missing: bool) -> None:
        """Replace what is known, node by node. Changes made meanwhile are in the logs, in the stream, or in
        both; applying them twice is harmless."""
        found = set()
        for node_id in await self._index.node_ids():
            if await self._read_node(node_id):
                found.add(node_id)
        for node_id in self.nodes.keys() - found:
            if keep_missing:
                # A Redis that lost its data says nothing about the nodes. They are about to register again.
                self._missing.setdefault(node_id, self._clock() + 2 * self._ttl_s)
            else:
                self._leave(node_id, "left")
        self._instance, self._seq, self._last = tip.instance, tip.seq, None
        self._sweep_due.set()

    async def _read_node(self, node_id: str) -> bool:
        """Replay one node's log. False: it is gone."""
        position, epoch = 0, -1
        while True:
            page = await self._index.read_log(node_id, position)
            if page is None:
                return False
            if page.epoch != epoch or page.base > position > 0:
                # The first page, or the log has been cut or begun anew under our hands.
                self._join(page.record)
                epoch, position = page.epoch, page.base
            for batch in page.batches:
                self._apply_changes(node_id, batch)
            position = max(position, page.base) + len(page.batches)
            await asyncio.sleep(0)
            if not page.batches:
                if page.complete:
                    self._map.complete(node_id)
                    self._sweep_due.set()
                return True

    # ------------------------------------------------------------------ following

    async def _follow(self) -> None:
        while True:
            if self._clock() >= self._next_tick:
                await self._tick()
            wait_s = max(self._next_tick - self._clock(), 0.001)
            events = await self._index.read_events(self._seq, count=256, block_s=wait_s)
            started = self._clock()
            for event in events:
                if event.seq != self._seq + 1:
                    raise _Behind(
                        "gap", f"events {self._seq + 1} to {event.seq - 1} are gone from the stream"
                    )
                self._apply_or_skip(event)
                if self._clock() - started > _SLICE_S:
                    await asyncio.sleep(0)
                    started = self._clock()
            if not events and self._behind is not None and self._seq < self._behind[0]:
                raise _Behind("gap", f"events up to {self._behind[0]} are gone from the stream")
            if events:
                metrics.mirror_events.inc(len(events))
                self._applied.set()

    async def _tick(self) -> None:
        """A few times a second: is it still the same index, how far behind are we, whose lease has ended?"""
        asked_s = self._clock()
        tip = await self._index.watch()
        now_s = self._clock()
        self._next_tick = now_s + self._tick_s
        if tip.instance != self._instance:
            raise _Behind("instance", "Redis has lost the index it had")
        if tip.seq < self._seq:
            raise _Behind("history", f"the stream ends at {tip.seq}, {self._seq} was seen")
        if self._leases.answered(asked_s, now_s):
            await self._drop_lapsed(tip)
        for node_id in [name for name, until_s in self._missing.items() if until_s <= now_s]:
            self._leave(node_id, "lapsed")
        if self._behind is None or self._seq >= self._behind[0]:
            self._behind = (tip.seq, now_s) if self._seq < tip.seq else None
        self.lag_s = now_s - self._behind[1] if self._behind else 0.0
        metrics.mirror_lag.set(self.lag_s)
        metrics.mirror_blocks.set(self.num_blocks)
        metrics.mirror_nodes.set(len(self.nodes))

    async def _drop_lapsed(self, tip: Tip) -> None:
        for node_id in tip.lapsed:
            record = self.nodes.get(node_id)
            if record is not None and await self._index.drop(node_id, record.epoch):
                metrics.lapsed_nodes.inc()
                _log.warning("node %s (epoch %d) dropped: its lease ended", node_id, record.epoch)

    # ------------------------------------------------------------------ applying

    def _apply_or_skip(self, event: Event) -> None:
        try:
            self._apply(event)
        except (ChangesCorrupt, RecordCorrupt) as error:
            metrics.mirror_corrupt_events.inc()
            _log.error("event %d of node %s skipped: %s", event.seq, event.node_id, error)
        self._seq, self._last = event.seq, event

    def _apply(self, event: Event) -> None:
        node_id = event.node_id
        known = self.nodes.get(node_id)
        if event.kind == b"J":
            self._join(NodeRecord.from_json(event.data))
        elif known is None or known.epoch != event.epoch:
            return  # of a life that is over, or (just after everything was read) not begun yet
        elif event.kind == b"B":
            self._apply_changes(node_id, event.data)
        elif event.kind == b"H":
            record = self.nodes[node_id] = NodeRecord.from_json(event.data)
            self._on_heard(record)
        elif event.kind == b"C":
            self._map.complete(node_id)
            self._sweep_due.set()
        elif event.kind == b"L":
            self._leave(node_id, event.data.decode())

    def _apply_changes(self, node_id: str, changes: bytes) -> None:
        for op, packed in decode(changes):
            if op == REMOVED:
                self._map.remove(node_id, packed)
            else:
                self._map.store(node_id, packed, Tier(op))

    def _join(self, record: NodeRecord) -> None:
        """A node registered: for the first time, in a new life, or anew in the same one (its blocks
        follow)."""
        node_id = record.node_id
        known = self.nodes.get(node_id)
        if known is not None and known.epoch > record.epoch and node_id not in self._missing:
            return
        self._missing.pop(node_id, None)
        if known is not None and known.epoch == record.epoch:
            self.nodes[node_id] = record
            self._map.begin(node_id)
            self._on_heard(record)
            return
        if known is not None:
            self._leave(node_id, "restarted")
        self.nodes[node_id] = record
        self._map.join(node_id)
        self._on_joined(record)

    def _leave(self, node_id: str, reason: str) -> None:
        record = self.nodes.pop(node_id)
        self._missing.pop(node_id, None)
        self._map.leave(node_id)
        self._sweep_due.set()
        self._on_left(record, reason)
