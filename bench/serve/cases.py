"""The cases, each a part of the benchmark: requests to rows."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median

from moonpool.bench.harness.command import Run
from moonpool.bench.harness.floor import Floor
from moonpool.bench.harness.perimeter import CERTIFICATES, KEY, NEITHER, cluster_sets, security_of
from moonpool.bench.harness.turns import Call, spread, turns
from moonpool.bench.serve.client import load
from moonpool.bench.serve.client.answer import read_json
from moonpool.bench.serve.client.cluster import MetricsPages, cluster_server
from moonpool.bench.serve.client.server import RequestFailed, Server, new_request_id
from moonpool.bench.serve.client.workload import Prompts
from moonpool.bench.serve.figures import load_rows, prediction_rows
from moonpool.bench.serve.occupancy import occupancy_rows, watched_load
from moonpool.bench.serve.path_cost import PathCost, model_time, path_cost, to_launch_s
from moonpool.bench.serve.peers.contestants import Contestant
from moonpool.bench.serve.settings import FAMILY_GOALS, Settings
from moonpool.runtime.reports.report import Row, versus

PROMPT_TOKENS, OUTPUT_TOKENS, CONCURRENT = 128, 128, 8
PREFIX_TOKENS, TURN_TOKENS, TURN_OUTPUT_TOKENS = 2048, 32, 16
TOGETHER = f"{CONCURRENT} concurrent, {PROMPT_TOKENS} + {OUTPUT_TOKENS} tokens, greedy"
ALONE = f"1 concurrent, {PROMPT_TOKENS} + {OUTPUT_TOKENS} tokens, greedy"
PROMPT = f"prompt of {PREFIX_TOKENS} tokens"
SECOND_TURN = f"second turn, {PREFIX_TOKENS} tokens shared"
_FIRST_OUTPUT, _LAST = 8, 10
_NEW_CLUSTER = f"new cluster, {PROMPT_TOKENS} + {_FIRST_OUTPUT} tokens, one at a time"


async def _samples(
    run: Run,
    settings: Settings,
    purpose: str,
    call: Callable[[Contestant, list[list[int]]], Awaitable[float]],
    *,
    num_prompts: int = 1,
    prompt_tokens: int = PROMPT_TOKENS,
) -> dict[str, list[float]]:
    """What ``call`` finds of each contestant, in turn; in each round all get the same new prompts."""
    prompts, drawn = Prompts(settings.seed, purpose), list[list[int]]()

    def draw(number: int) -> None:
        drawn[:] = [prompts.draw(prompt_tokens) for _ in range(num_prompts)]

    contestants = await settings.contestants(run)
    return await turns(
        {name: partial(call, one, drawn) for name, one in contestants.items()}, run.rounds, before=draw
    )


def together_limit(floor: Floor) -> float:
    """Tokens a second: the prompts' products, each with a first token, then steps of all sequences."""
    steps_s = (OUTPUT_TOKENS - 1) * floor.decode_s(CONCURRENT, PROMPT_TOKENS + OUTPUT_TOKENS / 2)
    return CONCURRENT * OUTPUT_TOKENS / (CONCURRENT * floor.prefill_s(PROMPT_TOKENS) + steps_s)


async def together_rows(run: Run, settings: Settings) -> list[Row]:
    """Throughput of all prompts at once."""
    rates = await _samples(
        run,
        settings,
        "together",
        lambda one, prompts: one.together(prompts, OUTPUT_TOKENS),
        num_prompts=CONCURRENT,
    )
    rows = peer_rows(TOGETHER, "output throughput", "tokens/s", rates, settings.goals)
    return [*rows, *settings.limit_rows(rows[0], together_limit)]


async def alone_rows(run: Run, settings: Settings) -> list[Row]:
    """Milliseconds per token of a single stream."""
    seconds = await _samples(
        run, settings, "alone", lambda one, prompts: one.alone(prompts[0], OUTPUT_TOKENS)
    )
    rows = peer_rows(ALONE, "TPOT", "ms", _in_ms(seconds), settings.goals)
    return [
        *rows,
        *settings.limit_rows(
            rows[0], lambda floor: 1e3 * floor.decode_s(1, PROMPT_TOKENS + OUTPUT_TOKENS / 2)
        ),
    ]


async def prompt_rows(run: Run, settings: Settings) -> list[Row]:
    """Milliseconds to the first token of a long prompt."""
    seconds = await _samples(
        run,
        settings,
        "prompt",
        lambda one, prompts: one.first_token(prompts[0]),
        prompt_tokens=PREFIX_TOKENS,
    )
    rows = peer_rows(PROMPT, "TTFT", "ms", _in_ms(seconds), settings.goals)
    return [*rows, *settings.limit_rows(rows[0], lambda floor: 1e3 * floor.prefill_s(PREFIX_TOKENS))]


def _in_ms(seconds: Mapping[str, Sequence[float]]) -> dict[str, list[float]]:
    return {name: [1e3 * one for one in of] for name, of in seconds.items()}


def peer_rows(
    case: str,
    metric: str,
    unit: str,
    values: Mapping[str, Sequence[float]],
    goals: Mapping[str, tuple[float, float]] = FAMILY_GOALS,
) -> list[Row]:
    """Our row, then one against each peer, the best of each family with the family's goal."""
    (_, own), *others = values.items()
    row = spread(case, metric, own, unit)
    rows = [versus(row, name, median(theirs)) for name, theirs in others]
    at_least = metric not in ("TPOT", "TTFT")
    for family, (throughput, latency) in goals.items():
        of_family = [i for i, found in enumerate(rows) if (found.peer or "").split(" ")[0] == family]
        if of_family:
            # The smallest ratio of throughputs, or the largest of latencies, is the best peer.
            best = (min if at_least else max)(of_family, key=lambda i: rows[i].ratio or 0.0)
            limit, bound = ("at least", throughput) if at_least else ("at most", latency)
            rows[best] = replace(rows[best], limit=limit, limit_value=bound)
    return [row, *rows]


async def path_rows(run: Run, settings: Settings) -> list[Row]:
    """The path's own cost of single requests, by stage. No rows if the server is no Moonpool cluster."""
    server = await settings.server(run)
    pages = await MetricsPages.of(server)
    if pages is None:
        run.say(f"{server.name} does not publish its model's time: the path's cost is left out")
        return []
    prompts = Prompts(settings.seed, "path")
    costs: list[PathCost] = []
    ttfts: list[float] = []
    launches: list[float] = []
    handovers: list[float] = []
    for number in range(-2, 3 * run.rounds):
        cost, ttft_s, launch_s = await _path_of_one(server, pages, prompts)
        short, _, _ = await _path_of_one(server, pages, prompts, settings.block_size)
        if number >= 0:
            costs.append(cost)
            ttfts.append(ttft_s)
            launches.append(launch_s)
            handovers.append(short.handover_s)
    figures = {
        (ALONE, "path's own cost a request"): [cost.own_s for cost in costs],
        (ALONE, "TTFT"): ttfts,
        (ALONE, "E2E"): [cost.e2e_s for cost in costs],
        (ALONE, "HTTP read to the prefill's first launch"): launches,
        (ALONE.replace(f"{PROMPT_TOKENS} +", "one block +"), "hand-over"): handovers,
    }
    for stage in costs[0].stages:
        figures[f"stages: {ALONE}", stage] = [cost.stages[stage] for cost in costs]
    rows = [spread(*name, seconds, "ms", 1e3) for name, seconds in figures.items()]
    return rows if settings.url else [*rows, *await _first_request_rows(run, settings)]


async def _first_request_rows(run: Run, settings: Settings) -> list[Row]:
    """TTFT of the first, second and tenth request of clusters, a new one each round: what was not ready when
    it said that it was. Nothing but the poll for its readiness comes before the first request."""
    prompts = Prompts(settings.seed, "first requests")
    ttfts: list[list[float]] = []  # of a cluster's requests
    for number in range(run.rounds):
        run.say(f"starting cluster {number + 1} of {run.rounds} for its first requests")
        async with cluster_server("the cluster", settings.sets) as server:
            answers = [await server.ask(prompts.draw(PROMPT_TOKENS), _FIRST_OUTPUT) for _ in range(_LAST)]
        ttfts.append([answer.ttft_s for answer in answers])
    rows = [
        spread(_NEW_CLUSTER, f"TTFT, {name} request", [one[nth - 1] for one in ttfts], "ms", 1e3)
        for nth, name in ((1, "first"), (2, "second"), (_LAST, "tenth"))
    ]
    ratios = [one[0] / one[_LAST - 1] for one in ttfts]
    first, last = (median(one[nth - 1] for one in ttfts) for nth in (1, _LAST))
    return [*rows, Row(_NEW_CLUSTER, "TTFT, first over tenth", first / last, "times", samples=ratios)]


async def _path_of_one(
    server: Server, pages: MetricsPages, prompts: Prompts, prompt_tokens: int = PROMPT_TOKENS
) -> tuple[PathCost, float, float]:
    """The cost of one request, its TTFT, and the time to its first launch in seconds."""
    request_id = new_request_id()
    before = await model_time(pages)
    answer = await server.ask(prompts.draw(prompt_tokens), OUTPUT_TOKENS, request_id)
    model = (await model_time(pages)).since(before)
    _, timeline = read_json(await server.http.get(f"/v1/requests/{request_id}/timeline"))
    return path_cost(answer, timeline, model), answer.ttft_s, to_launch_s(timeline)


async def perimeter_rows(run: Run, settings: Settings) -> AsyncIterator[Row]:
    """The path's own cost of single requests in three clusters, in turn: by the perimeter that each has."""
    async with AsyncExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="perimeter")))
        prompts = Prompts(settings.seed, "perimeter")
        calls: dict[str, Call] = {}
        for form in (NEITHER, KEY, CERTIFICATES):
            run.say(f"starting a cluster: {form}")
            sets = ["cluster.prefill=1", "cluster.decode=1", *settings.sets, *cluster_sets(form, directory)]
            ca = security_of(form, directory).ca
            server = await stack.enter_async_context(cluster_server(form, sets, ca=ca))
            pages = await MetricsPages.of_local(server)

            async def own_s(server: Server = server, pages: MetricsPages = pages) -> float:
                return (await _path_of_one(server, pages, prompts))[0].own_s

            calls[form] = own_s
        samples = await turns(calls, 3 * run.rounds, warm_up=2, rotate=1)
    for form, seconds in samples.items():
        row = spread(f"perimeter: {form}", "path's own cost a request", seconds, "ms", 1e3)
        yield row if form == NEITHER else versus(row, NEITHER, 1e3 * median(samples[NEITHER]))


async def second_turn_rows(run: Run, settings: Settings) -> list[Row]:
    """TTFT of a new prompt, and of the conversation's next turn, each round with a new prompt."""
    server = await settings.server(run)
    prompts = Prompts(settings.seed, "second turn")
    first: list[float] = []
    second: list[float] = []
    cached: list[int] = []
    for number in range(-1, run.rounds):
        prompt = prompts.draw(PREFIX_TOKENS)
        answer = await server.ask(prompt, TURN_OUTPUT_TOKENS)
        # A reader takes longer; without a pause the last blocks are not published yet.
        await asyncio.sleep(0.1)
        turn = [*prompt, *answer.token_ids, *prompts.tokens(TURN_TOKENS)]
        again = await server.ask(turn, TURN_OUTPUT_TOKENS)
        if number >= 0:
            first.append(answer.ttft_s)
            second.append(again.ttft_s)
            cached.append(again.cached_tokens)
    ratio = median(later / earlier for earlier, later in zip(first, second, strict=True))
    return [
        spread(SECOND_TURN, "TTFT, first turn", first, "ms", 1e3),
        spread(SECOND_TURN, "TTFT, second turn", second, "ms", 1e3),
        Row(SECOND_TURN, "TTFT, second over first", ratio, "times"),
        Row(SECOND_TURN, "prompt tokens from cache", float(median(cached)), "tokens"),
    ]


async def workload_rows(run: Run, settings: Settings) -> list[Row]:
    """Every figure of the workload that the options describe."""
    server, work = await settings.server(run), settings.workload
    pace = f"{work.rate:g} conversations/s" if work.rate else f"{work.concurrency} concurrent"
    name = f"load: {pace}, {work.prompt_tokens} + {work.output_tokens} tokens"
    if work.shared_prefix_tokens:
        name += f", {work.shared_prefix_tokens} shared"
    if work.turns > 1:
        name += f", {work.turns} turns"
    run.say(f"{name}: {work.requests} conversations")
    # Another seed: the warm-up must not leave the workload's prompts in the cache.
    warm = min(work.concurrency, work.requests)
    await load.run(server, replace(work, requests=warm, turns=1, seed=work.seed + 1))
    outcome, occupancy = await watched_load(server, await MetricsPages.of(server), work)
    for error, count in load.failures(outcome.answers).items():
        run.say(f"{count} failed: {error}")
    if all(answer.error for answer in outcome.answers):
        raise RequestFailed(f"every request of {name!r} failed")
    rows = load_rows(name, outcome, settings.slo)
    if occupancy is not None:
        _, cluster = read_json(await server.http.get("/v1/cluster"))
        rows += [*occupancy_rows(name, occupancy), *prediction_rows(name, cluster)]
    return rows
