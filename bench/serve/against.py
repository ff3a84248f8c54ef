"""Two clusters at once under the same load, in turn: with other options, or with more nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

from moonpool.bench.harness.command import Run
from moonpool.bench.harness.turns import spread, turns
from moonpool.bench.serve.client import load
from moonpool.bench.serve.client.cluster import CPU_S, MetricsPages, cluster_servers
from moonpool.bench.serve.client.server import RequestFailed, Server
from moonpool.bench.serve.client.workload import Workload
from moonpool.bench.serve.figures import output_rate
from moonpool.bench.serve.settings import Settings
from moonpool.runtime.reports.report import Row, versus

# Of one turn of a cluster: metric, unit, factor.
_AGAINST = (
    ("output throughput", "tokens/s", 1.0),
    ("TPOT", "ms", 1e3),
    ("CPU of all processes, a token", "ms", 1e3),
)


async def against_rows(run: Run, settings: Settings) -> list[Row]:
    """Two clusters at once, A with the options ``sets`` and B with ``against_sets`` too; the load in turn.

    Medians side by side, and the ratios of each round's two turns.
    """
    samples = await _in_turn(run, settings, settings.sets, settings.against_sets)
    return side_rows(f"A/B, {' '.join(settings.against_sets)}, {_load_of(settings)}", *samples)


async def node_rows(run: Run, settings: Settings) -> list[Row]:
    """Two nodes (B) against one (A), each with one core, under the same load."""
    one = ("cluster.prefill=0", "cluster.decode=0", "cluster.both=1", "engine.threads=1", *settings.sets)
    a, b = await _in_turn(run, settings, one, ("cluster.both=2",))
    case = f"two nodes against one, {_load_of(settings)}"
    rates = zip(a[:: len(_AGAINST)], b[:: len(_AGAINST)], strict=True)
    efficiency = [two / one / 2 for one, two in rates]
    return [*side_rows(case, a, b), spread(case, "scaling efficiency", efficiency, "of one node's")]


async def _in_turn(
    run: Run, settings: Settings, sets: Sequence[str], more: Sequence[str]
) -> tuple[list[float], list[float]]:
    """The figures of ``_AGAINST`` of each turn: of a cluster with ``sets``, and of one with ``more`` too."""
    async with cluster_servers(run, {"A": sets, "B": (*sets, *more)}) as servers:
        sides = [_Side(server, await MetricsPages.of_local(server)) for server in servers.values()]
        seed = settings.workload.seed

        def new_prompts(number: int) -> None:
            # Neither side may find another turn's prompts in its cache.
            nonlocal seed
            seed += 1

        calls = {
            side.server.name: lambda side=side: side.turn(replace(settings.workload, seed=seed))
            for side in sides
        }
        samples = await turns(calls, run.rounds, rotate=1, before=new_prompts)
    return samples["A"], samples["B"]


def _load_of(settings: Settings) -> str:
    work = settings.workload
    return f"{work.concurrency} concurrent, {work.prompt_tokens} + {work.output_tokens} tokens"


def side_rows(case: str, a: Sequence[float], b: Sequence[float]) -> list[Row]:
    """a, b: the figures of ``_AGAINST`` of each turn, one after the other."""
    rows = []
    for at, (metric, unit, factor) in enumerate(_AGAINST):
        of_a, of_b = ([factor * value for value in of[at :: len(_AGAINST)]] for of in (a, b))
        rows.append(versus(spread(case, metric, of_b, unit), "A", median(of_a)))
        ratios = [theirs / ours for theirs, ours in zip(of_b, of_a, strict=True)]
        rows.append(spread(case, f"{metric}, B over A", ratios, "times"))
        rows.append(Row(case, f"{metric}, B over A, least round", min(ratios), "times"))
    return rows


@dataclass(frozen=True, slots=True)
class _Side:
    server: Server
    pages: MetricsPages

    async def turn(self, work: Workload) -> list[float]:
        """The figures of ``_AGAINST``."""
        before_s = await self.pages.total(CPU_S)
        outcome = await load.run(self.server, work)
        if failed := load.failures(outcome.answers):
            raise RequestFailed(f"{self.server.name}: {failed}")
        num_tokens = sum(answer.output_tokens for answer in outcome.answers)
        tpot_s = median(answer.tpot_s for answer in outcome.answers)
        return [output_rate(outcome), tpot_s, (await self.pages.total(CPU_S) - before_s) / num_tokens]
