"""A part of a trace on local clusters: a planned number of nodes, and fixed ones."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moonpool.bench.elastic.comparison import behaviour
from moonpool.bench.elastic.fleets import HOUR_S, Result
from moonpool.bench.harness.command import Run
from moonpool.bench.harness.services import local_cluster
from moonpool.bench.harness.turns import spread
from moonpool.bench.serve.client.answer import Answer
from moonpool.bench.serve.client.http_client import HttpClient
from moonpool.bench.serve.client.server import Server
from moonpool.bench.serve.client.workload import Prompts
from moonpool.client import Client
from moonpool.conductor.fleet.providers.provider import RUNNING, STARTING, STOPPING
from moonpool.conductor.planning.plan import ADD, REMOVE, SWITCH
from moonpool.runtime.reports.report import Row
from moonpool.simulator.cluster.elastic_fleet import Change, Shortages
from moonpool.simulator.inputs.trace import TraceRequest

_STAYS = (RUNNING, STARTING)
_PAID = (*_STAYS, STOPPING)


class Watch:
    """Fed by ``look``. ``node_s``: seconds of nodes that were there; ``most``: of them at a time. ``join_s``:
    how long the slowest of them took to join."""

    def __init__(self, began_s: float, ceilings: Mapping[str, int]) -> None:
        """``ceilings``: the most nodes of each role that are allowed: more than that are never missing."""
        self.node_s = 0.0
        self.most = 0
        self.join_s = 0.0
        self.num_replaced = 0
        self._began_s = self._now_s = began_s
        self._ceilings = ceilings
        self._roles: dict[str, str] = {}  # of the nodes that are to stay
        self._changes: list[Change] = []
        self._shortages = Shortages()
        self._history: list[tuple[float, int, int]] = []

    def look(self, fleet: Mapping[str, Any], now_s: float) -> None:
        """``fleet``: of ``GET /v1/fleet``; what is there now has been since the last look."""
        at_s = now_s - self._began_s
        # Those that no provider started are there all the time.
        states = [one["supplied"]["state"] if one["supplied"] else RUNNING for one in fleet["nodes"]]
        num_paid = sum(state in _PAID for state in states)
        self.node_s += num_paid * (now_s - self._now_s)
        self.most, self._now_s = max(self.most, num_paid), now_s
        stay = [one for one, state in zip(fleet["nodes"], states, strict=True) if state in _STAYS]
        roles = {one["node_id"]: one["role"] for one in stay}
        if self._history:
            self._note(roles, at_s)
        self._roles = roles
        planned = fleet["planner"]["roles"]
        prefill, decode = (planned[role]["ready"] if role in planned else 0 for role in ("prefill", "decode"))
        self._history.append((at_s, prefill, decode))
        self.join_s = max((state["join_s"] for state in planned.values()), default=0.0)
        for role, state in planned.items():
            self._shortages.look(role, state["ready"] < min(state["needed"], self._ceilings[role]), at_s)

    def result(self, attained: float) -> Result:
        """``attained``: the fraction of requests within the SLO."""
        return Result(
            attained,
            self.node_s / HOUR_S,
            self._now_s - self._began_s,
            (),
            self.num_replaced,
            self._changes,
            self._shortages.ended,
            self._history,
        )

    def _note(self, roles: Mapping[str, str], at_s: float) -> None:
        former = self._roles
        self._changes += [Change(at_s, ADD, role) for name, role in roles.items() if name not in former]
        self._changes += [Change(at_s, REMOVE, role) for name, role in former.items() if name not in roles]
        self._changes += [
            Change(at_s, SWITCH, role)
            for name, role in former.items()
            if name in roles and roles[name] != role
        ]


PLANNED = "live, planned"
_SAMPLE_S = 0.25
_PLACED_AGAIN = re.compile(r'^moonpool_replacements_total\{cause="queue"\} (\S+)$', re.MULTILINE)
_COMMON = (
    "cluster.decode=1",
    "cluster.both=0",
    "conductor.rejection=none",
    "conductor.migrate=drain,queue",
    "engine.threads=1",
)


@dataclass(frozen=True)
class LiveLoad:
    """The busiest ``window_s`` of a trace with lengths divided by ``shrink``, for ``most`` prefill nodes."""

    window_s: float = 180.0
    shrink: int = 4
    most: int = 2
    ttft_s: float = 10.0
    hold_s: float = 15.0

    def cut(self, requests: Sequence[TraceRequest]) -> list[tuple[float, int, int]]:
        """Arrival, prompt and output tokens of the window's requests."""
        arrivals = [request.arrival_s for request in requests]
        best, begin = (0, 0), 0
        for end, at_s in enumerate(arrivals, 1):
            while at_s - arrivals[begin] > self.window_s:
                begin += 1
            best = max(best, (end - begin, begin))
        count, begin = best
        return [
            (one.arrival_s - arrivals[begin], _less(one.input_tokens, self), _less(one.output_tokens, self))
            for one in requests[begin : begin + count]
        ]


def _less(tokens: int, load: LiveLoad) -> int:
    return max(tokens // load.shrink, 1)


async def live_rows(run: Run, requests: Sequence[TraceRequest], load: LiveLoad) -> AsyncIterator[Row]:
    """One cluster after the other. Raises ``RequestFailed``."""
    work = load.cut(requests)
    fixed = {f"live, fixed: {count} prefill + 1 decode": count for count in range(1, load.most + 1)}
    for name, count in ({PLANNED: 0} | fixed).items():
        run.say(f"{name}: {len(work)} requests in {load.window_s:g} s")
        answers, watch = await _one(name, count, work, load)
        ttft_s = [answer.ttft_s for answer in answers]
        result = watch.result(sum(one <= load.ttft_s for one in ttft_s) / len(ttft_s))
        yield Row(name, f"requests with a TTFT of {load.ttft_s:g} s or less", 100 * result.attained, "%")
        yield Row(name, "node-hours", result.node_hours, "h")
        yield spread(name, "TTFT", ttft_s, "ms", 1e3)
        yield Row(name, "nodes at most", float(watch.most), "nodes")
        if not count:
            for row in behaviour(name, watch.join_s, result):
                yield row


async def _one(
    name: str, count: int, work: Sequence[tuple[float, int, int]], load: LiveLoad
) -> tuple[list[Answer], Watch]:
    """The answers, and the nodes that were there meanwhile. ``count`` 0: planned."""
    sets = [*_COMMON, f"cluster.prefill={count or 1}", f"conductor.slo_ttft_s={load.ttft_s:g}"]
    if not count:
        sets += ["planner.mode=act", "planner.spare=0", f"planner.prefill_most={load.most}"]
        sets += ["planner.decode_most=1", f"planner.hold_s={load.hold_s:g}"]
    async with (
        local_cluster(sets, supervised=not count) as url,
        HttpClient(url) as http,
        Client(url) as client,
    ):
        server, prompts = await Server.find(name, http), Prompts(0, name)
        await server.ask(prompts.draw(16), 1)
        loop = asyncio.get_running_loop()
        began_s = loop.time()

        async def send(at_s: float, prompt_tokens: int, output_tokens: int) -> Answer:
            await asyncio.sleep(began_s + at_s - loop.time())
            return await server.ask(prompts.draw(prompt_tokens), output_tokens)

        answers = asyncio.gather(*(send(*one) for one in work))
        watch = Watch(began_s, {"prefill": load.most, "decode": 1})
        while not answers.done():
            watch.look(await client.fleet(), loop.time())
            await asyncio.wait((answers,), timeout=_SAMPLE_S)
        if found := _PLACED_AGAIN.search(await client.metrics()):
            watch.num_replaced = round(float(found[1]))
        return await answers, watch
