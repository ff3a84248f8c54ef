"""Sessions of several turns over two engines: who answers a turn, and what it finds cached."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from itertools import product
from statistics import median

from moonpool.bench.harness.command import Run
from moonpool.bench.harness.turns import quantile
from moonpool.bench.serve.client.answer import Answer
from moonpool.bench.serve.client.server import Outcome, Server
from moonpool.bench.serve.client.workload import Conversation, Workload
from moonpool.bench.serve.figures import output_rate
from moonpool.bench.serve.peers.vllm import VllmCpu
from moonpool.bench.vllm.engines import ALONE, CONNECTED, Settings, running
from moonpool.runtime.reports.report import Row, versus

CONCURRENT = 8
# What all sessions hold in the end, in caches of one engine.
_WORKING_SET = 3
_UNITS = {
    "hit ratio": ("%", 100.0),
    "output throughput": ("tokens/s", 1.0),
    **{f"TTFT {name}": ("ms", 1e3) for name in ("p50", "p90", "p95", "p99")},
}


class RoundRobin:
    """Every engine in turn. A router: ``choose`` before a request, ``done`` after it."""

    def __init__(self, servers: Sequence[Server]) -> None:
        self._servers = deque(servers)

    def choose(self) -> Server:
        self._servers.rotate(-1)
        return self._servers[0]

    def done(self, server: Server) -> None:
        """Nothing is counted."""


class LeastLoaded:
    """The engine with the fewest requests in flight."""

    def __init__(self, servers: Sequence[Server]) -> None:
        self._in_flight = {id(server): 0 for server in servers}
        self._servers = servers

    def choose(self) -> Server:
        server = min(self._servers, key=lambda one: self._in_flight[id(one)])
        self._in_flight[id(server)] += 1
        return server

    def done(self, server: Server) -> None:
        self._in_flight[id(server)] -= 1


ROUTERS: dict[str, Callable[[Sequence[Server]], RoundRobin | LeastLoaded]] = {
    "round-robin": RoundRobin,
    "least-loaded": LeastLoaded,
}


async def converse(
    router: RoundRobin | LeastLoaded, conversations: Sequence[Conversation], concurrent: int
) -> Outcome:
    """All sessions, ``concurrent`` requests at a time; a session's next turn comes after the others' turns.

    Raises ``RequestFailed``.
    """
    waiting = deque((one, one.first, one.later) for one in conversations)
    answers: list[Answer] = []

    async def work() -> None:
        while waiting:
            conversation, prompt, later = waiting.popleft()
            server = router.choose()
            try:
                answer = await server.ask(prompt, conversation.output_tokens)
            finally:
                router.done(server)
            answers.append(answer)
            if later:
                waiting.append((conversation, [*prompt, *answer.token_ids, *later[0]], later[1:]))

    began_s = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(concurrent):
            group.create_task(work())
    return Outcome(answers, time.perf_counter() - began_s)


def figures(outcome: Outcome) -> dict[str, float]:
    """By the names of ``_UNITS``, before scaling."""
    answers = outcome.answers
    ttfts = [answer.ttft_s for answer in answers]
    cached = sum(answer.cached_tokens for answer in answers)
    return {
        "hit ratio": cached / sum(answer.prompt_tokens for answer in answers),
        "output throughput": output_rate(outcome),
        **{f"TTFT p{share}": quantile(ttfts, share / 100) for share in (50, 90, 95, 99)},
    }


def cache_blocks(work: Workload, block_size: int) -> int:
    """Blocks of one engine's cache, of which all sessions together hold three."""
    last = work.prompt_tokens + (work.turns - 1) * work.turn_tokens + work.turns * work.output_tokens
    return max(-(-work.requests * last // (block_size * _WORKING_SET)), 4096 // block_size)


async def session_rows(run: Run, settings: Settings) -> AsyncIterator[Row]:
    """Two engines with half of the cores each, without and with the connector, behind each router."""
    work = settings.work
    blocks = ["--num-gpu-blocks-override", str(cache_blocks(work, settings.block_size))]
    found: dict[tuple[str, str], list[dict[str, float]]] = {}
    async with AsyncExitStack() as stack:
        pairs: dict[str, list[VllmCpu]] = {ALONE: [], CONNECTED: []}
        for half in (0, 1):
            for name, pair in pairs.items():
                store = await settings.connected(run, f"session-{half}") if name == CONNECTED else None
                server = settings.server(run, f"{name}, engine {half}", store, blocks, half=half)
                pair.append(await stack.enter_async_context(server))
        seed = settings.seed
        for number in range(-1, run.rounds):
            for name, router in product(pairs, ROUTERS):
                # New prompts: what an earlier turn kept is of no use.
                seed += 1
                conversations = replace(work, seed=seed).conversations()
                servers = [one.server for one in pairs[name]]
                async with running(*pairs[name]):
                    outcome = await converse(ROUTERS[router](servers), conversations, CONCURRENT)
                values = figures(outcome)
                run.say(f"{name}, {router}: {values}")
                if number >= 0:
                    found.setdefault((name, router), []).append(values)
    case = f"{settings.model}, 2 engines, {work.requests} sessions × {work.turns} turns, cache for a third"
    for metric, (unit, scale) in _UNITS.items():
        medians = {who: scale * median(one[metric] for one in each) for who, each in found.items()}
        for (name, router), value in medians.items():
            row = Row(f"{case}, {router}, {name}", metric, value, unit)
            yield row if name == ALONE else versus(row, ALONE, medians[ALONE, router])
