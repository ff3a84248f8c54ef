"""The command ``moonpool bench parallel``."""

from __future__ import annotations

import asyncio
from pathlib import Path
from tempfile import TemporaryDirectory

import click
import torch
from rich.console import Console

from moonpool.bench.parallel import expert_dispatch as experts
from moonpool.bench.parallel import handover, replicas, steps
from moonpool.bench.parallel import host_memory as saving
from moonpool.bench.parallel import remote_stages as hosts
from moonpool.bench.parallel.plot import draw
from moonpool.engine.sharding.parallel_plan import ParallelPlan
from moonpool.runtime.config.options import ModelOptions
from moonpool.runtime.reports import report
from moonpool.runtime.reports.report import Report, Row

_PATH = click.Path(path_type=Path)
_PACKAGES = ("torch", "numpy")
_PLANS = ("1,1", "2,1", "1,2", "2,2", "1,1,2")
_REPLICAS = 2
# Ranks on CPUs: as many as there are cores to be patient with.
_MANY = 1 << 10


def _plan(text: str) -> ParallelPlan:
    try:
        tp, pp, cp = map(int, text.split(",") if text.count(",") == 2 else (*text.split(","), "1"))
    except ValueError:
        raise click.BadParameter(f"{text} is not TP,PP or TP,PP,CP", param_hint="--plan") from None
    return ParallelPlan(tp, pp, cp=cp)


@click.command()
@click.option("--plan", "texts", multiple=True, default=_PLANS, show_default=True, metavar="TP,PP[,CP]")
@click.option("--model", type=_PATH, help="Checkpoint directory; default: the model that ships.")
@click.option(
    "--device",
    type=click.Choice(("auto", "cpu", "cuda")),
    default="auto",
    show_default=True,
    help="auto: GPUs where there are several.",
)
@click.option("--rounds", default=5, show_default=True, help="Prompts a plan, and readings of each pair.")
@click.option(
    "--part",
    "parts",
    multiple=True,
    type=click.Choice(("steps", "hosts", "replicas", "handover", "saving", "experts")),
    help="Default: all. experts: of a small mixture with random weights.",
)
@click.option("--json", "json_path", type=_PATH, metavar="FILE", help="Write the report there.")
@click.option("--plot", "plot_path", type=_PATH, metavar="FILE", help="Draw what was measured (PNG).")
def parallel(
    texts: tuple[str, ...],
    model: Path | None,
    device: str,
    rounds: int,
    parts: tuple[str, ...],
    json_path: Path | None,
    plot_path: Path | None,
) -> None:
    """Measure a model spread over processes of this machine: on CPUs one thread each, or a GPU each.

    Of each plan: a decode step and a long prompt, what of it ranks compute, exchange and wait, and what the
    leader adds; then what it costs that two stages are on two machines (rank hosts on loopback), what two
    replicas compute at the same time, blocks from each plan to each and to host memory, and experts that are
    dealt out to ranks. On GPUs exchanges are launched, not waited for: what is said of their time is that of
    the launch, while steps and first tokens are whole.
    """
    console = Console(stderr=True, highlight=False)
    num_gpus = torch.cuda.device_count()
    if device == "auto":
        device = "cuda" if num_gpus > 1 else "cpu"
    most_ranks = num_gpus if device == "cuda" else _MANY
    plans = []
    for plan in map(_plan, texts):
        if plan.world_size <= most_ranks:
            plans.append(plan)
        else:
            console.print(f"{plan} is left out: it needs {plan.world_size} GPUs, there are {num_gpus}")
    directory = model or ModelOptions().directory

    async def run() -> list[Row]:
        rows: list[Row] = []
        if not parts or "steps" in parts:
            # One rank first: the others are compared with it.
            one, alone = ParallelPlan(), None
            for plan in [one, *(plan for plan in plans if plan != one)]:
                console.print(str(plan), style="dim")
                found, took = await steps.measure(directory, plan, rounds, alone, device)
                rows += found
                alone = alone or took
        if (not parts or "hosts" in parts) and device == "cpu":
            console.print(f"{hosts.PLAN} over {hosts.NUM_HOSTS} machines", style="dim")
            rows += await hosts.measure(directory, rounds)
        if (not parts or "replicas" in parts) and most_ranks >= _REPLICAS:
            console.print(f"dp {_REPLICAS}", style="dim")
            rows += await replicas.measure(directory, _REPLICAS, rounds, device)
        if (not parts or "handover" in parts) and plans:
            console.print("blocks between plans", style="dim")
            rows += await handover.measure(directory, plans, rounds, device)
        if (not parts or "saving" in parts) and plans:
            console.print("blocks to host memory and back", style="dim")
            rows += await saving.measure(directory, plans, rounds, device)
        if not parts or "experts" in parts:
            console.print("experts on several ranks", style="dim")
            with TemporaryDirectory() as made:
                rows += await experts.measure(Path(made), rounds, device, most_ranks)
        return rows

    found = Report(report.measure_environment(_PACKAGES), asyncio.run(run()))
    if json_path is not None:
        report.write(found, json_path)
    if plot_path is not None:
        draw(found, plot_path)
    report.show(found)
