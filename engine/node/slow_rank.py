"""A node looks at its ranks, and leaves its requests to other nodes when one of them stays slow."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable

from moonpool.engine.errors import RankSlow
from moonpool.engine.node.metrics import RANK_DETECT_SECONDS, SLOW
from moonpool.engine.node.slow_rank_decision import LOOK_S, WINDOW_S, Look, Remedy, Verdict, decide
from moonpool.engine.ranks.rank_times import RankTimes
from moonpool.kvstore.errors import IndexUnavailable
from moonpool.kvstore.index.redis.kv_index import KVIndex
from moonpool.kvstore.index.redis.node_record import NodeRecord, stages_of

log = logging.getLogger(__name__)


class SlowRankWatch:
    """Of one life of a node. ``due`` is set once the node should drain; ``found`` says why."""

    def __init__(
        self,
        policy: Remedy,
        times: Callable[[], RankTimes | None],
        index: KVIndex,
        record: Callable[[], NodeRecord],
        *,
        regrouped_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``record``: the node's current one. ``regrouped_s``: when its ranks were replaced, by ``clock``."""
        self.due = asyncio.Event()
        self.found: RankSlow | None = None
        self._policy = policy
        self._times = times
        self._index = index
        self._record = record
        self._regrouped_s = regrouped_s
        self._clock = clock
        self._began_s = clock()
        self._looks: deque[Look] = deque(maxlen=int(2 * WINDOW_S / LOOK_S))
        self._obstacle = ""

    async def run(self) -> None:
        """Look until the node should drain."""
        while self.found is None and self._policy is not Remedy.OFF:
            await asyncio.sleep(LOOK_S)
            times = self._times()
            if times is not None and times.is_judged():
                await self._look(times)

    async def _look(self, times: RankTimes) -> None:
        slow, now_s = times.slowest(), self._clock()
        self._looks.append(Look(now_s, None if slow is None else slow.rank))
        verdict = decide(
            self._policy,
            self._looks,
            now_s=now_s,
            life_s=now_s - self._began_s,
            regrouped_s=None if self._regrouped_s is None else now_s - self._regrouped_s,
        )
        if verdict is None or await self._is_alone():
            return
        self._found(verdict, times.sentence(), now_s)

    async def _is_alone(self) -> bool:
        try:
            obstacle = why_alone(self._record(), (await self._index.nodes()).values())
        except IndexUnavailable as error:
            obstacle = str(error)
        if obstacle and obstacle != self._obstacle:
            log.warning("a rank stays slow, and the node serves on: %s", obstacle)
        self._obstacle = obstacle
        return bool(obstacle)

    def _found(self, verdict: Verdict, sentence: str, now_s: float) -> None:
        took_s = now_s - verdict.since_s
        regroups = verdict.remedy is Remedy.REGROUP
        RANK_DETECT_SECONDS.labels(SLOW).observe(took_s)
        self.found = RankSlow(verdict.rank, f"for {took_s:.0f} s, {sentence}", regroups=regroups)
        log.error("%s; the node drains to %s", self.found, verdict.remedy)
        self.due.set()


def why_alone(own: NodeRecord, nodes: Iterable[NodeRecord]) -> str:
    """Say why no other node should get this one's requests. Empty: others serve all its stages and have no
    slow rank, and no node of the model is draining."""
    others = [node for node in nodes if node.node_id != own.node_id and node.model == own.model]
    if draining := [node.node_id for node in others if node.state == "draining"]:
        return f"{draining[0]} is draining, too"
    for stage in stages_of(own.role):
        if not any(
            node.state == "ready" and stage in stages_of(node.role) and not node.extra.get("slow_rank")
            for node in others
        ):
            return f"no other node is ready to {stage} without a slow rank"
    return ""
