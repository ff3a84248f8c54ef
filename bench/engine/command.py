"""The command ``moonpool bench engine``."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import click

from moonpool.bench.engine.driver import Session, session
from moonpool.bench.engine.model_shapes import SHAPES, make_checkpoint
from moonpool.bench.harness import shapes
from moonpool.bench.harness.command import Run, benchmark
from moonpool.bench.harness.floor import Floor, measure_device
from moonpool.engine.checkpoint.config import ModelConfig
from moonpool.engine.device.selection import choose_device
from moonpool.runtime.config.options import EngineOptions
from moonpool.runtime.machine.processor import usable_cores
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


async def engine_rows(run: Run, settings: Settings) -> AsyncIterator[Row]:
    device = choose_device(settings.device).torch
    num_threads = settings.options.compute_threads(usable_cores())
    nbytes_per_s, flops_per_s = measure_device(device, num_threads)
    on_gpu, name = device.type == "cuda", settings.name
    if not on_gpu:
        yield Row("machine", "compute threads", num_threads, "threads")
    memory = "large copy, read and written" if on_gpu else "large read"
    yield Row("machine", memory, nbytes_per_s / 1e9, "GB/s")
    yield Row("machine", "torch's best bfloat16 product", flops_per_s / 1e12, "TFLOP/s")
    with tempfile.TemporaryDirectory(prefix="moonpool-") as directory:
        began_s = time.perf_counter()
        if name in shapes.SHAPES:
            config = ModelConfig.from_checkpoint(shapes.shape_directory(name))
        else:
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
@click.option(
    "--shape",
    "--model",
    "name",
    type=click.Choice([*SHAPES, *shapes.SHAPES]),
    help="Default: llama-3-8b on a GPU.",
)
@click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda, cuda:1 …")
@click.option("--block-size", default=16, show_default=True, help="Tokens of a KV block.")
@click.option("--threads", default=0, help="Compute threads on a CPU; 0: all cores.")
@click.option("--no-graphs", is_flag=True, help="Launch every kernel of a decode step anew.")
def engine(
    run: Run, name: str | None, device: str, block_size: int, threads: int, no_graphs: bool
) -> Settings:
    """Measure a whole engine with random weights: decode steps and time to first token, beside their floor.

    A decode step takes at least the time of reading all weights (of experts, those chosen) and the KV of all
    sequences once; a prompt takes at least that of its products. The machine is measured in the same run.
    """
    on_gpu = choose_device(device).torch.type == "cuda"
    name = name or ("llama-3-8b" if on_gpu else "small")
    large, real = name == "llama-3-8b", name in shapes.SHAPES
    return Settings(
        name,
        device,
        ((64, 2048), (1, 2048), (16, 2048)) if large else ((8, 256), (1, 256)),
        16 if run.quick or real else 64,
        8192 if large else 2048 if real else 512,
        EngineOptions(
            block_size=block_size,
            max_batch_size=64,
            max_batch_tokens=8192 if large else 512,
            decode_graphs=not no_graphs,
            threads=threads,
            pool_nbytes=1 << 30 if real else 0,
        ),
    )
