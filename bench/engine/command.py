"""The command ``moonpool bench engine``."""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import click
import torch
from rich.console import Console

from moonpool.bench.engine.driver import Session, session
from moonpool.bench.engine.model_shapes import SHAPES, Floor, make_checkpoint
from moonpool.engine.device.selection import choose_device
from moonpool.runtime.config.options import EngineOptions
from moonpool.runtime.reports import report
from moonpool.runtime.reports.report import Report, Row

_PATH = click.Path(path_type=Path)
_PACKAGES = ("torch", "triton", "numpy")
_GOALS = {"decode": 1.3, "ttft": 1.5}  # times the floor, for the large model on a GPU


def measure_device(device: torch.device) -> tuple[float, float]:
    """Bytes a second of a large copy, read and written; operations a second of a large bfloat16 product."""
    on_gpu = device.type == "cuda"
    source = torch.empty(4 << 30 if on_gpu else 256 << 20, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    n = 8192 if on_gpu else 1024
    left, right = torch.randn(2, n, n, device=device).bfloat16().unbind(0)

    def best_s(work: Callable[[], object], times: int = 8) -> float:
        def once() -> float:
            if on_gpu:
                torch.cuda.synchronize(device)
            begun_s = time.perf_counter()
            for _ in range(5):
                work()
            if on_gpu:
                torch.cuda.synchronize(device)
            return (time.perf_counter() - begun_s) / 5

        once()
        return min(once() for _ in range(times))

    return 2 * source.nbytes / best_s(lambda: target.copy_(source)), 2 * n**3 / best_s(lambda: left @ right)


def _against_floor(case: str, metric: str, seconds: float, floor_s: float, goal: float | None) -> Row:
    limit = {} if goal is None else {"limit": "at most", "limit_value": goal}
    row = Row(case, metric, seconds * 1e3, "ms", **limit)  # type: ignore[arg-type]
    return report.versus(row, "floor", floor_s * 1e3)


async def _measure(
    running: Session, floor: Floor, name: str, batches: list[tuple[int, int]], prompt: int, goals: bool
) -> list[Row]:
    rows = []
    itemsize = {"float32": 4}.get(running.engine.dtype, 2)
    for batch, context in batches:
        steps = await running.decode(batch, context, 64)
        case = f"{name}, {running.engine.dtype}, decode, batch {batch}, context {context}"
        goal = _GOALS["decode"] if goals and batch == 64 else None
        floor_s = floor.decode_s(batch, steps.context, itemsize)
        rows.append(_against_floor(case, "step", steps.step_s, floor_s, goal))
        rows.append(_against_floor(case, "of it, launched to arrived", steps.device_s, floor_s, None))
    await running.first_token_s(prompt)
    seconds = statistics.median([await running.first_token_s(prompt) for _ in range(3)])
    case = f"{name}, {running.engine.dtype}, prompt of {prompt}"
    goal = _GOALS["ttft"] if goals else None
    rows.append(_against_floor(case, "first token", seconds, floor.prefill_s(prompt), goal))
    return rows


@click.command()
@click.option("--model", "name", type=click.Choice(list(SHAPES)), help="Default: llama-3-8b on a GPU.")
@click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda, cuda:1 …")
@click.option("--block-size", default=16, show_default=True, help="Tokens a KV block.")
@click.option("--no-graphs", is_flag=True, help="Launch every kernel of a decode step anew.")
@click.option(
    "--json", "json_path", type=click.Path(path_type=Path), metavar="FILE", help="Write the report there."
)
def engine(name: str | None, device: str, block_size: int, no_graphs: bool, json_path: Path | None) -> None:
    """Measure a whole engine with random weights: decode steps and time to first token, beside their floor.

    A decode step cannot take less than reading all weights (of experts, those chosen) and the KV of all
    sequences once takes; a prompt not less than its products. What the machine gives of both is measured in
    the same run.
    """
    console = Console(stderr=True, highlight=False)
    where = choose_device(device).torch
    on_gpu = where.type == "cuda"
    name = name or ("llama-3-8b" if on_gpu else "small")
    large = name == "llama-3-8b"
    batches = [(64, 2048), (1, 2048), (16, 2048)] if large else [(8, 256), (1, 256)]
    prompt = 8192 if large else 512
    nbytes_per_s, flops_per_s = measure_device(where)
    console.print(f"copy {nbytes_per_s / 1e9:,.0f} GB/s, bfloat16 product {flops_per_s / 1e12:,.3g} TFLOP/s")
    options = EngineOptions(
        block_size=block_size,
        max_batch_size=64,
        max_batch_tokens=8192 if large else 512,
        decode_graphs=not no_graphs,
    )

    async def run(directory: Path) -> list[Row]:
        begun_s = time.perf_counter()
        config = make_checkpoint(name, directory, 2 * prompt)
        floor = Floor(config, nbytes_per_s, flops_per_s)
        async with session(config, options, device, "bfloat16") as running:
            start_s = time.perf_counter() - begun_s
            rows = [
                Row("machine", "large copy, read and written", nbytes_per_s / 1e9, "GB/s"),
                Row("machine", "bfloat16 product", flops_per_s / 1e12, "TFLOP/s"),
                Row(name, "start", start_s, "s"),
                Row(name, "KV blocks", running.engine.pool.num_blocks, "blocks"),
            ]
            return rows + await _measure(running, floor, name, batches, prompt, on_gpu and large)

    with tempfile.TemporaryDirectory(prefix="moonpool-") as directory:
        rows = asyncio.run(run(Path(directory)))
    found = Report(report.measure_environment(_PACKAGES), rows)
    if json_path is not None:
        report.write(found, json_path)
    report.show(found)
