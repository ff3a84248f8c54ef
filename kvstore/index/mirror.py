"""A copy of the index in this process, updated by the stream of changes; it stays in use while Redis is lost.

``index.follower`` reads and follows it, ``index.mirror_check`` compares it with Redis.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping

from moonpool.kvstore.blocks.tier import Tier
from moonpool.kvstore.errors import IndexUnavailable
from moonpool.kvstore.index import metrics
from moonpool.kvstore.index.follower import Follower, MirrorBehind
from moonpool.kvstore.index.mirror_check import MirrorCheck
from moonpool.kvstore.index.mirror_state import MirrorState
from moonpool.kvstore.index.redis.kv_index import KVIndex
from moonpool.kvstore.index.redis.node_record import NodeRecord
from moonpool.runtime.failures import FailureClass
from moonpool.runtime.observing import failures
from moonpool.runtime.service.vital import cancel_and_wait, restarted

_log = logging.getLogger(__name__)

_RETRY_S = (0.02, 0.05, 0.1, 0.2, 0.5)


class IndexMirror:
    """``nodes`` and the queries of ``BlockMap`` are answered from memory, with Redis or without."""

    def __init__(
        self,
        index: KVIndex,
        *,
        lease_ttl_s: float = 3.0,
        on_joined: Callable[[NodeRecord], None] = lambda record: None,
        on_left: Callable[[NodeRecord, str], None] = lambda record, reason: None,
        on_updated: Callable[[NodeRecord], None] = lambda record: None,
        on_status: Callable[[str], None] = lambda sentence: None,
        clock: Callable[[], float] = time.monotonic,
        tick_s: float = 0.5,
        check_interval_s: float = 10.0,
    ) -> None:
        """``lease_ttl_s``: the nodes' lease; how long Redis must answer before a silent node is dropped.
        ``tick_s``: interval of looking at the stream's end and the leases. ``check_interval_s``: interval of
        comparing a part of the copy with Redis.

        ``on_joined`` is called for every new epoch of a node, ``on_updated`` for every later record,
        ``on_left`` with the record and the reason; a node that returns in a new epoch leaves first. All run
        on the loop, after the mirror has changed. ``on_status`` gets a sentence when the mirror loses the
        index, falls behind, differs, or is in step again.
        """
        self.connected = False
        self._index = index
        self._status = on_status
        self._sweep_due = asyncio.Event()
        self._copy = MirrorState(self._sweep_due.set, on_joined, on_updated, on_left)
        self._follower = Follower(index, self._copy, lease_ttl_s=lease_ttl_s, clock=clock, tick_s=tick_s)
        self._check = MirrorCheck(index, self._copy, self._follower)
        self._check_interval_s = check_interval_s
        # Queries of ``BlockMap``. Attributes, not methods: a call takes microseconds, for every request.
        blocks = self._copy.blocks
        self.longest_prefix = blocks.longest_prefix
        self.prefix_map = blocks.prefix_map
        self.slow_blocks = blocks.slow_blocks
        self.slot_of = blocks.slot_of
        self.flag_of = blocks.flag_of
        self.tier_of = blocks.tier_of
        self.tiers_of = blocks.tiers_of
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def nodes(self) -> Mapping[str, NodeRecord]:
        return self._copy.nodes

    def held_by(self, node_id: str, part: int = 0, num_parts: int = 1) -> dict[bytes, Tier]:
        """The node's blocks with a last key byte of ``part`` modulo ``num_parts``; empty for an unknown node.

        Takes a microsecond a block.
        """
        return self._copy.blocks.part_of(node_id, part, num_parts) if node_id in self.nodes else {}

    def num_blocks_of(self, node_id: str) -> int:
        return self._copy.blocks.num_held(node_id) if node_id in self.nodes else 0

    @property
    def num_blocks(self) -> int:
        return self._copy.blocks.num_blocks

    @property
    def lag_s(self) -> float:
        """Seconds the mirror was behind the stream at the last look, a few times a second."""
        return self._follower.lag_s

    async def start(self) -> None:
        """Read the index and follow it. Raises ``IndexUnavailable``: nothing runs then."""
        await self._follower.connect()
        self._set_connected(True)
        self._tasks = [
            restarted(self._run, "index mirror", on_failure=lambda: self._set_connected(False, "failed")),
            restarted(self._sweep, "sweep of the index mirror"),
            restarted(self._compare, "check of the index mirror"),
        ]

    async def close(self) -> None:
        await cancel_and_wait(*self._tasks)
        self._tasks = []
        self._set_connected(False)

    async def caught_up(self) -> None:
        """Wait until everything published before this call is in the mirror. Raises ``IndexUnavailable``."""
        tip, follower = await self._index.watch(), self._follower
        while follower.seq < tip.seq or follower.instance != tip.instance:
            follower.advanced.clear()
            await follower.advanced.wait()
        while self._copy.blocks.sweep():  # noqa: ASYNC110 (it is the work)
            await asyncio.sleep(0)

    async def check(self) -> int:
        """Compare everything with Redis now. Returns how many blocks differed; their nodes are read again.
        Raises ``IndexUnavailable``."""
        return await self._check.compare(0, 1)

    async def _run(self) -> None:
        attempt = 0
        while True:
            try:
                if not self.connected:
                    await self._follower.connect()
                    self._set_connected(True)
                    self._status(
                        f"in step with Redis again: {self.num_blocks:,} blocks of {len(self.nodes)} nodes"
                    )
                attempt = 0
                await self._follower.follow()
            except MirrorBehind as behind:
                _log.warning("index mirror reads everything again: %s", behind)
                self._set_connected(False, behind.cause)
                self._status(f"everything is read again ({behind.cause}): {behind}")
            except IndexUnavailable as error:
                if self.connected:
                    failures.count(FailureClass.INDEX, "lost")
                    _log.warning("index mirror keeps what it has: %s", error)
                    self._status(f"keeps what it has: {error}")
                self._set_connected(False)
                await asyncio.sleep(_RETRY_S[min(attempt, len(_RETRY_S) - 1)])
                attempt += 1

    async def _sweep(self) -> None:
        while True:
            await self._sweep_due.wait()
            if not self._copy.blocks.sweep():
                self._sweep_due.clear()
            await asyncio.sleep(0)

    async def _compare(self) -> None:
        while True:
            await asyncio.sleep(self._check_interval_s)
            if self.connected:
                try:
                    if num_blocks := await self._check.compare_next():
                        self._status(f"{num_blocks:,} blocks differ from Redis: their nodes are read again")
                except IndexUnavailable as error:
                    _log.warning("the mirror was not compared with Redis: %s", error)

    def _set_connected(self, connected: bool, cause: str = "") -> None:
        self.connected = connected
        metrics.mirror_connected.set(connected)
        if not connected:
            self._follower.disconnected(cause)
