"""The command ``moonpool bench parallel``."""

from __future__ import annotations

import sys
from pathlib import Path

import click
import torch

from moonpool.bench.harness.command import Run, benchmark
from moonpool.bench.harness.shapes import model_at
from moonpool.bench.parallel.bubble import NUM_STAGES, bubble_rows
from moonpool.bench.parallel.capacity import EP, capacity_rows
from moonpool.bench.parallel.context import context_rows
from moonpool.bench.parallel.experts import expert_rows
from moonpool.bench.parallel.handover import handover_rows, saving_rows
from moonpool.bench.parallel.stages import NUM_REPLICAS, replica_rows
from moonpool.bench.parallel.steps import Settings, host_rows, step_rows
from moonpool.bench.parallel.worth import worth_rows
from moonpool.engine.sharding.parallel_plan import ParallelPlan
from moonpool.runtime.config.options import ModelOptions
from moonpool.runtime.reports.conditions import CacheState, Conditions

_PLANS = ("1,1", "2,1", "1,2", "2,2", "1,1,2")


def _plan(text: str) -> ParallelPlan:
    try:
        tp, pp, cp = map(int, text.split(",") if text.count(",") == 2 else (*text.split(","), "1"))
    except ValueError:
        raise click.BadParameter(f"{text} is not TP,PP or TP,PP,CP", param_hint="--plan") from None
    return ParallelPlan(tp, pp, cp=cp)


@benchmark(
    {
        "steps": step_rows,
        "hosts": host_rows,
        "replicas": replica_rows,
        "handover": handover_rows,
        "saving": saving_rows,
        "experts": expert_rows,
        "capacity": capacity_rows,
        "bubble": bubble_rows,
        "worth": worth_rows,
        "cp": context_rows,
    },
    packages=("torch", "numpy"),
    default=("steps", "hosts", "replicas", "handover", "saving", "experts"),
)
@click.option("--bubble", is_flag=True, help="Only the part bubble.")
@click.option("--worth", is_flag=True, help="Only the part worth.")
@click.option("--cp", is_flag=True, help="Only the part cp.")
@click.option("--plan", "texts", multiple=True, metavar="TP,PP[,CP]", help=f"Default: {' '.join(_PLANS)}")
@click.option(
    "--model",
    type=click.Path(path_type=Path),
    help="Checkpoint directory; default: the shipped model, of worth one like Qwen3-0.6B. experts, capacity, "
    "bubble: always made ones.",
)
@click.option(
    "--device",
    type=click.Choice(("auto", "cpu", "cuda")),
    default="auto",
    help="auto: GPUs where there are several.",
)
def parallel(
    run: Run,
    bubble: bool,
    worth: bool,
    cp: bool,
    texts: tuple[str, ...],
    model: Path | None,
    device: str,
) -> Settings:
    """Measure a model spread over processes of this machine: on CPUs with one thread each, or a GPU each.

    steps: a decode step and a long prompt of each plan, and its time in computing, exchanging and waiting.
    hosts: two stages on two machines (played by loopback). replicas: several at the same time.
    handover, saving: blocks from each plan to each, and to host memory. experts: distributed over ranks.
    capacity: at most so many rows an expert: time saved, and how often the best token changes.
    bubble: two stages with more and more micro-batches in flight, each stage's process with less memory than
    the whole model takes, beside one process without a limit.
    worth: tp 2 and two replicas beside one rank, over HTTP, 1 to 100 requests at a time; and by simulation.
    cp: the largest prompt, the KV of a rank, and the time of a long prompt, with blocks split over 2 and 4.
    On GPUs exchanges are launched, not waited for: their time is that of the launch.
    """
    num_gpus = torch.cuda.device_count()
    if device == "auto":
        device = "cuda" if num_gpus > 1 else "cpu"
    max_ranks = num_gpus if device == "cuda" else sys.maxsize
    plans = []
    for plan in map(_plan, texts or _PLANS[: 2 if run.quick else None]):
        if plan.world_size <= max_ranks:
            plans.append(plan)
        else:
            run.say(f"{plan} is left out: it needs {plan.world_size} GPUs, there are {num_gpus}")
    if bubble or worth or cp:
        run.parts = ["bubble"] * bubble + ["worth"] * worth + ["cp"] * cp
    left_out = {"hosts"} if device == "cuda" else set()
    left_out |= {"replicas"} if max_ranks < NUM_REPLICAS else set()
    left_out |= {"bubble", "capacity"} if max_ranks < max(NUM_STAGES, EP) else set()
    left_out |= set() if plans else {"handover", "saving"}
    run.parts = [part for part in run.parts if part not in left_out]
    directory = model or ModelOptions().directory
    run.conditions = Conditions(
        [model_at(directory, as_stored=device == "cuda")],
        CacheState.holding(0, 0, "no prompt is sent twice"),
        "a few steps, and a prompt, of each plan; replicas, handover: nothing",
        {"prompts": 0},
    )
    sizes = (20, 300, 8) if run.quick else (200, 4096, 96)
    return Settings(directory, plans, device, max_ranks, *sizes)
