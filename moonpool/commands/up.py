"""The options of ``moonpool up``."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from moonpool.commands.options import config_options, console
from moonpool.local.played_hosts import NUM_HOSTS
from moonpool.local.up import up
from moonpool.runtime.config.loading import load_config, override

# The configuration key that each option sets.
_KEYS = {
    "prefill": "cluster.prefill",
    "decode": "cluster.decode",
    "both": "cluster.both",
    "store": "cluster.store",
    "engine": "cluster.engine",
    "port": "conductor.port",
    "redis": "index.redis_url",
    "on": "fleet.ray",
}


@click.command("up")
@click.option(
    "--model",
    "models",
    multiple=True,
    metavar="[NAME=]DIR",
    help="Hugging Face checkpoint directory (default: the shipped one); with NAME=: repeatable, several "
    "models behind one URL, each with the nodes that --prefill, --decode and --both say.",
)
@click.option(
    "--models", "models_file", metavar="FILE", help="TOML file of models and routes: see docs/models.md."
)
@click.option("--prefill", type=int, metavar="N", help="Prefill nodes (default: 2, fewer on few GPUs).")
@click.option("--decode", type=int, metavar="N", help="Decode nodes (the same).")
@click.option(
    "--both",
    type=int,
    metavar="N",
    help="Nodes that prefill and decode (default: 0, 1 on a single GPU); alone: only those.",
)
@click.option("--store", type=int, metavar="N", help="Store nodes (default: 0).")
@click.option(
    "--engine",
    type=click.Choice(("moonpool", "vllm")),
    help="What computes: Moonpool's engine (default), or vLLM's server on this CPU.",
)
@click.option(
    "--lora",
    "adapters",
    multiple=True,
    metavar="NAME=DIR",
    help="Serve a LoRA adapter in PEFT's format, of the first model; repeatable.",
)
@click.option("--port", type=int, metavar="P", help="Port of the API (default: 8000; 0: a free one).")
@click.option("--redis", metavar="URL", help="Use this Redis (default: start a private one).")
@click.option(
    "--on",
    metavar="ray://auto|ray://HOST:PORT",
    help="Start the nodes on this Ray cluster (default: on this machine); its nodes must reach the Redis.",
)
@click.option(
    "--hosts",
    type=click.IntRange(1, NUM_HOSTS),
    default=1,
    show_default=True,
    help="2: play a second machine with half of each node's stages (engine.parallel.pp, 2 unless set): a "
    "network namespace as root, else the loopback address.",
)
@click.option("--once", is_flag=True, help="Stop after the first conversation.")
@config_options
def up_command(
    file: Path | None,
    sets: Sequence[str],
    once: bool,
    hosts: int,
    models: tuple[str, ...],
    models_file: str | None,
    adapters: tuple[str, ...],
    **given: Any,
) -> None:
    """Run a whole cluster on this machine and talk to it."""
    sets = [*_models(models), *([f"models.path={models_file}"] if models_file else []), *sets]
    if on := given["on"]:
        if not on.startswith("ray://"):
            raise click.BadParameter("write ray://auto, or ray://HOST:PORT", param_hint="--on")
        given["on"] = "auto" if on == "ray://auto" else on
        sets = ["fleet.provider=ray", *sets]
    options = [f"{_KEYS[name]}={value}" for name, value in given.items() if value is not None]
    config = load_config(file, [*sets, *options])
    if hosts > 1 and config.engine.parallel.pp == 1:
        config = override(config, [f"engine.parallel.pp={hosts}"])
    sys.exit(asyncio.run(up(config.with_adapters(adapters), console, once=once, hosts=hosts)))


def _models(models: Sequence[str]) -> list[str]:
    """The settings of ``--model``. Raises ``BadParameter``."""
    if len(models) == 1 and ("=" not in models[0] or Path(models[0]).is_dir()):
        return [f"model.path={models[0]}"]
    if nameless := [each for each in models if "=" not in each]:
        raise click.BadParameter(f"write {nameless[0]} as NAME=DIR", param_hint="--model")
    return [f"models.served={','.join(models)}"] if models else []
