"""Agents: conversations that wait for a tool before each next turn, with hints about their KV and without."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any

import orjson

from moonpool.bench.harness.command import Run
from moonpool.bench.harness.turns import spread, turns
from moonpool.bench.serve.client.answer import Answer, read_json
from moonpool.bench.serve.client.cluster import cluster_server, learn
from moonpool.bench.serve.client.server import RequestFailed, Server
from moonpool.bench.serve.client.workload import Prompts, as_text
from moonpool.bench.serve.settings import Settings, Waits
from moonpool.runtime.reports.report import Row, versus

AGENTS, TURNS = 3, 3
FIRST_TOKENS, RESULT_TOKENS, OUTPUT_TOKENS = 512, 96, 64
# Prompts of others, one at a time: so many while a tool runs for its mean time. Their few tokens of output
# bring them to the decode node, too: its copies are under the same pressure.
OTHERS, OTHER_TOKENS, OTHER_OUTPUT_TOKENS = 22, 1024, 4
# Pool and host memory of a node under pressure. The agents' conversations fit into the quarter that one
# tenant may pin; what the others bring meanwhile does not fit.
POOL_TOKENS, HOST_TOKENS = 9_600, 3_200
PIN_S = 60.0
ROOM, PRESSURE = "default memory", f"memory of {POOL_TOKENS:,} + {HOST_TOKENS:,} tokens a node"
PLAIN, HINTED, WARMED = "no hints", "cache_hint", "cache_hint and /v1/prefetch"
_CHAT, _PREFETCH = "/v1/chat/completions", "/v1/prefetch"


@dataclass
class Talk:
    """Conversations with one server in one form. ``rounds``: of each, the answers after a tool call."""

    server: Server
    form: str
    prompts: Prompts
    rounds: list[list[Answer]] = field(default_factory=list)

    async def run(self, waits: Sequence[Sequence[float]], other_s: float) -> list[float]:
        """All agents at once beside others' prompts; the TTFT of each turn after a tool call, in seconds.

        Raises RequestFailed.
        """
        done = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._others(other_s, done))
            agents = [group.create_task(self._agent(each)) for each in waits]
            await asyncio.wait(agents)
            done.set()
        answers = [answer for agent in agents for answer in agent.result()]
        self.rounds.append(answers)
        return [answer.ttft_s for answer in answers]

    async def _agent(self, waits: Sequence[float]) -> list[Answer]:
        messages = [{"role": "user", "content": as_text(self.prompts.tokens(FIRST_TOKENS))}]
        answers = [await self._ask(messages, {"pin_s": PIN_S, "prefetch": True})]
        for number, wait_s in enumerate(waits, 1):
            messages.append({"role": "assistant", "content": answers[-1].text})
            async with asyncio.TaskGroup() as group:
                if self.form == WARMED:
                    group.create_task(self._prefetch(list(messages)))
                await asyncio.sleep(wait_s)
                # The shipped template knows no role for the results of tools.
                messages.append({"role": "user", "content": as_text(self.prompts.tokens(RESULT_TOKENS))})
                last = number == len(waits)
                hint = {"drop_after": True} if last else {"pin_s": PIN_S, "prefetch": True}
                answers.append(await self._ask(messages, hint))
        return answers[1:]

    async def _ask(self, messages: Sequence[Mapping[str, str]], hint: Mapping[str, object]) -> Answer:
        body = self._body(messages, hint) | {
            "max_tokens": OUTPUT_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        return self.server.answered(await self.server.http.post(_CHAT, orjson.dumps(body)))

    async def _prefetch(self, messages: Sequence[Mapping[str, str]]) -> None:
        body = self._body(messages, {"pin_s": PIN_S})
        status, content = read_json(await self.server.http.post(_PREFETCH, orjson.dumps(body)))
        if status != 200:
            raise RequestFailed(f"{self.server.name}: {_PREFETCH}: status {status}: {content}")

    def _body(self, messages: Sequence[Mapping[str, str]], hint: Mapping[str, object]) -> dict[str, Any]:
        hints = {} if self.form == PLAIN else {"cache_hint": hint}
        return {"model": self.server.dialect.model, "messages": messages, **hints}

    async def _others(self, every_s: float, done: asyncio.Event) -> None:
        while not done.is_set():
            due_s = time.perf_counter() + every_s
            await self.server.ask(self.prompts.draw(OTHER_TOKENS), OTHER_OUTPUT_TOKENS)
            with suppress(TimeoutError):
                await asyncio.wait_for(done.wait(), max(due_s - time.perf_counter(), 0.0))


async def agent_rows(run: Run, settings: Settings) -> list[Row]:
    """TTFT and cache hits of the turns after a tool call: by memory, in each form in turn."""
    sets, waits = ("cluster.prefill=1", "cluster.decode=1", *settings.sets), settings.waits
    # Between the prompts of others.
    other_s = (waits.least_s + waits.most_s) / 2 / OTHERS
    drawn: list[list[float]] = []  # of each agent, between its turns

    def draw(number: int) -> None:
        # Each form waits as long as the others. In the warm-up no tool takes any time.
        rng, bounds = random.Random(f"agents {settings.seed} {number}"), (waits.least_s, waits.most_s)
        drawn[:] = [
            [rng.uniform(*bounds) if number >= 0 else 0.0 for _ in range(TURNS - 1)] for _ in range(AGENTS)
        ]

    async with AsyncExitStack() as stack:
        run.say(f"starting a cluster: {ROOM}")
        room = await stack.enter_async_context(cluster_server("the server", sets))
        await learn(run, room)
        _, cluster = read_json(await room.http.get("/v1/cluster"))
        nbytes = cluster["block_nbytes"] // cluster["block_size"]
        small = (
            f"engine.pool_nbytes={POOL_TOKENS * nbytes}",
            f"store.host.capacity_nbytes={HOST_TOKENS * nbytes}",
        )
        run.say(f"starting a cluster: {PRESSURE}")
        pressed = await stack.enter_async_context(cluster_server("the server", (*sets, *small)))
        prompts = Prompts(settings.seed, "agents")
        talks = {
            (memory, form): Talk(server, form, prompts)
            for memory, server in ((ROOM, room), (PRESSURE, pressed))
            for form in (PLAIN, HINTED, WARMED)
        }
        calls = {key: partial(talk.run, drawn, other_s) for key, talk in talks.items()}
        ttfts = await turns(calls, run.rounds, rotate=1, before=draw)
    rows: list[Row] = []
    for (memory, form), talk in talks.items():
        rows += _rows(memory, form, waits, talk.rounds[1:], ttfts[memory, form], ttfts[memory, PLAIN])
    return rows


def _rows(
    memory: str,
    form: str,
    waits: Waits,
    rounds: Sequence[Sequence[Answer]],
    ttfts_s: Sequence[float],
    plain_s: Sequence[float],
) -> list[Row]:
    case = f"{AGENTS} agents, {TURNS} turns, tools of {waits.least_s:g} to {waits.most_s:g} s, {memory}"
    ttft = spread(case, f"TTFT after a tool call, {form}", ttfts_s, "ms", 1e3)
    if form != PLAIN:
        ttft = versus(ttft, PLAIN, 1e3 * median(plain_s))
    hits = [
        100 * sum(one.cached_tokens for one in answers) / sum(one.prompt_tokens for one in answers)
        for answers in rounds
    ]
    return [ttft, spread(case, f"cache hit after a tool call, {form}", hits, "%")]
