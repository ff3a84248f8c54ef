"""``moonpool doctor``: findings about this machine and a cluster, with advice."""

from __future__ import annotations

import asyncio
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import click
import orjson
from rich.console import Console
from rich.markup import escape

from moonpool.commands.options import api_key, api_key_option, config_options
from moonpool.commands.options import console as terminal
from moonpool.doctor.agreement import check_clocks, check_conductors, check_options
from moonpool.doctor.engine import check_engines, diagnose_engine, gather_engine, is_engine
from moonpool.doctor.evidence import Evidence, gather
from moonpool.doctor.finding import Finding
from moonpool.doctor.hits import check_hits, check_requests
from moonpool.doctor.index_state import check_index
from moonpool.doctor.machine import check_machine, configured_redis
from moonpool.doctor.nodes import check_nodes, check_ranks, check_security
from moonpool.doctor.transfer_paths import check_paths
from moonpool.errors import ApiError, has_extra
from moonpool.runtime.config.loading import load_config
from moonpool.runtime.config.options import Config
from moonpool.runtime.security import process
from moonpool.transfer.host_report import host_report

_STYLES = {"ok": "green", "slow": "yellow", "wrong": "bold red", "missing": "bold red"}
_CLUSTER_CHECKS = (
    check_nodes,
    check_security,
    check_options,
    check_conductors,
    check_clocks,
    check_index,
    check_hits,
    check_paths,
    check_engines,
    check_ranks,
    check_requests,
)


@click.command("doctor")
@click.option(
    "--url",
    envvar="MOONPOOL_URL",
    help="Also diagnose the cluster of this conductor, or the engine with this /metrics of the connector.",
)
@api_key_option
@click.option("--redis", metavar="URL", help="Also read the cluster's index (index.redis_url).")
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
@config_options
def doctor_command(
    url: str | None, redis: str | None, as_json: bool, file: Path | None, sets: Sequence[str]
) -> None:
    """Report what is slow, missing or wrong on this machine and in a cluster, and what to do about it.

    In a cluster (--url): nodes that do not serve, causes of cache misses, slow paths, clocks that differ,
    options that contradict each other. Exit code 1: something is missing or wrong.
    """
    config = load_config(file, [*sets, *([f"index.redis_url={redis}"] if redis else [])])
    process.use_as_client(config.security)
    sys.exit(asyncio.run(doctor(config, url, terminal, as_json=as_json)))


async def doctor(config: Config, url: str | None, console: Console, *, as_json: bool = False) -> int:
    """Print the findings about this machine, and about the cluster at ``url``.

    Returns the exit code: 1 if something is missing or wrong.
    """
    findings: list[Finding] = []

    def show(found: Iterable[Finding]) -> None:
        for finding in found:
            findings.append(finding)
            if not as_json:
                _print(finding, console)

    show(check_machine(config))
    if config.index.redis_url:
        show([await configured_redis(config)])
    if has_extra("serve"):
        show(check_kernels())
    show(check_transfer(config))
    if url and is_engine(url):
        show(await check_engine(url))
    elif url:
        show(await check_cluster(url, config))
    if as_json:
        # The console would wrap the line.
        console.file.write(orjson.dumps([asdict(finding) for finding in findings]).decode() + "\n")
    return int(any(finding.state in ("missing", "wrong") for finding in findings))


def _print(finding: Finding, console: Console) -> None:
    style = _STYLES[finding.state]
    state = f"[{style}]{finding.state:<8}[/]"
    console.print(f"{state}{escape(finding.what):<17} {escape(finding.fact)}", soft_wrap=True)
    if finding.advice:
        console.print(f"{'':<26}[dim]{escape(finding.advice)}[/]", soft_wrap=True)


def check_transfer(config: Config) -> Iterator[Finding]:
    """Report the transports to peers: which there are, which would be chosen, and why."""
    for what, fact in host_report(config.transfer).items():
        yield Finding(what, "ok", fact)


def check_kernels() -> Iterator[Finding]:
    """Report the kernels that compute here. Imports torch, which takes a second."""
    from moonpool.kernels.report import backend_report

    report = backend_report()
    cpu = report["cpu"]
    fact = f"{cpu['form']} ({cpu['reason']}) on {cpu['processor']}"
    if cpu["form"] == "compiled":
        yield Finding("CPU kernels", "ok", fact)
    else:
        yield Finding("CPU kernels", "slow", fact, "with a C++ compiler here, `make env` compiles them")
    if report["cuda"]:
        from moonpool.engine.device.selection import choose_device, step_limits

        limits = step_limits(choose_device("auto").memory())
        yield Finding("GPU", "ok", f"{', '.join(map(str, report['cuda']))}; steps have {limits} by default")
    elif shutil.which("nvidia-smi"):
        advice = "remove .venv and run `make env`: it takes a CUDA build where `nvidia-smi -L` lists a GPU"
        yield Finding("GPU", "slow", f"not seen by torch {report['torch']}", advice)
    else:
        yield Finding("GPU", "ok", "none; the CPU computes")


async def check_engine(url: str) -> list[Finding]:
    """Diagnose the engine with its metrics page at ``url``."""
    try:
        return list(diagnose_engine(await gather_engine(url)))
    except ApiError as error:
        return [Finding("engine", "missing", "no answer", str(error))]


async def check_cluster(url: str, config: Config) -> list[Finding]:
    """Diagnose the cluster of the conductor at ``url``, and its index if ``index.redis_url`` is set."""
    try:
        evidence = await gather(url, config.index, api_key())
    except ApiError as error:
        return [Finding("conductor", "missing", "no answer", str(error))]
    return [Finding("conductor", "ok", url), *diagnose(evidence)]


def diagnose(evidence: Evidence) -> Iterator[Finding]:
    """Run the cluster's checks; causes come before their effects."""
    for check in _CLUSTER_CHECKS:
        yield from check(evidence)
