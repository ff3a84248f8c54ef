"""The command ``moonpool bench simulate``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import uvloop
from click.core import ParameterSource
from rich.console import Console

from moonpool.bench.paper import FIGURES
from moonpool.bench.simulation import plot
from moonpool.bench.simulation import validation as validate
from moonpool.bench.simulation.rows import rows
from moonpool.conductor.admission.rejection import REJECTIONS
from moonpool.conductor.observing.slo import Slo
from moonpool.conductor.placing.policies import POLICIES
from moonpool.runtime.config.loading import load_config
from moonpool.runtime.config.options import ConductorOptions
from moonpool.runtime.errors import ConfigError
from moonpool.runtime.reports import report
from moonpool.simulator.inputs import arguments as inputs
from moonpool.simulator.inputs.hardware import SHIPPED
from moonpool.simulator.inputs.scenario import Scenario
from moonpool.simulator.inputs.trace import BLOCK_TOKENS, TraceRequest, at_speed, load_trace
from moonpool.simulator.outcome import Outcome
from moonpool.simulator.simulation import Simulation

_PATH = click.Path(path_type=Path)


@click.command()
@click.option("--trace", type=_PATH, metavar="FILE", help="Requests in Mooncake's format, gzipped or not.")
@click.option(
    "--workload",
    metavar="KEY=VALUE,…",
    help="Instead of a trace: requests made here, such as sessions=500,rate=2.",
)
@click.option("--prefill", default=8, show_default=True, help="Prefill nodes.")
@click.option("--decode", default=8, show_default=True, help="Decode nodes.")
@click.option("--both", default=0, help="Instead: nodes that prefill and decode.")
@click.option(
    "--hardware",
    default="8xa800-llama3-70b",
    show_default=True,
    metavar="NAME|FILE",
    help=f"Of a node: {', '.join(SHIPPED)}, or a TOML or JSON file.",
)
@click.option("--decode-hardware", metavar="NAME|FILE", help="Of decode nodes, where it differs.")
@click.option(
    "--policy", "policies", multiple=True, metavar="NAME", help=f"Repeatable: {', '.join(POLICIES)}."
)
@click.option(
    "--rejection", default="none", show_default=True, metavar="NAME", help=f"{', '.join(REJECTIONS)}."
)
@click.option(
    "--replicate",
    default=ConductorOptions().replicate_nbytes_per_s / 1e9,
    show_default=True,
    metavar="GB/S",
    help="For copies of hot prefixes; 0: none.",
)
@click.option("--slo-ttft", default=math.inf, metavar="SECONDS", help="To the first token.")
@click.option(
    "--slo-tbt", default=math.inf, metavar="SECONDS", help="Mean of a request's longest tenth of gaps."
)
@click.option("--speed", default=1.0, show_default=True, help="Requests come so many times as fast.")
@click.option("--limit", default=0, metavar="N", help="Only the first N requests.")
@click.option(
    "--block-tokens", default=BLOCK_TOKENS, show_default=True, help="Tokens of a block, and of an id."
)
@click.option("--pool-tokens", type=int, metavar="N", help="Of KV in a node's pool.")
@click.option("--host-tokens", type=int, metavar="N", help="In its host memory; 0: none.")
@click.option("--ssd-tokens", type=int, metavar="N", help="On its SSD; 0: none.")
@click.option("--host-policy", default="prefix", show_default=True, metavar="NAME", help="Eviction there.")
@click.option("--ssd-policy", default="prefix", show_default=True, metavar="NAME", help="Eviction there.")
@click.option(
    "--at", "events", multiple=True, metavar="SECONDS:WHAT",
    help="Repeatable: 600:fail:prefill-0, 900:join:decode.",
)  # fmt: skip
@click.option(
    "--paper",
    "figure",
    type=click.Choice(list(FIGURES)),
    help="With --trace: a figure of the Mooncake papers, theirs beside ours, with what is compared.",
)
@click.option(
    "--validate", "validates", is_flag=True, help="Run one workload on a real local cluster and simulate it."
)
@click.option("--set", "sets", multiple=True, metavar="KEY=VALUE", help="--validate: option of that cluster.")
@click.option("--seed", default=1, show_default=True, help="Of random choices, and of a workload.")
@click.option("--json", "json_path", type=_PATH, metavar="FILE", help="Write the report there.")
@click.option(
    "--plot", "plot_path", type=_PATH, metavar="FILE", help="Draw latencies and cache use (PNG, SVG)."
)
def simulate(
    json_path: Path | None,
    plot_path: Path | None,
    policies: Sequence[str],
    figure: str | None,
    validates: bool,
    sets: Sequence[str],
    **given: Any,
) -> None:
    """Replay requests through the scheduler that serves, on a simulated cluster, in virtual time."""
    console = Console(stderr=True, highlight=False)
    if figure is not None:
        _paper(figure, given, json_path, console)
        return
    if validates:
        _validate(given, sets, json_path, console)
        return
    if sets:
        raise ConfigError("--set is for the cluster of --validate", key="set")
    if plot_path is not None:
        plot.check_ending(plot_path)
    scenarios = {name: _scenario(given, name) for name in policies or ("goodput",)}
    requests = _requests(given)
    outcomes: dict[str, Outcome] = {}
    for name, scenario in scenarios.items():
        with console.status(f"{name}: {len(requests):,} requests"):
            outcomes[name] = Simulation(scenario, requests).run()
    found = [row for name, outcome in outcomes.items() for row in rows(name, outcome)]
    finish(found, json_path)
    if plot_path is not None:
        plot.draw(outcomes, plot_path)


def _paper(name: str, given: dict[str, Any], json_path: Path | None, console: Console) -> None:
    """The papers' own settings: of ours only the trace counts."""
    _only(f"--paper {name}", "figure", "trace", "json_path")
    requests = _requests(given)
    found = FIGURES[name].measure(requests, lambda line: console.print(line, style="dim"))
    finish(found, json_path)
    click.echo(FIGURES[name].terms.rstrip())


def _validate(given: dict[str, Any], sets: Sequence[str], json_path: Path | None, console: Console) -> None:
    """Of the settings the workload and the seed count; nodes are --set's."""
    _only("--validate", "validates", "workload", "seed", "sets", "json_path")
    work = validate.default_workload(given["seed"])
    block_tokens = load_config(None, sets).engine.block_size
    if given["workload"] is not None:
        work = inputs.workload(given["workload"], block_tokens, given["seed"])
    # The default port may be in use by a cluster that serves. A node a core is what a laptop has room for.
    sets = ("conductor.port=0", "cluster.prefill=1", "cluster.decode=1", *sets)
    settings = validate.Settings(replace(work, block_tokens=block_tokens), sets)
    rows = uvloop.run(validate.validate(settings, lambda line: console.print(line, style="dim")))
    finish(rows, json_path)


def _only(option: str, *names: str) -> None:
    """Refuse whatever else was given beside an option that sets it itself."""
    context = click.get_current_context()
    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name or "")
        if source is ParameterSource.COMMANDLINE and parameter.name not in names:
            raise ConfigError(f"{option} leaves no choice of {parameter.opts[0]}", key=parameter.name)


def finish(found: list[report.Row], json_path: Path | None) -> None:
    """Show a report and write it."""
    result = report.Report(report.measure_environment(("numpy",)), found)
    report.show(result)
    if json_path is not None:
        report.write(result, json_path)


def _requests(given: dict[str, Any]) -> list[TraceRequest]:
    if (given["trace"] is None) == (given["workload"] is None):
        raise ConfigError("give either --trace FILE or --workload KEY=VALUE,…", key="trace")
    if not given["speed"] > 0:
        raise ConfigError(f"--speed must be above 0, got {given['speed']:g}", key="speed")
    if given["limit"] < 0:
        raise ConfigError(f"--limit must be 0 or more, got {given['limit']}", key="limit")
    if given["block_tokens"] < 1:
        raise ConfigError(
            f"--block-tokens must be 1 or more, got {given['block_tokens']}", key="block_tokens"
        )
    if given["trace"] is not None:
        found = load_trace(given["trace"], block_tokens=given["block_tokens"])
    else:
        found = inputs.workload(given["workload"], given["block_tokens"], given["seed"]).requests()
    return at_speed(found, given["speed"], given["limit"])


def _scenario(given: dict[str, Any], policy: str) -> Scenario:
    tiers = {f"{tier}_tokens": given[f"{tier}_tokens"] for tier in ("pool", "host", "ssd")}
    decode_hardware = given["decode_hardware"]
    both = given["both"]
    return Scenario(
        hardware=inputs.with_tiers(inputs.hardware_named(given["hardware"]), tiers),
        num_prefill=0 if both else given["prefill"],
        num_decode=0 if both else given["decode"],
        num_both=both,
        decode_hardware=None
        if decode_hardware is None
        else inputs.with_tiers(inputs.hardware_named(decode_hardware), tiers),
        policy=policy,
        rejection=given["rejection"],
        slo=Slo(given["slo_ttft"], given["slo_tbt"]),
        block_tokens=given["block_tokens"],
        host_policy=given["host_policy"],
        ssd_policy=given["ssd_policy"],
        replicate_nbytes_per_s=given["replicate"] * 1e9,
        events=[inputs.cluster_event(text) for text in given["events"]],
        seed=given["seed"],
    )
