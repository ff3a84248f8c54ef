"""The command ``moonpool bench eviction``."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from moonpool.bench.eviction.ablations import ablations
from moonpool.bench.eviction.policies import CONTENDERS
from moonpool.bench.eviction.replay import GENERATED, RULES, Request, optimum, replay, replay_writes
from moonpool.bench.harness.command import Run, benchmark
from moonpool.runtime.reports.conditions import CacheState, Conditions
from moonpool.runtime.reports.report import Curve, Row, versus
from moonpool.simulator.inputs.trace import load_trace

_CAPACITIES = "1000,10000,30000,50000,100000"
_QUICK_REQUESTS = 1000
_OPTIMUM = "clairvoyant"


@dataclass(frozen=True, slots=True)
class Settings:
    requests: Sequence[Request]
    policies: Sequence[str]
    capacities: Sequence[int]
    ablates: bool = False
    ssd_blocks: int = 0


def eviction_rows(run: Run, settings: Settings) -> Iterator[Row]:
    """Hit rates of blocks, and CPU time of a block, for each capacity and policy."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for capacity in settings.capacities:
        case = f"{capacity:,} blocks"
        run.say(case)
        results = {name: replay(settings.requests, name, capacity) for name in settings.policies}
        rates = {name: result.hit_rate for name, result in results.items()}
        rates[_OPTIMUM] = optimum(settings.requests, capacity)
        for name, rate in rates.items():
            row, lru = Row(case, f"{name} hit rate", rate, "of blocks"), rates.get("lru")
            yield versus(row, "lru", lru) if lru and name not in ("lru", _OPTIMUM) else row
            lines.setdefault(name, []).append((capacity, rate))
        for name, rate in ablations(settings.requests, capacity) if settings.ablates else ():
            yield Row(case, f"{name}: hit rate", rate, "of blocks")
        if settings.ssd_blocks:
            yield from _write_rows(case, settings, capacity)
        for name, result in results.items():
            yield Row(case, f"{name} time", result.seconds / result.num_blocks * 1e6, "µs/block")
    for name, points in lines.items():
        run.curves.append(Curve("hit rate", name, "capacity, blocks", "hit rate of blocks", points))


def _write_rows(case: str, settings: Settings, capacity: int) -> Iterator[Row]:
    """What is written to SSD below ``capacity`` blocks of host memory, by write policy and eviction."""
    base = 0
    for rule in RULES:
        for policy in ("lru", "prefix"):
            found = replay_writes(settings.requests, rule, policy, capacity, settings.ssd_blocks)
            name = f"{rule}, {policy} on SSD"
            yield Row(case, f"{name}: hit rate", found.hit_rate, "of blocks")
            base = base or found.num_writes
            row = Row(case, f"{name}: writes", found.num_writes, "blocks")
            yield versus(row, "write-through, lru", base)


@benchmark({"eviction": eviction_rows}, packages=())
@click.option("--trace", type=click.Path(path_type=Path), help="In Mooncake's format, gzipped or not.")
@click.option(
    "--generate", type=click.Choice(sorted(GENERATED)), help="Instead of a trace: a load made here, seeded."
)
@click.option("--policies", default=",".join(CONTENDERS), metavar="NAMES")
@click.option("--blocks", default=_CAPACITIES, metavar="COUNTS", help="Capacities.")
@click.option("--ablations", "ablates", is_flag=True, help="Also prefix with more knowledge than it has.")
@click.option(
    "--ssd",
    "ssd_blocks",
    default=0,
    type=click.IntRange(min=0),
    metavar="BLOCKS",
    help="Also what is written to an SSD below them.",
)
@click.option("--block-tokens", default=512, type=click.IntRange(min=1), help="Tokens of an id of the trace.")
@click.option("--seed", default=1, help="With --generate.")
def eviction(
    run: Run,
    trace: Path | None,
    generate: str | None,
    policies: str,
    blocks: str,
    ablates: bool,
    ssd_blocks: int,
    block_tokens: int,
    seed: int,
) -> Settings:
    """Replay a trace through eviction policies, and through the clairvoyant optimum."""
    if (trace is None) == (generate is None):
        raise click.UsageError("give either --trace FILE or --generate NAME")
    names = policies.split(",")
    unknown = [name for name in names if name not in CONTENDERS]
    if unknown:
        raise click.UsageError(f"no policy {', '.join(unknown)}; there are {', '.join(CONTENDERS)}")
    try:
        capacities = [int(count) for count in blocks.split(",")]
        if min(capacities) < 0:
            raise ValueError(f"{min(capacities)} is negative")
    except ValueError as error:
        raise click.UsageError(f"--blocks must be numbers with commas between: {error}") from error
    if trace is not None:
        requests = [request.block_ids for request in load_trace(trace, block_tokens=block_tokens)]
    else:
        requests = [tuple(blocks) for blocks in GENERATED[generate or ""](random.Random(seed))]
    run.conditions = Conditions(
        [],
        CacheState.holding(0, block_tokens, "each policy and capacity starts without blocks"),
        "nothing: hits are counted from the first request on",
        {} if generate is None else {"requests": seed},
    )
    some = requests[: _QUICK_REQUESTS if run.quick else None]
    return Settings(some, names, capacities, ablates, ssd_blocks)
