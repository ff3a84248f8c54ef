"""The command ``moonpool plan``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import click
import numpy as np
from rich.console import Console
from rich.table import Table

from moonpool.conductor.observing.slo import Slo
from moonpool.runtime.errors import ConfigError
from moonpool.runtime.reports import report
from moonpool.simulator.capacity import EFFECTIVE, MIN_GAIN, Verdict, candidates, check_slo, judge
from moonpool.simulator.inputs.hardware import A800, H200, LLAMA3_8B, LLAMA3_70B, Accelerator, ModelShape
from moonpool.simulator.inputs.trace import at_speed, load_trace

GPUS: Mapping[str, Accelerator] = {"a800": A800, "h200": H200}
MODELS: Mapping[str, ModelShape] = {"llama3-8b": LLAMA3_8B, "llama3-70b": LLAMA3_70B}

_FILE = click.Path(path_type=Path)


@click.command()
@click.option("--trace", type=_FILE, required=True, metavar="FILE", help="Requests in Mooncake's format.")
@click.option("--slo-ttft", type=float, required=True, metavar="SECONDS", help="Limit: time to first token.")
@click.option(
    "--slo-tbt",
    type=float,
    required=True,
    metavar="SECONDS",
    help="Limit: longest tenth of gaps, mean.",
)
@click.option("--gpus", "num_gpus", type=click.IntRange(min=1), required=True, metavar="N", help="All GPUs.")
@click.option("--gpu", default="a800", show_default=True, type=click.Choice(list(GPUS)))
@click.option("--model", default="llama3-70b", show_default=True, type=click.Choice(list(MODELS)))
@click.option("--parallel", default="1,2,4,8", show_default=True, metavar="N,…", help="GPUs a node may have.")
@click.option(
    "--limit",
    default=1500,
    show_default=True,
    type=click.IntRange(min=0),
    metavar="N",
    help="Only the first N requests; 0: all.",
)
@click.option("--json", "json_path", type=_FILE, metavar="FILE", help="Write the report there.")
def plan(
    trace: Path,
    slo_ttft: float,
    slo_tbt: float,
    num_gpus: int,
    gpu: str,
    model: str,
    parallel: str,
    limit: int,
    json_path: Path | None,
) -> None:
    """Simulate clusters of N GPUs on a trace, and rank them by the requests a GPU within both limits.

    It also says whether prefill and decode nodes are worth it, against plain replicas.
    """
    slo, sizes = Slo(slo_ttft, slo_tbt), _sizes(parallel)
    accelerator, shape = GPUS[gpu], MODELS[model]
    requests = at_speed(load_trace(trace), 1.0, limit)
    check_slo(accelerator, shape, sizes, requests, slo)
    found = candidates(accelerator, shape, num_gpus, sizes, requests)
    console = Console(stderr=True, highlight=False)
    with console.status(f"{len(found)} clusters") as status:
        verdicts = [judge(candidate, requests, slo, status.update) for candidate in found]
    verdicts.sort(key=lambda verdict: -verdict.goodput_per_gpu)
    if not verdicts[0].speed:
        best = max(100 * verdict.outcome.effective_ratio for verdict in verdicts)
        raise ConfigError(
            f"no cluster of {num_gpus} × {accelerator.name} keeps --slo-ttft {slo_ttft:g} and --slo-tbt "
            f"{slo_tbt:g} for {100 * EFFECTIVE:.0f} % of these requests at any load; the best kept them for "
            f"{best:.0f} %",
            key="slo_ttft",
        )
    out = Console(highlight=False, width=None if console.is_terminal else 160)
    out.print(_table(verdicts))
    out.print(_advice(verdicts))
    if json_path is not None:
        report.write(report.Report(report.measure_environment(("numpy",)), _rows(verdicts)), json_path)


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
        outcome, candidate = verdict.outcome, verdict.candidate
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
        table.add_row(candidate.name, str(candidate.parallel), *cells, style="bold" if i == 0 else None)
    return table


def _advice(verdicts: Sequence[Verdict]) -> str:
    """Compare the best disaggregated cluster with the best replicas, in a sentence."""
    serving = [verdict for verdict in verdicts if verdict.speed]
    split = next((verdict for verdict in serving if not verdict.candidate.num_both), None)
    replicas = next((verdict for verdict in serving if verdict.candidate.num_both), None)
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
    return f"{verdict.candidate.name} of {verdict.candidate.parallel} GPUs each"


def _rows(verdicts: Sequence[Verdict]) -> list[report.Row]:
    rows: list[report.Row] = []
    for verdict in verdicts:
        case = f"{verdict.candidate.name}, {verdict.candidate.parallel} GPUs a node"
        goodput = verdict.outcome.goodput if verdict.speed else 0.0
        rows.append(report.Row(case, "goodput", goodput, "requests/s"))
        rows.append(report.Row(case, "goodput a GPU", verdict.goodput_per_gpu, "requests/s"))
        rows.append(report.Row(case, "load", verdict.speed, "× the trace's speed"))
    return rows
