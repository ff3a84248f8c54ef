"""The command ``moonpool bench engine``."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import click

from moonpool.bench.engine import drafts, masks
from moonpool.bench.engine.driver import DecodeSteps, Session, session
from moonpool.bench.engine.model_shapes import SHAPES, make_checkpoint
from moonpool.bench.engine.perplexity import VARIANTS, perplexity
from moonpool.bench.harness import shapes
from moonpool.bench.harness.command import Run, benchmark
from moonpool.bench.harness.floor import Floor, instruction_limit, measure_device
from moonpool.bench.harness.shapes import model_at, random_model
from moonpool.bench.harness.turns import turns
from moonpool.engine.checkpoint.config import ModelConfig
from moonpool.engine.device.selection import choose_device
from moonpool.runtime.config.engine_options import shipped
from moonpool.runtime.config.options import EngineOptions, ModelOptions
from moonpool.runtime.machine.processor import usable_cores
from moonpool.runtime.reports.conditions import CacheState, Conditions
from moonpool.runtime.reports.report import Row, versus

# Of the draft model of a shape.
_DRAFT_LAYERS = 2


@dataclass(frozen=True, slots=True)
class Settings:
    """name: of the shape. batches: (sequences, tokens of each)."""

    name: str
    device: str
    batches: tuple[tuple[int, int], ...]
    num_steps: int
    prompt_tokens: int
    options: EngineOptions
    weights: tuple[str, ...]  # values of engine.weights that are measured in turn


async def engine_rows(run: Run, settings: Settings) -> list[Row]:
    rows: list[Row] = []
    device = choose_device(settings.device).torch
    num_threads = settings.options.compute_threads(usable_cores())
    nbytes_per_s, flops_per_s = measure_device(device, num_threads)
    on_gpu, name = device.type == "cuda", settings.name
    if not on_gpu:
        rows.append(Row("machine", "compute threads", num_threads, "threads"))
    memory = "large copy, read and written" if on_gpu else "large read"
    rows.append(Row("machine", memory, nbytes_per_s / 1e9, "GB/s"))
    rows.append(Row("machine", "torch's best product", flops_per_s / 1e12, "TFLOP/s"))
    if not on_gpu and (most := instruction_limit(num_threads)) is not None:
        rows.append(Row("machine", "multiply-adds on registers", most / 1e12, "TFLOP/s"))
    with tempfile.TemporaryDirectory(prefix="moonpool-") as directory:
        if name in shapes.SHAPES:
            config = ModelConfig.from_checkpoint(shapes.shape_directory(name))
        else:
            config = make_checkpoint(name, Path(directory), 2 * settings.prompt_tokens)
        floor = Floor(config, nbytes_per_s, flops_per_s)
        async with AsyncExitStack() as stack:
            sessions: dict[str, Session] = {}
            for weights in settings.weights:
                options = replace(settings.options, weights=weights)
                began_s = time.perf_counter()
                running = await stack.enter_async_context(
                    session(config, options, settings.device, "bfloat16")
                )
                named = f"{name}, {running.engine.dtype}"
                named += "" if weights == "auto" else f", {weights} weights"
                sessions[named] = running
                rows.append(Row(named, "start", time.perf_counter() - began_s, "s"))
                rows.append(Row(named, "KV blocks", running.engine.pool.num_blocks, "blocks"))
            for batch, context in settings.batches:
                rows += await _decode_rows(sessions, floor, settings, batch, context, run.rounds)
            return rows + await _prompt_rows(sessions, floor, settings.prompt_tokens, run.rounds)


async def _decode_rows(
    sessions: Mapping[str, Session],
    floor: Floor,
    settings: Settings,
    batch: int,
    context: int,
    rounds: int,
) -> list[Row]:
    """In turn, so that all see the same load. The first one is the peer of the others."""
    found: dict[str, list[DecodeSteps]] = {name: [] for name in sessions}
    for _ in range(rounds if len(sessions) > 1 else 1):
        for name, running in sessions.items():
            found[name].append(await running.decode(batch, context, settings.num_steps))
    first_s, rows = 0.0, list[Row]()
    for name, running in sessions.items():
        case = f"{name}, decode, batch {batch}, context {context}"
        itemsize = 4 if running.engine.dtype == "float32" else 2
        floor_s = floor.decode_s(batch, found[name][0].context, itemsize, running.weight_nbytes())
        step_s = statistics.median(steps.step_s for steps in found[name])
        rows.append(versus(Row(case, "step", 1e3 * step_s, "ms"), "floor", 1e3 * floor_s))
        device_s = statistics.median(steps.device_s for steps in found[name])
        arrived = Row(case, "of it, launched to arrived", 1e3 * device_s, "ms")
        rows.append(versus(arrived, "floor", 1e3 * floor_s))
        if first_s:
            rate = Row(case, "rate", batch / step_s, "tokens/s")
            rows.append(versus(rate, "plain weights", batch / first_s))
        first_s = first_s or step_s
    return rows


async def _prompt_rows(
    sessions: Mapping[str, Session], floor: Floor, prompt_tokens: int, rounds: int
) -> list[Row]:
    calls = {name: partial(running.first_token_s, prompt_tokens) for name, running in sessions.items()}
    case, floor_ms = f"prompt of {prompt_tokens}", 1e3 * floor.prefill_s(prompt_tokens)
    return [
        versus(Row(f"{name}, {case}", "first token", 1e3 * statistics.median(found), "ms"), "floor", floor_ms)
        for name, found in (await turns(calls, rounds)).items()
    ]


async def perplexity_rows(run: Run, settings: Settings) -> AsyncIterator[Row]:
    """Of the shipped model, on a CPU."""
    plain = 0.0
    for name, options in VARIANTS.items():
        value, num_tokens = await perplexity(options)
        row = Row(f"shipped model, {name}, {num_tokens} tokens of unseen text", "perplexity", value, "")
        yield versus(row, "plain weights", plain) if plain else row
        plain = plain or value


async def mask_rows(run: Run, settings: Settings) -> list[Row]:
    name = settings.name if settings.name in shapes.SHAPES else "qwen3-0.6b"
    directory = shapes.shape_directory(name)
    batches = (8,) if run.quick else (8, 1)
    options = replace(settings.options, pool_nbytes=settings.options.pool_nbytes or 1 << 30)
    return await masks.rows(directory, options, settings.device, batches, settings.num_steps, run.rounds)


async def draft_rows(run: Run, settings: Settings) -> list[Row]:
    """Of the shipped pair; or of a shape and its first layers: random weights tell costs only."""
    with tempfile.TemporaryDirectory(prefix="moonpool-") as scratch:
        name, directory, draft = "shipped model and draft", ModelOptions().directory, shipped("small")
        if settings.name in shapes.SHAPES:
            directory, draft = shapes.shape_directory(settings.name), Path(scratch)
            shapes.write_first_layers(directory, draft, _DRAFT_LAYERS)
            name = f"{settings.name} and its first {_DRAFT_LAYERS} layers, random weights"
        return await drafts.rows(name, directory, draft, settings.options, run.rounds)


@benchmark(
    {"engine": engine_rows, "perplexity": perplexity_rows, "masks": mask_rows, "drafts": draft_rows},
    packages=("torch", "triton", "numpy"),
    rounds=3,
    default=("engine", "perplexity"),
)
@click.option(
    "--shape",
    "--model",
    "name",
    type=click.Choice([*SHAPES, *shapes.SHAPES]),
    help="Default: llama-3-8b on a GPU.",
)
@click.option("--device", default="auto", help="auto, cpu, cuda, cuda:1 …")
@click.option("--block-size", default=16, help="Tokens of a KV block.")
@click.option("--threads", default=0, help="Compute threads on a CPU; 0: all cores.")
@click.option(
    "--weights",
    multiple=True,
    type=click.Choice(("auto", "int8", "int4")),
    default=("auto",),
    help="engine.weights; several: measured in turn beside the first.",
)
@click.option("--no-graphs", is_flag=True, help="Launch every kernel of a decode step anew.")
def engine(
    run: Run,
    name: str | None,
    device: str,
    block_size: int,
    threads: int,
    weights: tuple[str, ...],
    no_graphs: bool,
) -> Settings:
    """Measure a whole engine with random weights: decode steps and time to first token, beside their floor.

    A decode step takes at least the time of reading all weights (of experts, those chosen) and the KV of all
    sequences once; a prompt takes at least that of its products. The machine is measured in the same run.
    """
    on_gpu = choose_device(ModelOptions(device=device).device).torch.type == "cuda"
    name = name or ("llama-3-8b" if on_gpu else "small")
    large, real = name == "llama-3-8b", name in shapes.SHAPES
    options = EngineOptions(
        block_size=block_size,
        max_batch_size=64,
        max_batch_tokens=8192 if large else 512,
        decode_graphs=not no_graphs,
        threads=threads,
        pool_nbytes=1 << 30 if real else 0,
    )
    of_shipped = not {"perplexity", "drafts"}.isdisjoint(run.parts)
    run.conditions = Conditions(
        [
            random_model(name, 0, "bfloat16", options),
            *([model_at(ModelOptions().directory, "shipped model")] if of_shipped else []),
        ],
        CacheState.holding(
            0, block_size, "no prompt is sent twice; decode steps run over as much as the case says"
        ),
        "a prompt and the steps until a batch is full; for masks a round",
        {"weights": 0},
    )
    return Settings(
        name,
        device,
        ((64, 2048), (1, 2048), (16, 2048)) if large else ((8, 256), (1, 256)),
        16 if run.quick or real else 64,
        8192 if large else 2048 if real else 512,
        options,
        weights,
    )
