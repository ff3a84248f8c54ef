"""``moonpool doctor``: what is slow, missing or wrong here and in a cluster, and what to do about it."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator
from dataclasses import asdict

import orjson
from rich.console import Console
from rich.markup import escape

from moonpool.doctor.agreement import check_clocks, check_conductors, check_options
from moonpool.doctor.evidence import Evidence, gather
from moonpool.doctor.finding import Finding
from moonpool.doctor.hits import check_hits
from moonpool.doctor.index_state import check_index
from moonpool.doctor.machine import check_machine
from moonpool.doctor.nodes import check_nodes
from moonpool.doctor.transfer_paths import check_paths
from moonpool.errors import ApiError
from moonpool.runtime.config.options import Config
from moonpool.transfer.host_report import host_report

_STYLES = {"ok": "green", "slow": "yellow", "wrong": "bold red", "missing": "bold red"}
_CLUSTER_CHECKS = (
    check_nodes,
    check_options,
    check_conductors,
    check_clocks,
    check_index,
    check_hits,
    check_paths,
)


async def doctor(config: Config, url: str | None, console: Console, *, as_json: bool = False) -> int:
    """Print a line a finding, or all of them as JSON; the exit code is 1 where something is missing or wrong.

    Without ``url`` this machine is looked at, with it the cluster too.
    """
    findings: list[Finding] = []

    def show(found: Iterable[Finding]) -> None:
        for finding in found:
            findings.append(finding)
            if not as_json:
                _print(finding, console)

    show(check_machine(config))
    show(check_kernels())
    show(check_transfer(config))
    if url:
        show(await check_cluster(url, config))
    if as_json:
        # Not wrapped, as a console would.
        console.file.write(orjson.dumps([asdict(finding) for finding in findings]).decode() + "\n")
    return int(any(finding.state in ("missing", "wrong") for finding in findings))


def _print(finding: Finding, console: Console) -> None:
    style = _STYLES[finding.state]
    state = f"[{style}]{finding.state:<8}[/]"
    console.print(f"{state}{escape(finding.what):<17} {escape(finding.fact)}", soft_wrap=True)
    if finding.advice:
        console.print(f"{'':<26}[dim]{escape(finding.advice)}[/]", soft_wrap=True)


def check_transfer(config: Config) -> Iterator[Finding]:
    """The ways to peers: what there is, what would be chosen, and why."""
    for what, fact in host_report(config.transfer).items():
        yield Finding(what, "ok", fact)


def check_kernels() -> Iterator[Finding]:
    """What computes here; imports torch, which takes a second."""
    from moonpool.kernels import backend_report

    report = backend_report()
    cpu = report["cpu"]
    fact = f"{cpu['form']} ({cpu['reason']}) on {cpu['processor']}"
    if cpu["form"] == "compiled":
        yield Finding("CPU kernels", "ok", fact)
    else:
        yield Finding("CPU kernels", "slow", fact, "with a C++ compiler here, `make env` compiles them")
    if report["cuda"]:
        yield Finding("GPU", "ok", ", ".join(map(str, report["cuda"])))
    elif shutil.which("nvidia-smi"):
        advice = "remove .venv and run `make env`: it takes a CUDA build where `nvidia-smi -L` lists a GPU"
        yield Finding("GPU", "slow", f"not seen by torch {report['torch']}", advice)
    else:
        yield Finding("GPU", "ok", "none; the CPU computes")


async def check_cluster(url: str, config: Config) -> list[Finding]:
    """What the conductor at ``url`` and its nodes say, and Redis where ``index.redis_url`` says which."""
    try:
        evidence = await gather(url, config.index)
    except ApiError as error:
        return [Finding("conductor", "missing", "no answer", str(error))]
    return [Finding("conductor", "ok", url), *diagnose(evidence)]


def diagnose(evidence: Evidence) -> Iterator[Finding]:
    """Everything there is to say of a cluster, in the order in which one thing explains the next."""
    for check in _CLUSTER_CHECKS:
        yield from check(evidence)
