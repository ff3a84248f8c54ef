"""The command ``moonpool bench simulate``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import uvloop
from click.core import ParameterSource
from rich.console import Console

from moonpool.bench.harness.command import shows_defaults
from moonpool.bench.harness.goals import with_kinds
from moonpool.bench.paper import FIGURES
from moonpool.bench.simulation.ablations import ablations as parts_of_goodput
from moonpool.bench.simulation.ablations import robustness as errors_of_estimates
from moonpool.bench.simulation.rows import curves, rows
from moonpool.bench.simulation.validation import SECONDS, Settings, validate
from moonpool.conductor.admission.rejection import REJECTIONS
from moonpool.conductor.coordination.bookings import SHARE_S
from moonpool.conductor.observing.slo import Slo
from moonpool.conductor.placing.policies import POLICIES
from moonpool.kvstore.eviction import POLICIES as EVICTION_POLICIES
from moonpool.runtime.config.loading import load_config
from moonpool.runtime.config.options import ConductorOptions
from moonpool.runtime.errors import ConfigError
from moonpool.runtime.reports.conditions import CacheState, Conditions, ModelFacts, load_average
from moonpool.runtime.reports.output import ResultFile, finish
from moonpool.runtime.reports.report import Curve, Report, Row, measure_environment
from moonpool.simulator.inputs import arguments as inputs
from moonpool.simulator.inputs.azure_trace import load_azure_trace
from moonpool.simulator.inputs.hardware import SHIPPED
from moonpool.simulator.inputs.prefixes import with_prefixes
from moonpool.simulator.inputs.scenario import Scenario
from moonpool.simulator.inputs.trace import BLOCK_TOKENS, TraceRequest, at_speed, beside, load_trace
from moonpool.simulator.outcome import Outcome
from moonpool.simulator.simulation import Simulation

_FILE = click.Path(path_type=Path)
_EVICTION = click.Choice(list(EVICTION_POLICIES))
_CAPACITY = click.IntRange(min=0)
# Options that are fields of a scenario as they are.
_SCENARIO = (
    "num_prefill", "num_decode", "num_both", "rejection", "block_tokens", "host_policy", "ssd_policy", "seed",
    "num_conductors", "share_s",
)  # fmt: skip


@shows_defaults
@click.command()
@click.option(
    "--trace",
    type=_FILE,
    metavar="FILE",
    help="Requests in Mooncake's format, or Azure's (.csv), gzipped or not. Those of Azure get prefixes "
    "that are shared as in Mooncake's conversation trace.",
)
@click.option("--workload", metavar="KEY=VALUE,…", help="Generate requests instead: sessions=500,rate=2.")
@click.option(
    "--beside",
    multiple=True,
    metavar="KEY=VALUE,…",
    help="Repeatable: another workload at the same time, such as batch requests with slo_ttft=120,slo_tbt=1, "
    "or those of another tenant: tenant=b,weight=2,max_requests=8,tokens_per_minute=60000.",
)
@click.option("--prefill", "num_prefill", default=8, help="Prefill nodes.")
@click.option("--decode", "num_decode", default=8, help="Decode nodes.")
@click.option("--both", "num_both", default=0, help="Instead: nodes that prefill and decode.")
@click.option(
    "--hardware",
    default="8xa800-llama3-70b",
    metavar="NAME|FILE",
    help=f"The nodes: {', '.join(SHIPPED)}, or a TOML or JSON file.",
)
@click.option("--decode-hardware", metavar="NAME|FILE", help="The decode nodes, if they differ.")
@click.option("--policy", "policies", multiple=True, type=click.Choice(list(POLICIES)), default=["goodput"])
@click.option("--rejection", default="none", type=click.Choice(list(REJECTIONS)))
@click.option(
    "--replicate",
    default=ConductorOptions().replicate_nbytes_per_s / 1e9,
    metavar="GB/S",
    help="Bandwidth for copies of hot prefixes; 0: none.",
)
@click.option("--slo-ttft", default=math.inf, metavar="SECONDS", help="Limit of the time to first token.")
@click.option("--slo-tbt", default=math.inf, metavar="SECONDS", help="Limit of the longest tenth of gaps.")
@click.option(
    "--conductors",
    "num_conductors",
    default=1,
    show_default=True,
    help="They share the nodes; several need --replicate 0.",
)
@click.option(
    "--share-every",
    "share_s",
    default=SHARE_S,
    show_default=True,
    type=click.FloatRange(min=0),
    metavar="SECONDS",
    help="Pause between the conductors' reports of load to each other; 0: before each decision.",
)
@click.option(
    "--speed",
    default=1.0,
    type=click.FloatRange(min=0, min_open=True),
    help="Requests arrive this many times as fast.",
)
@click.option(
    "--limit", default=0, type=click.IntRange(min=0), metavar="N", help="Only the first N requests."
)
@click.option(
    "--block-tokens",
    default=BLOCK_TOKENS,
    type=click.IntRange(min=1),
    help="Tokens of a block, and of an id in the trace.",
)
@click.option("--pool-tokens", type=click.IntRange(min=1), metavar="N", help="KV capacity of a node's pool.")
@click.option("--host-tokens", type=_CAPACITY, metavar="N", help="KV capacity of its host memory; 0: none.")
@click.option("--ssd-tokens", type=_CAPACITY, metavar="N", help="KV capacity of its SSD; 0: none.")
@click.option("--host-policy", default="prefix", type=_EVICTION)
@click.option("--ssd-policy", default="prefix", type=_EVICTION)
@click.option(
    "--at",
    "events",
    multiple=True,
    metavar="SECONDS:WHAT",
    help="Repeatable: 600:fail:prefill-0, 900:join:decode.",
)
@click.option(
    "--paper",
    "figure",
    type=click.Choice(list(FIGURES)),
    help="Reproduce a figure of a paper and compare; those of Mooncake and Splitwise need --trace.",
)
@click.option(
    "--robustness",
    is_flag=True,
    help="Each policy (default: all) with errors of the scheduler's estimates, 0 to 3 times as measured.",
)
@click.option(
    "--ablations",
    is_flag=True,
    help="goodput with and without its queue order, beside kv-aware with and without that order.",
)
@click.option(
    "--validate", "validates", is_flag=True, help="Compare with real local clusters, whose nodes wait."
)
@click.option(
    "--nodes",
    type=click.IntRange(min=1),
    metavar="N",
    help="--validate: most nodes of a role; 2 by default. 4: clusters of 2 + 2, 4 + 4 and 4 both.",
)
@click.option(
    "--seconds",
    type=click.FloatRange(min=0, min_open=True),
    help="--validate: requests of each load come for so long; 40 by default.",
)
@click.option("--set", "sets", multiple=True, metavar="KEY=VALUE", help="--validate: option of the clusters.")
@click.option("--seed", default=1, help="Seed of random choices and of the workload.")
@click.option("--json", "json_path", type=ResultFile(), metavar="FILE", help="Write the report there.")
@click.option(
    "--plot", "plot_path", type=ResultFile(), metavar="FILE", help="Draw latencies there (PNG, SVG)."
)
def simulate(
    json_path: Path | None,
    plot_path: Path | None,
    policies: Sequence[str],
    figure: str | None,
    robustness: bool,
    ablations: bool,
    validates: bool,
    sets: Sequence[str],
    **given: Any,
) -> None:
    """Replay requests through the conductor's scheduler on a simulated cluster, in virtual time."""
    console = Console(stderr=True, highlight=False)

    def say(line: str) -> None:
        console.print(line, style="dim")

    if figure is not None:
        case = FIGURES[figure]
        own = ["figure", "json_path"] if case.workload else ["figure", "json_path", "trace"]
        _refuse_others(f"--paper {figure}", *own)
        requests = case.workload() if case.workload else _requests(given)
        _finish(case.measure(requests, say), json_path, model=case.model)
        click.echo(case.terms.rstrip())
        return
    if validates:
        names = ("validates", "nodes", "seconds", "workload", "seed", "sets", "json_path")
        _refuse_others("--validate", *names)
        _finish(uvloop.run(validate(_validation(given, sets), say)), json_path)
        return
    if sets or given["nodes"] or given["seconds"]:
        raise ConfigError("--nodes, --seconds and --set are for the clusters of --validate", key="validate")
    if plot_path is not None:
        from moonpool.runtime.reports.plot import check_ending

        check_ending(plot_path)
    context = click.get_current_context()
    chosen = context.get_parameter_source("policies") is ParameterSource.COMMANDLINE
    if ablations:
        if chosen or robustness or plot_path is not None:
            raise ConfigError(
                "--ablations cannot be combined with --policy, --robustness or --plot", key="ablations"
            )
        _finish(parts_of_goodput(_scenario(given, "goodput"), _requests(given), say), json_path)
        return
    if robustness:
        policies = policies if chosen else list(POLICIES)
        scenarios = {name: _scenario(given, name) for name in policies}
        found, lines = errors_of_estimates(scenarios, _requests(given), say)
        _finish(found, json_path, plot_path, lines)
        return
    scenarios = {name: _scenario(given, name) for name in policies}
    requests = _requests(given)
    outcomes: dict[str, Outcome] = {}
    for name, scenario in scenarios.items():
        with console.status(f"{name}: {len(requests):,} requests"):
            outcomes[name] = Simulation(scenario, requests).run()
    found = [row for name, outcome in outcomes.items() for row in rows(name, outcome)]
    _finish(found, json_path, plot_path, curves(outcomes))


def _finish(
    found: list[Row],
    json_path: Path | None,
    plot_path: Path | None = None,
    lines: Sequence[Curve] = (),
    model: str = "",
) -> None:
    """Report. ``model``: what was simulated; without it the nodes of ``--hardware``."""
    given = click.get_current_context().params
    options = {name: value for name, value in given.items() if name not in ("json_path", "plot_path")}
    models = [ModelFacts.simulated(model or given["hardware"])]
    if given["validates"]:
        from moonpool.bench.harness.shapes import models_of  # needs the engine, as the clusters do

        models += models_of(given["sets"])
    conditions = Conditions(
        models,
        CacheState.holding(0, given["block_tokens"], "every cluster starts without blocks"),
        "nothing: the whole trace counts",
        {"choices and workload": given["seed"]},
        load=[load_average()] * 2,
    )
    environment = measure_environment(("numpy",), options=options, conditions=conditions)
    finish(Report(environment, with_kinds(found), lines), json_path, plot_path)


def _validation(given: dict[str, Any], sets: Sequence[str]) -> Settings:
    work, seed = given["workload"], given["seed"]
    if work is not None:
        work = inputs.workload(work, load_config(None, sets).engine.block_size, seed)
    return Settings(given["nodes"] or 2, seed, work, sets, given["seconds"] or SECONDS)


def _refuse_others(option: str, *names: str) -> None:
    """Refuse parameters besides ``names``: ``option`` sets them itself."""
    context = click.get_current_context()
    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name or "")
        if source is ParameterSource.COMMANDLINE and parameter.name not in names:
            raise ConfigError(f"{option} cannot be combined with {parameter.opts[0]}", key=parameter.name)


def _requests(given: dict[str, Any]) -> list[TraceRequest]:
    if (given["trace"] is None) == (given["workload"] is None):
        raise ConfigError("give either --trace FILE or --workload KEY=VALUE,…", key="trace")
    path, block_tokens, seed = given["trace"], given["block_tokens"], given["seed"]
    if path is None:
        found = inputs.workload(given["workload"], block_tokens, seed).requests()
    elif ".csv" in path.suffixes:
        found = with_prefixes(load_azure_trace(path), block_tokens=block_tokens, seed=seed)
    else:
        found = load_trace(path, block_tokens=block_tokens)
    found = at_speed(found, given["speed"], given["limit"])
    for text in given["beside"]:
        found = beside(found, inputs.workload(text, block_tokens, seed).requests())
    return found


def _scenario(given: dict[str, Any], policy: str) -> Scenario:
    capacities = {f"{tier}_tokens": given[f"{tier}_tokens"] for tier in ("pool", "host", "ssd")}
    decode = given["decode_hardware"]
    if given["num_both"]:
        given = {**given, "num_prefill": 0, "num_decode": 0}
    return Scenario(
        hardware=inputs.hardware(given["hardware"], capacities),
        decode_hardware=None if decode is None else inputs.hardware(decode, capacities),
        policy=policy,
        slo=Slo(given["slo_ttft"], given["slo_tbt"]),
        replicate_nbytes_per_s=given["replicate"] * 1e9,
        events=[inputs.cluster_event(text) for text in given["events"]],
        **{name: given[name] for name in _SCENARIO},
    )
