"""The command ``moonpool plan``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeVar

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

T = TypeVar("T")

_PATH = click.Path(path_type=Path)


@click.command()
@click.option("--trace", type=_PATH, required=True, metavar="FILE", help="Requests in Mooncake's format.")
@click.option("--slo-ttft", type=float, required=True, metavar="SECONDS", help="To the first token.")
@click.option(
    "--slo-tbt", type=float, required=True, metavar="SECONDS", help="Mean of the longest tenth of gaps."
)
@click.option("--gpus", "num_gpus", type=int, required=True, metavar="N", help="GPUs there are.")
@click.option("--gpu", default="a800", show_default=True, metavar="NAME", help=f"{', '.join(GPUS)}.")
@click.option(
    "--model", default="llama3-70b", show_default=True, metavar="NAME", help=f"{', '.join(MODELS)}."
)
@click.option("--parallel", default="1,2,4,8", show_default=True, metavar="N,…", help="GPUs a node may have.")
@click.option(
    "--limit", default=1500, show_default=True, metavar="N", help="Only the first N requests; 0: all."
)
@click.option("--json", "json_path", type=_PATH, metavar="FILE", help="Write the report there.")
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
    """Find the cluster that serves most of such requests a GPU, by simulating; and whether it is worth it."""
    slo = _slo(slo_ttft, slo_tbt)
    sizes = _sizes(parallel)
    accelerator, shape = _named("gpu", gpu, GPUS), _named("model", model, MODELS)
    if num_gpus < 1:
        raise ConfigError(f"--gpus must be 1 or more, got {num_gpus}", key="gpus")
    if limit < 0:
        raise ConfigError(f"--limit must be 0 or more, got {limit}", key="limit")
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
            f"{slo_tbt:g} for {100 * EFFECTIVE:.0f} % of these requests, at any load; the best kept them for "
            f"{best:.0f} %",
            key="slo_ttft",
        )
    out = Console(highlight=False, width=None if console.is_terminal else 160)
    out.print(_table(verdicts))
    out.print(_advice(verdicts))
    if json_path is not None:
        report.write(report.Report(report.measure_environment(("numpy",)), _rows(verdicts)), json_path)


def _slo(ttft_s: float, tbt_s: float) -> Slo:
    for option, value in (("--slo-ttft", ttft_s), ("--slo-tbt", tbt_s)):
        if not value > 0:
            raise ConfigError(
                f"{option} must be above 0 s, got {value:g}", key=option.strip("-").replace("-", "_")
            )
    return Slo(ttft_s, tbt_s)


def _sizes(text: str) -> list[int]:
    try:
        sizes = sorted({int(size) for size in text.split(",")})
    except ValueError as error:
        raise ConfigError(
            f"--parallel must be numbers with commas between: {error}", key="parallel"
        ) from error
    if sizes[0] < 1:
        raise ConfigError(f"--parallel must be 1 or more, got {sizes[0]}", key="parallel")
    return sizes


def _named(option: str, name: str, known: Mapping[str, T]) -> T:
    if name not in known:
        raise ConfigError(f"no {option} {name!r}; there are {', '.join(known)}", key=option)
    return known[name]


def _table(verdicts: Sequence[Verdict]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in (
        "cluster",
        "GPUs a node",
        "goodput, req/s",
        "a GPU",
        "load",
        "TTFT p90",
        "TBT p90",
        "cache hit",
        "busy",
    ):
        table.add_column(name, justify="left" if name == "cluster" else "right")
    for i, verdict in enumerate(verdicts):
        outcome, candidate = verdict.outcome, verdict.candidate
        served = outcome.completed
        busy = outcome.prefill_busy_s + outcome.decode_busy_s
        cells = [
            f"{outcome.goodput:.2f}",
            f"{verdict.goodput_per_gpu:.3f}",
            f"{verdict.speed:.2f}×",
            f"{np.quantile([each.ttft_s for each in served], 0.9):.2f} s",
            f"{1e3 * np.quantile([each.tbt_s for each in served], 0.9):.0f} ms",
            f"{100 * outcome.hit_ratio:.0f} %",
            f"{100 * busy / (outcome.num_gpus * outcome.span_s):.0f} %",
        ]
        if not verdict.speed:
            cells = ["keeps the SLOs", "at no load", *[""] * 5]
        style = "bold" if i == 0 else None
        table.add_row(candidate.name, str(candidate.parallel), *cells, style=style)
    return table


def _advice(verdicts: Sequence[Verdict]) -> str:
    """What to do, as sentences."""
    best = {
        both: next((v for v in verdicts if bool(v.candidate.num_both) == both and v.speed), None)
        for both in (True, False)
    }
    split, replicas = best[False], best[True]
    if replicas is None:
        return "Replicas that prefill and decode keep the SLOs at no load: disaggregate."
    if split is None:
        return "Disaggregation does not pay here: only replicas that prefill and decode keep the SLOs."
    ratio = split.goodput_per_gpu / replicas.goodput_per_gpu
    ours, plain = _name(split), _name(replicas)
    if ratio >= MIN_GAIN:
        return f"Disaggregation pays: {ours} serve {ratio:.2f}× as much a GPU as {plain}."
    return (
        f"Disaggregation does not pay here: {plain} are simpler, and {ours} serve {ratio:.2f}× as much a GPU."
    )


def _name(verdict: Verdict) -> str:
    return f"{verdict.candidate.name} of {verdict.candidate.parallel} GPUs each"


def _rows(verdicts: Sequence[Verdict]) -> list[report.Row]:
    rows: list[report.Row] = []
    for verdict in verdicts:
        case = f"{verdict.candidate.name}, {verdict.candidate.parallel} GPUs a node"
        rows.append(
            report.Row(case, "goodput", verdict.outcome.goodput if verdict.speed else 0.0, "requests/s")
        )
        rows.append(report.Row(case, "goodput a GPU", verdict.goodput_per_gpu, "requests/s"))
        rows.append(report.Row(case, "load", verdict.speed, "× the trace's speed"))
    return rows
