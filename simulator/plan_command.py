"""The command ``moonpool plan``."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import numpy as np
from rich.console import Console
from rich.table import Table

from moonpool.conductor.observing.slo import Slo
from moonpool.runtime.errors import ConfigError
from moonpool.runtime.reports import report
from moonpool.runtime.reports.conditions import COLD, CacheState, Conditions, ModelFacts, load_average
from moonpool.runtime.reports.output import ResultFile
from moonpool.simulator.capacity import EFFECTIVE, MIN_GAIN, Verdict, candidates, check_slo, judge, name_of
from moonpool.simulator.inputs.hardware import A800, H200, LLAMA3_8B, LLAMA3_70B, Accelerator, ModelShape
from moonpool.simulator.inputs.trace import at_speed, load_trace
from moonpool.simulator.sizing import answer, diagram, page, vary
from moonpool.simulator.sizing.traffic import Limits, Traffic

GPUS: Mapping[str, Accelerator] = {"a800": A800, "h200": H200}
MODELS: Mapping[str, ModelShape] = {"llama3-8b": LLAMA3_8B, "llama3-70b": LLAMA3_70B}

_FILE = click.Path(path_type=Path)
_SECONDS = "SECONDS"


@click.command()
@click.option("--users", type=click.IntRange(min=1), metavar="N", help="People who ask, read and ask again.")
@click.option("--think", type=float, metavar=_SECONDS, help="With --users: from an answer to the next [0].")
@click.option("--rate", type=float, metavar="N", help="Instead: requests a second.")
@click.option("--trace", type=_FILE, metavar="FILE", help="Instead: requests in Mooncake's format.")
@click.option("--prompt", type=click.IntRange(min=1), metavar="TOKENS", help="Of each request.")
@click.option("--output", type=click.IntRange(min=2), metavar="TOKENS", help="Of each request.")
@click.option("--hit", type=float, metavar="FRACTION", help="Of the prompt, cached: a prefix of all [0].")
@click.option("--e2e-p99", type=float, metavar=_SECONDS, help="Limit: the whole answer.")
@click.option("--slo-ttft", type=float, metavar=_SECONDS, help="Limit: time to first token.")
@click.option("--slo-tbt", type=float, metavar=_SECONDS, help="Limit: longest tenth of gaps, mean.")
@click.option("--gpus", "num_gpus", type=click.IntRange(min=1), metavar="N", help="With --trace: all GPUs.")
@click.option("--gpu", default="a800", show_default=True, type=click.Choice(list(GPUS)))
@click.option("--model", default="llama3-70b", show_default=True, type=click.Choice(list(MODELS)))
@click.option("--parallel", default="1,2,4,8", show_default=True, metavar="N,…", help="GPUs a node may have.")
@click.option("--link", type=float, metavar="GB/S", help="Network of a GPU [its data sheet's].")
@click.option("--price", type=float, metavar="MONEY", help="Of a GPU for an hour.")
@click.option("--vary", multiple=True, metavar="NAME=V,…", help="Print a map by formula; once or twice.")
@click.option("--svg", type=ResultFile(), metavar="FILE", help="Draw the smaller cluster there.")
@click.option("--seed", default=1, show_default=True, help="Of the simulated arrivals.")
@click.option(
    "--limit",
    default=1500,
    show_default=True,
    type=click.IntRange(min=0),
    metavar="N",
    help="Of a trace only the first N requests; 0: all.",
)
@click.option("--json", "json_path", type=ResultFile(), metavar="FILE", help="Write the report there.")
def plan(**given: Any) -> None:
    """Size a cluster for a workload, or rank clusters of N GPUs on a trace.

    For a workload (--users or --rate): the fewest GPUs with which 99 of 100 requests keep the limits, as
    prefill and decode nodes and as replicas, by formulas that a simulation checks. On a trace, clusters of
    --gpus are simulated, and ranked by the load a GPU under which nine of ten requests keep both limits.
    """
    sources = [name for name in ("users", "rate", "trace") if given[name] is not None]
    if len(sources) != 1:
        named = " and ".join(f"--{name}" for name in sources) or "none"
        raise ConfigError(
            f"a plan is for one of --users, --rate and --trace; given: {named}; try --users 1000 "
            "--prompt 500 --output 200 --e2e-p99 5",
            key="rate",
        )
    (source,) = sources
    _check_options(source, given)
    gpu = GPUS[given["gpu"]]
    if given["link"] is not None:
        gpu = replace(gpu, network_nbytes_per_s=_positive("link", given["link"]) * 1e9)
    shape, sizes = MODELS[given["model"]], _sizes(given["parallel"])
    if source == "trace":
        _rank(gpu, shape, sizes, given)
    else:
        _size(gpu, shape, sizes, given)


# The options of a workload alone.
_WORKLOAD = ("prompt", "output", "hit", "e2e_p99", "think", "price", "vary", "svg")


def _option(name: str) -> str:
    return "--gpus" if name == "num_gpus" else "--" + name.replace("_", "-")


def _check_options(source: str, given: Mapping[str, Any]) -> None:
    """Refuse what is missing for this source, and what contradicts it."""
    needed = ("slo_ttft", "slo_tbt", "num_gpus") if source == "trace" else ("prompt", "output")
    for name in needed:
        if given[name] is None:
            raise ConfigError(f"--{source} needs {_option(name)}", key=name)
    for name in _WORKLOAD if source == "trace" else ("num_gpus",):
        if given[name] not in (None, ()):
            other = "--users or --rate" if source == "trace" else "--trace"
            raise ConfigError(
                f"{_option(name)} is for {other} and contradicts --{source}: leave one of them out", key=name
            )
    if given["think"] is not None and source != "users":
        raise ConfigError("--think is for --users: --rate already is what the users ask", key="think")


def _positive(name: str, value: float) -> float:
    if not 0 < value < math.inf:
        raise ConfigError(f"--{name} must be above 0, got {value:g}", key=name)
    return value


def _size(gpu: Accelerator, shape: ModelShape, sizes: Sequence[int], given: Mapping[str, Any]) -> None:
    """Answer for a workload: by formulas, then by simulation."""
    unlimited = {name: math.inf if given[name] is None else given[name] for name in _LIMITS}
    limits = Limits(unlimited["slo_ttft"], unlimited["slo_tbt"], unlimited["e2e_p99"])
    if limits.answer_s(1) == math.inf:
        raise ConfigError(
            "a workload needs a limit of the whole answer: --e2e-p99, or --slo-ttft and --slo-tbt",
            key="e2e_p99",
        )
    users, think_s = given["users"] or 0, given["think"] or 0.0
    if think_s < 0:
        raise ConfigError(f"--think must be 0 s or more, got {think_s:g}", key="think")
    traffic = Traffic(given["rate"] or float(users), given["prompt"], given["output"], given["hit"] or 0.0)
    if given["price"] is not None:
        _positive("price", given["price"])
    question = answer.Question(gpu, shape, sizes, traffic, limits, users, think_s)
    console = Console(stderr=True, highlight=False)
    out = Console(highlight=False, width=None if console.is_terminal else 160)
    if given["vary"]:
        _map(out, question, given["vary"])
        return
    sized = answer.size(question)
    with console.status("simulating") as status:
        found = answer.checks(question, sized, given["seed"], status.update)
    page.show(out, question, sized, found, answer.sensitivity(question, sized), given["price"])
    if given["svg"] is not None:
        given["svg"].write_text(diagram.draw(question, sized.plans[0], sized.traffic))
    if given["json_path"] is not None:
        _write(page.rows(sized, found, given["price"]), given["json_path"], {"arrivals": given["seed"]})


_LIMITS = ("slo_ttft", "slo_tbt", "e2e_p99")


def _map(out: Console, question: answer.Question, texts: Sequence[str]) -> None:
    axes = [vary.axis(text) for text in texts]
    if len(axes) > 2 or len({name for name, _ in axes}) != len(axes):
        raise ConfigError("--vary is given once or twice, for different values", key="vary")
    if question.users and any(name == "rate" for name, _ in axes):
        raise ConfigError("--vary rate=… contradicts --users: give --rate instead", key="vary")
    out.print(page.headline(question, question.traffic))
    out.print("GPUs by formula: prefill and decode nodes | replicas; –: no number keeps the limits")
    out.print(vary.table(question, axes))


def _write(rows: Sequence[report.Row], path: Path, seeds: Mapping[str, int]) -> None:
    options = click.get_current_context().params
    conditions = Conditions(
        [ModelFacts(options["model"], "none: its times are simulated", "none", "none")],
        CacheState(COLD, note="every cluster starts without blocks"),
        "nothing: every request counts",
        seeds,
        load=[load_average()] * 2,
    )
    environment = report.measure_environment(("numpy",), options=options, conditions=conditions)
    report.write(report.Report(environment, rows), path)


def _rank(gpu: Accelerator, shape: ModelShape, sizes: Sequence[int], given: Mapping[str, Any]) -> None:
    """Simulate clusters of so many GPUs on a trace."""
    slo = Slo(given["slo_ttft"], given["slo_tbt"])
    requests = at_speed(load_trace(given["trace"]), 1.0, given["limit"])
    check_slo(gpu, shape, sizes, requests, slo)
    found = candidates(gpu, shape, given["num_gpus"], sizes, requests, slo)
    console = Console(stderr=True, highlight=False)
    with console.status(f"{len(found)} clusters") as status:
        verdicts = [judge(cluster, requests, status.update) for cluster in found]
    verdicts.sort(key=lambda verdict: -verdict.goodput_per_gpu)
    if not verdicts[0].speed:
        best = max(100 * verdict.outcome.effective_ratio for verdict in verdicts)
        raise ConfigError(
            f"no cluster of {given['num_gpus']} × {gpu.name} keeps --slo-ttft {slo.ttft_s:g} and --slo-tbt "
            f"{slo.tbt_s:g} for {100 * EFFECTIVE:.0f} % of these requests at any load; the best kept them "
            f"for {best:.0f} %",
            key="slo_ttft",
        )
    out = Console(highlight=False, width=None if console.is_terminal else 160)
    out.print(_table(verdicts))
    out.print(_advice(verdicts))
    if given["json_path"] is not None:
        _write(_rows(verdicts), given["json_path"], {})


def _sizes(text: str) -> list[int]:
    try:
        sizes = sorted({int(size) for size in text.split(",")})
    except ValueError:
        sizes = []
    if not sizes or sizes[0] < 1:
        raise ConfigError(f"--parallel must be like 1,2,4, got {text}", key="parallel")
    return sizes


def _table(verdicts: Sequence[Verdict]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("cluster")
    for heading in (
        "GPUs a node", "goodput, req/s", "a GPU", "load", "TTFT p90", "TBT p90", "cache hit", "busy",
    ):  # fmt: skip
        table.add_column(heading, justify="right")
    for i, verdict in enumerate(verdicts):
        outcome, cluster = verdict.outcome, verdict.cluster
        cells = ["misses the SLOs", "at any load"]
        if verdict.speed:
            served = outcome.completed
            cells = [
                f"{outcome.goodput:.2f}",
                f"{verdict.goodput_per_gpu:.3f}",
                f"{verdict.speed:.2f}×",
                f"{np.quantile([each.ttft_s for each in served], 0.9):.2f} s",
                f"{1e3 * np.quantile([each.tbt_s for each in served], 0.9):.0f} ms",
                f"{100 * outcome.hit_ratio:.0f} %",
                f"{100 * outcome.busy_ratio:.0f} %",
            ]
        nodes, size = name_of(cluster), str(cluster.hardware.num_gpus)
        table.add_row(nodes, size, *cells, style="bold" if i == 0 else None)
    return table


def _advice(verdicts: Sequence[Verdict]) -> str:
    """Compare the best disaggregated cluster with the best replicas, in a sentence."""
    serving = [verdict for verdict in verdicts if verdict.speed]
    split = next((verdict for verdict in serving if not verdict.cluster.num_both), None)
    replicas = next((verdict for verdict in serving if verdict.cluster.num_both), None)
    if replicas is None:
        return "Replicas that prefill and decode keep the SLOs at no load: disaggregate."
    if split is None:
        return "Disaggregation does not pay here: only replicas that prefill and decode keep the SLOs."
    ratio = split.goodput_per_gpu / replicas.goodput_per_gpu
    ours, plain = _name(split), _name(replicas)
    if ratio >= MIN_GAIN:
        return f"Disaggregation pays: {ours} serve {ratio:.2f}× as much a GPU as {plain}."
    return f"Disaggregation does not pay here: {ours} serve {ratio:.2f}× as much a GPU as {plain}."


def _name(verdict: Verdict) -> str:
    return f"{name_of(verdict.cluster)} of {verdict.cluster.hardware.num_gpus} GPUs each"


def _rows(verdicts: Sequence[Verdict]) -> list[report.Row]:
    rows: list[report.Row] = []
    for verdict in verdicts:
        case = f"{name_of(verdict.cluster)}, {verdict.cluster.hardware.num_gpus} GPUs a node"
        goodput = verdict.outcome.goodput if verdict.speed else 0.0
        rows.append(report.Row(case, "goodput", goodput, "requests/s"))
        rows.append(report.Row(case, "goodput a GPU", verdict.goodput_per_gpu, "requests/s"))
        rows.append(report.Row(case, "load", verdict.speed, "× the trace's speed"))
    return rows
