"""Models tried beside others, under their names: which side a request is for, what came of it, the end."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Final
from zlib import crc32

from moonpool.conductor.canary.decision import Decision, Tally, Verdict, decide
from moonpool.conductor.canary.record import (
    CANDIDATE,
    PROMOTED,
    ROLLED_BACK,
    SIDES,
    STABLE,
    Canary,
    CanaryRecords,
    FormerShare,
    new_sides,
)
from moonpool.conductor.errors import DeadlineExceeded, RequestFailed
from moonpool.conductor.fleet.errors import FleetUnchanged
from moonpool.conductor.observing import route_metrics as metrics
from moonpool.conductor.observing.recent_requests import RequestRecord
from moonpool.conductor.observing.slo import Slo
from moonpool.kvstore.errors import IndexUnavailable
from moonpool.kvstore.index.redis.kv_index import KVIndex
from moonpool.runtime.errors import failure_of
from moonpool.runtime.failures import FailureClass
from moonpool.runtime.observing import audit
from moonpool.runtime.service.vital import cancel_and_wait, restarted

log = logging.getLogger(__name__)

MOST_TENANTS: Final = 64
MOST_SHARES: Final = 32
# How often the records are read, the counts written, and a canary is judged.
_POLL_S = 0.5


@dataclass(slots=True)
class Trial:
    """A request that takes part in a canary. ``failed``: the candidate gave no answer, and the model before
    it was asked instead."""

    canaries: Canaries
    canary: Canary
    side: str
    failed: bool = False

    def ended(self, record: RequestRecord, error: Exception | None) -> None:
        """Count the request, by its complete record. ``error``: what it ended with, in a stream too.

        Neither the client's errors count, nor requests that were cancelled before a first token was due.
        """
        if error is not None and not _is_ours(error):
            return
        slo, tally = self.canary.slo, Tally(requests=1)
        if self.failed or error is not None:
            tally.errors, outcome = 1, "error"
        elif record.ttft_s or (record.status == "cancelled" and record.e2e_s > slo.ttft_s):
            tally.ttft_s = record.ttft_s or record.e2e_s
            tally.ttft_within = int(tally.ttft_s <= slo.ttft_s)
            if record.tpot_s:
                tally.decoded, tally.tbt_s = 1, record.tpot_s
                tally.tbt_within = int(record.tpot_s <= slo.tbt_s)
            outcome = "within" if tally.ttft_within and tally.tbt_within == tally.decoded else "late"
        else:
            return
        metrics.canary_requests.labels(self.canary.name, self.side, outcome).inc()
        self.canaries.add(self.canary, self.side, tally)


class Canaries:
    """Of one cluster, at each of its conductors. Any of them concludes an automatic one.

    Without Redis, requests go on as they did, and nothing is begun or concluded. What was counted meanwhile
    is added later.
    """

    def __init__(
        self,
        index: KVIndex,
        conductor_id: str,
        on_event: Callable[[str, str, str], None],
        unix_clock: Callable[[], float] = time.time,
    ) -> None:
        """``on_event``: called with ``canary``, the model's name and a sentence."""
        self._records = CanaryRecords(index)
        self._conductor_id = conductor_id
        self._on_event = on_event
        self._unix_clock = unix_clock
        self._known: Mapping[str, Canary] = {}
        self._own: dict[str, dict[str, Tally]] = {}  # what this conductor counted, by id
        self._total: dict[str, dict[str, Tally]] = {}  # of all conductors, by id, of those that run
        self._turn = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Read the records, so that no request comes before. Raises ``IndexUnavailable``."""
        await self._look()
        self._task = restarted(self._follow, "canaries")

    async def close(self) -> None:
        """Write what was counted. Idempotent."""
        task, self._task = self._task, None
        if task is None:
            return
        await cancel_and_wait(task)
        try:
            await self._look()
        except IndexUnavailable as error:
            log.info("the latest counts of canaries are lost: %s", error)

    # ------------------------------------------------------------------ requests

    def meaning(self, name: str) -> str:
        """The model that answers for the model ``name``: another one after it was promoted."""
        canary = self._known.get(name)
        return name if canary is None else canary.meaning

    def runs(self, name: str) -> bool:
        """Whether a canary of the model ``name`` runs."""
        canary = self._known.get(name)
        return canary is not None and canary.runs

    def trial(self, name: str, tenant: str, head: str) -> Trial | None:
        """The side of a request for the model ``name``, while its canary runs; None: it is not counted.

        ``head``: what all turns of its conversation begin with: they go to one side, where their blocks are.
        """
        canary = self._known[name]
        chosen = not canary.tenants or tenant in canary.tenants
        drawn = crc32(f"{canary.id}\0{tenant}\0{head}".encode()) / 2**32
        if chosen and 100 * drawn < canary.share:
            return Trial(self, canary, CANDIDATE)
        # Where all of some tenants' requests go to the candidate, there are only others to compare with.
        return Trial(self, canary, STABLE) if chosen or canary.share >= 100 else None

    def add(self, canary: Canary, side: str, tally: Tally) -> None:
        """Count for a canary; one that has ended counts no more, nor one with a former share."""
        if self._known.get(canary.name, canary).counts_id == canary.counts_id:
            self._own.setdefault(canary.counts_id, new_sides())[side].add(tally)

    # ------------------------------------------------------------------ operators

    def status(self) -> list[dict[str, Any]]:
        """The latest canary of each name with its counts, and while it runs what they say: plain JSON
        types."""
        listed = []
        for name, canary in sorted(self._known.items()):
            found = canary.to_dict()
            if canary.runs:
                decision = self._decision(canary)
                found["sides"] = replace(canary, sides=self._sides(canary)).to_dict()["sides"]
                found |= {"verdict": decision.verdict.value, "reasons": list(decision.reasons)}
            listed.append({"model": name, **found})
        return listed

    async def begin(
        self,
        name: str,
        candidate: str,
        share: float,
        tenants: Sequence[str],
        slo: Slo,
        *,
        auto: bool,
        least: int,
    ) -> dict[str, Any]:
        """Send a share of the requests for the model ``name`` to the model ``candidate``. Both are served.

        Raises:
            FleetUnchanged: one runs for this name, the candidate answers already, or nothing would be left to
                compare with.
            IndexUnavailable: Redis does not answer.
        """
        _check_share(share, tenants)
        async with self._turn:
            await self._look()
            if (running := self._known.get(name)) is not None and running.runs:
                raise FleetUnchanged(
                    f"{running.candidate} is tried as {name} now: promote it or roll it back before"
                )
            if (stable := self.meaning(name)) == candidate:
                raise FleetUnchanged(f"{candidate} answers for {name} already")
            canary = Canary(
                secrets.token_hex(8),
                name,
                stable,
                candidate,
                share,
                tuple(tenants),
                auto,
                least,
                slo_ttft_s=slo.ttft_s if slo.ttft_s < float("inf") else 0.0,
                slo_tbt_s=slo.tbt_s if slo.tbt_s < float("inf") else 0.0,
                began_unix_s=self._unix_clock(),
            )
            of_them = f" of {', '.join(tenants)}" if tenants else ""
            told = f"{candidate} gets {share:g} % of the conversations{of_them} in place of {stable}"
            await self._put(canary, told)
        return self._of(name)

    async def share(self, name: str, share: float) -> dict[str, Any]:
        """Change the share of the canary of ``name``. A conversation changes sides only where it must. The
        counts begin anew: rates of other times and loads are not compared with those of now.

        Raises:
            FleetUnchanged: none runs, it was changed too often, or the share is none.
            IndexUnavailable: Redis does not answer.
        """
        async with self._turn:
            await self._look()
            canary = self._known.get(name)
            if canary is None or not canary.runs:
                raise FleetUnchanged(f"no canary of {name} runs: see `moonpool fleet canary status`")
            _check_share(share, canary.tenants)
            if share == canary.share:
                return self._of(name)
            if len(canary.former) >= MOST_SHARES:
                raise FleetUnchanged(
                    f"its share was changed {MOST_SHARES} times: roll it back, and start anew"
                )
            former = (*canary.former, FormerShare(canary.share, self._sides(canary)))
            told = f"{canary.candidate} gets {share:g} % of the conversations, before {canary.share:g}"
            await self._put(replace(canary, share=share, former=former), told)
            with suppress(IndexUnavailable):  # they expire
                await self._records.forget_counts(canary.counts_id)
        return self._of(name)

    async def promote(self, name: str) -> dict[str, Any]:
        """From now on ``name`` means the candidate. Raises ``FleetUnchanged``: none runs; and
        ``IndexUnavailable``."""
        return await self._conclude(name, PROMOTED)

    async def roll_back(self, name: str) -> dict[str, Any]:
        """From now on ``name`` means what it did before; also after the candidate was promoted. Raises as
        ``promote``."""
        return await self._conclude(name, ROLLED_BACK)

    async def _conclude(self, name: str, state: str) -> dict[str, Any]:
        async with self._turn:
            await self._look()
            canary = self._known.get(name)
            undone = canary is not None and canary.state == PROMOTED and state == ROLLED_BACK
            if canary is None or not (canary.runs or undone):
                raise FleetUnchanged(f"no canary of {name} runs: see `moonpool fleet canary status`")
            await self._end(canary, state, "an operator asked for it")
        return self._of(name)

    def _of(self, name: str) -> dict[str, Any]:
        return next(one for one in self.status() if one["model"] == name)

    # ------------------------------------------------------------------ following the records

    async def _follow(self) -> None:
        while True:
            await asyncio.sleep(_POLL_S)
            try:
                async with self._turn:
                    await self._look()
                    for canary in self._running():
                        await self._judge(canary)
            except IndexUnavailable as error:
                log.debug("canaries are not known now: %s", error)

    async def _look(self) -> None:
        """Read the records, write our counts and read those of all. Raises ``IndexUnavailable``."""
        await self._records.read()
        self._known = self._records.known
        running = {canary.counts_id for canary in self._running()}
        self._own = {name: sides for name, sides in self._own.items() if name in running}
        self._total = {name: sides for name, sides in self._total.items() if name in running}
        for name in running:
            own = self._own.get(name)
            self._total[name] = await self._records.count(name, self._conductor_id, own)

    async def _judge(self, canary: Canary) -> None:
        decision = self._decision(canary)
        if not canary.auto or decision.verdict is Verdict.WAIT:
            return
        state = PROMOTED if decision.verdict is Verdict.PROMOTE else ROLLED_BACK
        try:
            await self._end(canary, state, "; ".join(decision.reasons))
        except FleetUnchanged:
            return  # another conductor was first
        what = "promote" if state == PROMOTED else "rollback"
        audit.administrative(f"canary {canary.name} {what} {canary.candidate}", "ok", who=self._conductor_id)

    async def _end(self, canary: Canary, state: str, reason: str) -> None:
        sides = self._sides(canary) if canary.runs else canary.sides
        ended = replace(canary, state=state, reason=reason, ended_unix_s=self._unix_clock(), sides=sides)
        await self._put(ended, f"{canary.candidate} is {state}, {ended.meaning} answers: {reason}")
        if canary.runs:
            with suppress(IndexUnavailable):  # they expire
                await self._records.forget_counts(canary.counts_id)

    async def _put(self, canary: Canary, told: str) -> None:
        """Raises ``FleetUnchanged``: another conductor has changed it since it was read."""
        if not await self._records.put(canary):
            raise FleetUnchanged(
                f"another conductor has just changed the canary of {canary.name}: look again"
            )
        self._known = self._records.known
        log.info("canary of %s: %s", canary.name, told)
        self._on_event("canary", canary.name, told)

    def _running(self) -> list[Canary]:
        return [canary for canary in self._known.values() if canary.runs]

    def _sides(self, canary: Canary) -> dict[str, Tally]:
        return self._total.get(canary.counts_id) or new_sides()

    def _decision(self, canary: Canary) -> Decision:
        stable, candidate = (self._sides(canary)[side] for side in SIDES)
        return decide(stable, candidate, canary.slo, canary.least)


def _check_share(share: float, tenants: Sequence[str]) -> None:
    """Raises ``FleetUnchanged``."""
    if not 0 < share <= 100 or (share == 100 and not tenants):
        raise FleetUnchanged(
            f"the share must be above 0 and below 100 %, got {share:g}: the candidate is compared "
            "with the rest; all requests of some tenants may be taken (--tenant)"
        )


def _is_ours(error: Exception) -> bool:
    """Whether it is the cluster that failed, and not what was asked."""
    late = isinstance(error, DeadlineExceeded | RequestFailed)
    return late or failure_of(error) is not FailureClass.REQUEST
