"""The command ``moonpool bench serve``."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any

import click
import uvloop
from rich.console import Console

from moonpool.bench.harness.plot import draw
from moonpool.bench.serve.client.workload import Workload
from moonpool.bench.serve.figures import Slo
from moonpool.bench.serve.run import CASES, PEERS, TRACING, Settings, measure
from moonpool.runtime.config.loading import load_config
from moonpool.runtime.reports import report
from moonpool.runtime.reports.plot import check_ending

_PATH = click.Path(path_type=Path)
# Of what is measured; the peers' versions are in their names and in bench/serve/peers.
_PACKAGES = ("torch", "transformers", "aiohttp", "grpcio", "redis", "uvloop")


@click.command()
@click.option("--url", default="", help="An OpenAI-compatible server; without it a local cluster is started.")
@click.option("--model", default="", help="Model name there; without it the first the server lists.")
@click.option("--model-dir", type=_PATH, help="Checkpoint the peers load; without it the cluster's.")
@click.option("--api-key", envvar="OPENAI_API_KEY", default="", help="Sent as a bearer token.")
@click.option("--plain", is_flag=True, help="Send text and no fields but OpenAI's own.")
@click.option(
    "--case",
    "cases",
    multiple=True,
    type=click.Choice((*CASES, TRACING)),
    help="Repeatable; default: all but tracing, which compares two clusters.",
)
@click.option("--peer", "peers", multiple=True, type=click.Choice(PEERS), help="Compare with; repeatable.")
@click.option("--rounds", default=7, show_default=True, help="Repetitions of a case, peers in turn.")
@click.option("--requests", default=64, show_default=True, help="load: conversations.")
@click.option("--concurrency", default=8, show_default=True, help="load: conversations at a time.")
@click.option("--rate", default=0.0, help="load: conversations a second instead, arriving at random.")
@click.option("--prompt-tokens", default=128, show_default=True, help="load: of the first turn.")
@click.option("--output-tokens", default=128, show_default=True, help="load: of each turn.")
@click.option("--shared-prefix-tokens", default=0, show_default=True, help="load: common to all prompts.")
@click.option("--turns", default=1, show_default=True, help="load: requests a conversation.")
@click.option("--turn-tokens", default=32, show_default=True, help="load: a later turn adds.")
@click.option("--seed", type=int, help="Of prompts and arrivals; without it a new one, which is printed.")
@click.option("--slo-ttft", default=0.0, metavar="SECONDS", help="load: what counts as good.")
@click.option("--slo-tpot", default=0.0, metavar="SECONDS", help="load: likewise, a token.")
@click.option("--set", "sets", multiple=True, metavar="KEY=VALUE", help="Option of the local cluster.")
@click.option("--plot", "plot_path", type=_PATH, metavar="FILE", help="Draw the figures there (PNG, SVG).")
@click.option("--json", "json_path", type=_PATH, metavar="FILE", help="Write the report there.")
def serve(json_path: Path | None, plot_path: Path | None, **given: Any) -> None:
    """Measure serving: throughput, latencies, cache hits, the path's own cost; and peers doing the same."""
    if plot_path is not None:
        check_ending(plot_path)  # now, not after minutes of measuring
    console = Console(stderr=True, highlight=False)
    if given["seed"] is None:
        # A server that stays up remembers the prompts of an earlier run: new ones by default.
        given["seed"] = secrets.randbelow(1_000_000)
        console.print(f"seed {given['seed']}", style="dim")
    sets = list(given["sets"])
    # The default port may be in use by a cluster that serves; a measured one is nobody else's.
    if not any(item.startswith("conductor.port=") for item in sets):
        sets.append("conductor.port=0")
    settings = Settings(
        url=given["url"],
        model=given["model"],
        model_dir=given["model_dir"] or load_config(None, sets).model.directory,
        api_key=given["api_key"],
        plain=given["plain"],
        cases=given["cases"] or CASES,
        peers=given["peers"],
        rounds=given["rounds"],
        seed=given["seed"],
        workload=Workload(**{name: given[name] for name in Workload.__dataclass_fields__}),
        slo=Slo(given["slo_ttft"], given["slo_tpot"]),
        sets=tuple(sets),
    )
    rows = uvloop.run(measure(settings, lambda line: console.print(line, style="dim")))
    finished = report.Report(report.measure_environment(_PACKAGES), rows)
    report.show(finished)
    if plot_path is not None:
        draw(finished, plot_path)
    if json_path is not None:
        report.write(finished, json_path)
