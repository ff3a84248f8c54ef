"""What the connector costs where nothing hits, and what a hit in each tier is worth."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Mapping, Sequence
from statistics import median

import numpy as np

from moonpool.bench.harness.command import Run
from moonpool.bench.harness.floor import best_s
from moonpool.bench.harness.turns import spread, turns
from moonpool.bench.serve.client.workload import Prompts
from moonpool.bench.serve.figures import output_rate
from moonpool.bench.serve.peers.vllm import VllmCpu
from moonpool.bench.vllm.engines import ALONE, CONNECTED, PEER, NotFound, Settings, check_cached, running
from moonpool.runtime.reports.report import Row, versus

CONCURRENT, PROMPT_TOKENS, OUTPUT_TOKENS = 8, 512, 64
PREFIX_TOKENS, TAIL_TOKENS = 2048, 32
# Longer than it takes until blocks are hashed, published and known to another engine's scheduler.
_KNOWN_S = 0.5
_MOST_MISSED = 10
# vLLM's workers poll so long after a step, and both engines have the same cores.
_POLLS_S = 1.5


async def miss_rows(run: Run, settings: Settings) -> list[Row]:
    """Throughput of new prompts: every block is copied out and published, none is found."""
    case = f"{settings.model}, nothing hits, {CONCURRENT} × ({PROMPT_TOKENS} + {OUTPUT_TOKENS}) tokens"
    prompts = Prompts(settings.seed, "misses")
    drawn: list[list[int]] = []
    cpu_s: dict[str, list[float]] = {ALONE: [], CONNECTED: []}

    def draw(number: int) -> None:
        drawn[:] = [prompts.draw(PROMPT_TOKENS) for _ in range(CONCURRENT)]

    async def rate(server: VllmCpu) -> float:
        async with running(server):
            before_s = server.cpu_s()
            found = output_rate(await server.server.ask_all(drawn, OUTPUT_TOKENS))
            cpu_s[server.name].append(server.cpu_s() - before_s)
        return found

    servers = await settings.kept(run, CONNECTED, ALONE)
    calls = {one.name: lambda one=one: rate(one) for one in servers}
    rates = await turns(calls, run.rounds, rotate=1, before=draw)
    # The first of each is the warm-up.
    seconds = {name: values[1:] for name, values in cpu_s.items()}
    rows = _ratios(case, "output throughput", "tokens/s", rates)
    return [*rows, *_ratios(case, "processor time of a round", "s", seconds)]


def _ratios(case: str, metric: str, unit: str, samples: Mapping[str, Sequence[float]]) -> list[Row]:
    """Medians side by side, and the ratios of each round's two turns."""
    ours, theirs = samples[CONNECTED], samples[ALONE]
    each = [a / b for a, b in zip(ours, theirs, strict=True)]
    row = versus(spread(case, metric, ours, unit), ALONE, median(theirs))
    return [row, spread(case, f"{metric}, ratio of a round", each, "times")]


async def prefix_rows(run: Run, settings: Settings) -> list[Row]:
    """TTFT behind a prefix that is computed, in this engine's host memory, a peer's, or vLLM's pool."""
    case = f"{settings.model}, prefix of {PREFIX_TOKENS} + {TAIL_TOKENS} tokens"
    prompts = Prompts(settings.seed, "prefix")
    seconds: dict[str, list[float]] = {}
    alone, engine, peer = await settings.kept(run, ALONE, CONNECTED, PEER)

    async def once() -> dict[str, float]:
        """TTFT by source, all behind one new prefix. Raises ``NotFound``."""
        prefix, found = prompts.tokens(PREFIX_TOKENS), {}

        async def ask(server: VllmCpu, source: str, num_cached: int) -> None:
            answer = await server.server.ask([*prefix, *prompts.tokens(TAIL_TOKENS)], 1)
            check_cached(answer, num_cached, source)
            found[source] = answer.ttft_s

        async with running(alone):
            await ask(alone, "computed by vLLM alone", 0)
        async with running(engine):
            await ask(engine, "computed, and kept", 0)
            await asyncio.sleep(_KNOWN_S)
            await engine.forget()
            await ask(engine, "own host memory", PREFIX_TOKENS)
            await ask(engine, "vLLM's own cache", PREFIX_TOKENS)
        async with running(engine, peer):
            await asyncio.sleep(_POLLS_S)
            await ask(peer, PEER, PREFIX_TOKENS)
        return found

    number, num_missed = -1, 0
    while number < run.rounds:
        try:
            found = await once()
        except NotFound as error:
            run.say(f"again with another prefix: {error}")
            num_missed += 1
            if num_missed > _MOST_MISSED:
                raise
            continue
        for source, took_s in found.items() if number >= 0 else ():
            seconds.setdefault(source, []).append(took_s)
        number += 1
    again = Row(case, "rounds that were done again, as a prefix was not found", num_missed, "rounds")
    return [*_prefix_rows(case, seconds, settings), again]


async def restart_rows(run: Run, settings: Settings) -> list[Row]:
    """TTFT behind prefixes that are only on disk: the engine has been started again."""
    case = f"{settings.model}, prefix of {PREFIX_TOKENS} + {TAIL_TOKENS} tokens, after a restart"
    prompts = Prompts(settings.seed, "restart")
    prefixes = [prompts.tokens(PREFIX_TOKENS) for _ in range(run.rounds + 1)]
    seconds: dict[str, list[float]] = {}
    await settings.end(CONNECTED, PEER)
    [alone] = await settings.kept(run, ALONE)
    with tempfile.TemporaryDirectory(prefix="bench-vllm-") as directory:
        sets = [
            f"store.ssd.path={directory}",
            "store.write_policy=write-through",
            "store.ssd.queue_nbytes=1GiB",
        ]
        store = await settings.connected(run, "restarted", sets)
        async with settings.server(run, CONNECTED, store) as engine, running(engine):
            for prefix in prefixes:
                await engine.server.ask([*prefix, *prompts.tokens(TAIL_TOKENS)], 1)
            await asyncio.sleep(_KNOWN_S)
        async with settings.server(run, CONNECTED, store) as engine:
            for number, prefix in enumerate(prefixes):
                for server, source, cached in (
                    (alone, "computed by vLLM alone", 0),
                    (engine, "disk", PREFIX_TOKENS),
                ):
                    async with running(server):
                        answer = await server.server.ask([*prefix, *prompts.tokens(TAIL_TOKENS)], 1)
                    check_cached(answer, cached, source)
                    if number:
                        seconds.setdefault(source, []).append(answer.ttft_s)
    return _prefix_rows(case, seconds, settings)


def _prefix_rows(case: str, seconds: Mapping[str, Sequence[float]], settings: Settings) -> list[Row]:
    """Each source beside computing, and what a plain copy of the blocks takes here."""
    (computed, base), *others = seconds.items()
    rows = [spread(case, f"TTFT, {computed}", base, "ms", 1e3)]
    for source, values in others:
        row = spread(case, f"TTFT, {source}", values, "ms", 1e3)
        rows.append(versus(row, computed, 1e3 * median(base)))
        each = [a / b for a, b in zip(values, base, strict=True)]
        rows.append(spread(case, f"TTFT, {source}, ratio of a round", each, "times"))
    nbytes = PREFIX_TOKENS * settings.token_nbytes
    rows.append(Row(case, "KV of the prefix", nbytes / 1e6, "MB"))
    # Between buffers that the caches do not hold.
    ones, into = np.ones(nbytes, np.uint8), np.empty(nbytes, np.uint8)
    copy_s = best_s(lambda: np.copyto(into, ones), 6)
    return [*rows, Row(case, "limit: a copy of it by one thread", 1e3 * copy_s, "ms")]
