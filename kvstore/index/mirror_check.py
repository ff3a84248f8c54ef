"""Comparison of a mirror with Redis, without stopping either."""

from __future__ import annotations

import asyncio
import contextlib
import logging

from moonpool.kvstore.blocks.keys import BlockKey
from moonpool.kvstore.blocks.tier import Tier
from moonpool.kvstore.errors import ChangesCorrupt, EntryCorrupt
from moonpool.kvstore.index import metrics
from moonpool.kvstore.index.follower import Follower
from moonpool.kvstore.index.mirror_state import MirrorState
from moonpool.kvstore.index.redis.entries import LogPage
from moonpool.kvstore.index.redis.kv_index import KVIndex, replay

_log = logging.getLogger(__name__)

# A round compares one block in this many, of every node: a lost batch or node shows in the first round, a
# single wrong block within all of them.
NUM_PARTS = 64


class MirrorCheck:
    """Read nodes' logs as of some event, wait until the copy has applied it, and compare the blocks that did
    not change meanwhile. The follower reads nodes that differ again."""

    def __init__(self, index: KVIndex, copy: MirrorState, follower: Follower) -> None:
        self._index = index
        self._copy = copy
        self._follower = follower
        self._turn = 0

    async def compare_next(self) -> int:
        """Compare the next part of every node's blocks."""
        self._turn += 1
        return await self.compare(self._turn % NUM_PARTS, NUM_PARTS)

    async def compare(self, part: int, num_parts: int) -> int:
        """How many blocks of this part differ. Raises ``IndexUnavailable``."""
        differing = await self._nodes_that_differ()
        num_blocks = 0
        for node_id in [*self._copy.nodes]:
            if count := await self._compare_node(node_id, part, num_parts):
                differing.add(node_id)
                num_blocks += count
        metrics.mirror_checks.inc()
        metrics.mirror_difference.set(num_blocks)
        metrics.mirror_differences.inc(num_blocks)
        self._follower.suspects |= differing
        # Nodes that cannot be read were named when that was found.
        if differing := differing - self._index.unreadable.keys():
            _log.warning(
                "the mirror differs from Redis in %d of the blocks looked at (one in %d); read again: %s",
                num_blocks,
                num_parts,
                ", ".join(sorted(differing)),
            )
        return num_blocks

    async def _nodes_that_differ(self) -> set[str]:
        copy, tip = self._copy, await self._index.watch()
        listed = set(await self._index.node_ids())
        if not await self._reached(tip.seq, tip.instance):
            return set()
        # Read again: nodes that joined or left in between do not differ.
        again = set(await self._index.node_ids())
        known = copy.nodes.keys() - copy.missing.keys()
        return (listed & again) - copy.nodes.keys() | (known - listed - again)

    async def _compare_node(self, node_id: str, part: int, num_parts: int) -> int:
        copy = self._copy
        if node_id in copy.missing or not copy.blocks.is_settled(node_id):
            return 0
        instance, changed = self._follower.instance, copy.watch(node_id)
        try:
            held, page = await self._read(node_id, part, num_parts)
            if page is None or not page.complete or not await self._reached(page.seq, instance):
                return 0
            record = copy.nodes.get(node_id)
            if record is None or record.epoch != page.epoch or not copy.is_watched(node_id, changed):
                return 0  # it left or registered again meanwhile
            known = copy.blocks.part_of(node_id, part, num_parts)
        finally:
            copy.unwatch(node_id)
        keys = (held.keys() | known.keys()) - changed
        return sum(held.get(BlockKey(key)) != known.get(key) for key in keys)

    async def _read(
        self, node_id: str, part: int, num_parts: int
    ) -> tuple[dict[BlockKey, Tier], LogPage | None]:
        """The log's blocks of this part, and its last page: empty, as of ``page.seq``."""
        held: dict[BlockKey, Tier] = {}
        position, epoch = 0, -1
        while True:
            try:
                page = await self._index.read_log(node_id, position)
            except EntryCorrupt:
                return held, None
            if page is None:
                return held, None
            if page.epoch != epoch or page.base > position > 0:
                held, epoch, position = {}, page.epoch, page.base
            for batch in page.batches:
                # The follower has logged what is corrupt, and skipped it as here.
                with contextlib.suppress(ChangesCorrupt):
                    replay([batch], held, part, num_parts)
            if not page.batches:
                return held, page
            position = max(position, page.base) + len(page.batches)
            await asyncio.sleep(0)

    async def _reached(self, seq: int, instance: str) -> bool:
        """Wait until the copy has applied this event. False: the index has another instance now."""
        follower = self._follower
        while follower.instance == instance and follower.seq < seq:
            follower.advanced.clear()
            await follower.advanced.wait()
        return follower.instance == instance
