"""The command ``moonpool bench engine``."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

import click
import torch

from moonpool.bench.engine.driver import Session, session
from moonpool.bench.engine.model_shapes import SHAPES, Floor, make_checkpoint
from moonpool.bench.harness.command import Run, benchmark
from moonpool.engine.device.selection import choose_device
from moonpool.runtime.config.options import EngineOptions
from moonpool.runtime.reports.report import Row, versus


@dataclass(frozen=True, slots=True)
class Settings:
    """name: of the shape. batches: (sequences, tokens of each)."""

    name: str
    device: str
    batches: tuple[tuple[int, int], ...]
    num_steps: int
    prompt_tokens: int
    options: EngineOptions


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


async def engine_rows(run: Run, settings: Settings) -> AsyncIterator[Row]:
    nbytes_per_s, flops_per_s = measure_device(choose_device(settings.device).torch)
    yield Row("machine", "large copy, read and written", nbytes_per_s / 1e9, "GB/s")
    yield Row("machine", "bfloat16 product", flops_per_s / 1e12, "TFLOP/s")
    name = settings.name
    with tempfile.TemporaryDirectory(prefix="moonpool-") as directory:
        began_s = time.perf_counter()
        config = make_checkpoint(name, Path(directory), 2 * settings.prompt_tokens)
        floor = Floor(config, nbytes_per_s, flops_per_s)
        async with session(config, settings.options, settings.device, "bfloat16") as running:
            yield Row(name, "start", time.perf_counter() - began_s, "s")
            yield Row(name, "KV blocks", running.engine.pool.num_blocks, "blocks")
            async for row in _session_rows(running, floor, settings, run.rounds):
                yield row


async def _session_rows(
    running: Session, floor: Floor, settings: Settings, rounds: int
) -> AsyncIterator[Row]:
    dtype, prompt_tokens = running.engine.dtype, settings.prompt_tokens
    for batch, context in settings.batches:
        steps = await running.decode(batch, context, settings.num_steps)
        case = f"{settings.name}, {dtype}, decode, batch {batch}, context {context}"
        floor_ms = 1e3 * floor.decode_s(batch, steps.context, 4 if dtype == "float32" else 2)
        yield versus(Row(case, "step", 1e3 * steps.step_s, "ms"), "floor", floor_ms)
        arrived = Row(case, "of it, launched to arrived", 1e3 * steps.device_s, "ms")
        yield versus(arrived, "floor", floor_ms)
    await running.first_token_s(prompt_tokens)
    seconds = statistics.median([await running.first_token_s(prompt_tokens) for _ in range(rounds)])
    row = Row(f"{settings.name}, {dtype}, prompt of {prompt_tokens}", "first token", 1e3 * seconds, "ms")
    yield versus(row, "floor", 1e3 * floor.prefill_s(prompt_tokens))


@benchmark({"engine": engine_rows}, packages=("torch", "triton", "numpy"), rounds=3)
@click.option("--model", "name", type=click.Choice(list(SHAPES)), help="Default: llama-3-8b on a GPU.")
@click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda, cuda:1 …")
@click.option("--block-size", default=16, show_default=True, help="Tokens of a KV block.")
@click.option("--no-graphs", is_flag=True, help="Launch every kernel of a decode step anew.")
def engine(run: Run, name: str | None, device: str, block_size: int, no_graphs: bool) -> Settings:
    """Measure a whole engine with random weights: decode steps and time to first token, beside their floor.

    A decode step takes at least the time of reading all weights (of experts, those chosen) and the KV of all
    sequences once; a prompt takes at least that of its products. The machine is measured in the same run.
    """
    on_gpu = choose_device(device).torch.type == "cuda"
    name = name or ("llama-3-8b" if on_gpu else "small")
    large = name == "llama-3-8b"
    return Settings(
        name,
        device,
        ((64, 2048), (1, 2048), (16, 2048)) if large else ((8, 256), (1, 256)),
        16 if run.quick else 64,
        8192 if large else 512,
        EngineOptions(
            block_size=block_size,
            max_batch_size=64,
            max_batch_tokens=8192 if large else 512,
            decode_graphs=not no_graphs,
        ),
    )
