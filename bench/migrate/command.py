"""The command ``moonpool bench migrate``."""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path

import click

from moonpool.bench.harness.command import Run, benchmark
from moonpool.bench.harness.shapes import models_of
from moonpool.bench.migrate.downtime import OUTPUT_TOKENS, downtime_rows
from moonpool.bench.migrate.simulated import HARDWARE, simulated_rows
from moonpool.bench.migrate.tail_latency import tail_rows
from moonpool.runtime.config.loading import load_config
from moonpool.runtime.reports.conditions import CacheState, Conditions, ModelFacts

_CONTEXTS = (512, 2048, 8192)


@dataclass(frozen=True)
class Settings:
    contexts: tuple[int, ...]
    moves: int
    tbt_s: float
    sets: tuple[str, ...]


@benchmark(
    {
        "downtime": lambda run, given: downtime_rows(run, given.contexts, given.moves, given.sets),
        "tail": lambda run, given: tail_rows(run, given.sets, given.tbt_s),
        "simulated": lambda run, given: simulated_rows(run),
    },
    packages=("torch", "aiohttp", "grpcio", "redis", "uvloop"),
    rounds=3,
    default=("downtime",),
)
@click.option(
    "--context",
    "contexts",
    multiple=True,
    type=click.IntRange(min=1),
    default=_CONTEXTS,
    metavar="TOKENS",
    help="downtime: tokens of the prompt. Repeatable.",
)
@click.option(
    "--moves",
    default=40,
    type=click.IntRange(min=1),
    help="downtime: moves of each context, each of another request.",
)
@click.option(
    "--slo-tbt",
    "tbt_s",
    default=0.0,
    metavar="SECONDS",
    help="tail: target of the time between two tokens; without it no node is too slow.",
)
@click.option("--set", "sets", multiple=True, metavar="KEY=VALUE", help="Option of the local cluster.")
def migrate(
    run: Run, *, contexts: tuple[int, ...], moves: int, tbt_s: float, sets: tuple[str, ...]
) -> Settings:
    """Measure moves of running requests between decode nodes, as their clients see them.

    tail: a load on two clusters, in turns: one where requests move for all reasons, one where they stay.
    simulated: the same comparison in virtual time, on large nodes.
    downtime: a model of too few positions for the longest context gets more. Its weights stay as they are.
    """
    if run.quick:
        contexts, moves = contexts[:1], min(moves, 3)
    directory = load_config(None, sets).model.directory
    folder = run.stack.enter_context(tempfile.TemporaryDirectory(prefix="model-"))
    directory = with_positions(directory, max(contexts) + OUTPUT_TOKENS, Path(folder))
    sets = (*sets, f"model.path={directory}")
    run.conditions = Conditions(
        [
            *(models_of(sets) if set(run.parts) - {"simulated"} else []),
            *([ModelFacts.simulated(HARDWARE.name)] if "simulated" in run.parts else []),
        ],
        CacheState.holding(0, 0, "each request has a new prompt"),
        "downtime: a move of each context; tail: a round",
        {"prompts": 0},
    )
    return Settings(contexts, moves, tbt_s, sets)


def with_positions(directory: Path, num_positions: int, scratch: Path) -> Path:
    """``directory``, or a copy in ``scratch`` with links to its files and at least ``num_positions``."""
    words = json.loads((directory / "config.json").read_text())
    if words["max_position_embeddings"] >= num_positions:
        return directory
    for file in directory.iterdir():
        if file.name != "config.json":
            (scratch / file.name).symlink_to(file.resolve())
    (scratch / "config.json").write_text(json.dumps(words | {"max_position_embeddings": num_positions}))
    return scratch
