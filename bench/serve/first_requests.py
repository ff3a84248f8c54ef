"""The first requests of a new cluster: what was not ready when it said that it was."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from statistics import median

from moonpool.bench.harness.command import Run
from moonpool.bench.harness.turns import spread
from moonpool.bench.serve.client.cluster import cluster_server
from moonpool.bench.serve.client.workload import Prompts
from moonpool.runtime.reports.report import Row

PROMPT_TOKENS, OUTPUT_TOKENS, LAST = 128, 8, 10
CASE = f"new cluster, {PROMPT_TOKENS} + {OUTPUT_TOKENS} tokens, one at a time"
_NAMES = {1: "first", 2: "second", LAST: "tenth"}


async def first_request_rows(run: Run, sets: Sequence[str], seed: int) -> AsyncIterator[Row]:
    """TTFT of the first, second and tenth request of clusters, a new one each round.

    Nothing but the poll for its readiness comes before the first request.
    """
    prompts = Prompts(seed, "first requests")
    ttfts: list[list[float]] = []  # of a cluster's requests
    for number in range(run.rounds):
        run.say(f"starting cluster {number + 1} of {run.rounds} for its first requests")
        async with cluster_server("the cluster", sets) as server:
            answers = [await server.ask(prompts.draw(PROMPT_TOKENS), OUTPUT_TOKENS) for _ in range(LAST)]
        ttfts.append([answer.ttft_s for answer in answers])
    for nth, name in _NAMES.items():
        yield spread(CASE, f"TTFT, {name} request", [one[nth - 1] for one in ttfts], "ms", 1e3)
    ratios = [one[0] / one[LAST - 1] for one in ttfts]
    first, last = (median(one[nth - 1] for one in ttfts) for nth in (1, LAST))
    yield Row(CASE, "TTFT, first over tenth", first / last, "times", samples=ratios)
