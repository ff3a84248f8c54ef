"""Prefix matching, ours and that of Dynamo's RadixTree, as its Python binding gives it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from statistics import median
from time import perf_counter

from moonpool.bench.conductor.decisions import Population, Settings
from moonpool.bench.harness.child import peer
from moonpool.bench.harness.command import Run
from moonpool.bench.harness.turns import Call, turns
from moonpool.runtime.reports.report import Row, versus

_NUM_NODES = 16
_LOOKUPS = 2000


async def matching_rows(run: Run, settings: Settings) -> AsyncIterator[Row]:
    """Both in turn, on equally made data."""
    num_blocks = 10_000 if run.quick else 1_000_000
    case = f"prefix matching, {_NUM_NODES} nodes, {num_blocks:,} blocks, prompts of 128 blocks"
    population = Population(_NUM_NODES, num_blocks, settings.policy)

    def match() -> float:
        seconds = []
        for _ in range(_LOOKUPS):
            keys = population.request().keys
            began_s = perf_counter()
            population.match(keys)
            seconds.append(perf_counter() - began_s)
        return median(seconds)

    if "dynamo" not in run.peers:
        ours = await turns({"ours": match}, run.rounds, warm_up=0)
        yield Row(case, "a lookup", 1e6 * median(ours["ours"]), "µs")
        return
    file = Path(__file__).with_name("dynamo_child.py")
    async with peer("dynamo", file, "Tree", num_nodes=_NUM_NODES, num_blocks=num_blocks) as child:
        contestants: dict[str, Call] = {
            "ours": match,
            "dynamo": lambda: child.call("lookup_s", count=_LOOKUPS),
            "hop": lambda: child.call("hop_s", count=_LOOKUPS),
        }
        seconds = await turns(contestants, run.rounds, warm_up=0)
    ours_us, theirs_us, hop_us = (1e6 * median(of) for of in seconds.values())
    yield versus(Row(case, "a lookup", ours_us, "µs"), "dynamo", theirs_us)
    yield Row(case, "of Dynamo's, the hop to its thread and back (an empty lookup)", hop_us, "µs")
