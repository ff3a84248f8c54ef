"""``moonpool doctor``: what is slow, missing or misconfigured here, and what to do about it."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator

from rich.console import Console
from rich.markup import escape

from moonpool.checks import Finding, check_machine
from moonpool.client import Client
from moonpool.errors import ApiError
from moonpool.status import state_of
from runtime.options import Config
from transfer.host_report import host_report

_STYLES = {"ok": "green", "slow": "yellow", "missing": "bold red"}


async def doctor(config: Config, url: str | None, console: Console) -> int:
    """Print a line a finding; the exit code is 1 where something is missing."""
    missing = _show(check_machine(config), console) + _show(check_kernels(), console)
    _show(check_transfer(config), console)
    if url:
        missing += _show(await check_cluster(url), console)
    return 1 if missing else 0


def _show(findings: Iterable[Finding], console: Console) -> int:
    """Returns how many are missing."""
    missing = 0
    for finding in findings:
        style = _STYLES[finding.state]
        state = f"[{style}]{finding.state:<8}[/]"
        console.print(f"{state}{finding.what:<17} {escape(finding.fact)}", soft_wrap=True)
        if finding.advice:
            console.print(f"{'':<26}[dim]{escape(finding.advice)}[/]", soft_wrap=True)
        missing += finding.state == "missing"
    return missing


def check_transfer(config: Config) -> Iterator[Finding]:
    """The ways to peers: what there is, what would be chosen, and why."""
    for what, fact in host_report(config.transfer).items():
        yield Finding(what, "ok", fact)


def check_kernels() -> Iterator[Finding]:
    """What computes here; imports torch, which takes a second."""
    from kernels import backend_report

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


async def check_cluster(url: str) -> list[Finding]:
    """What the conductor at ``url`` says of its nodes."""
    try:
        async with Client(url) as client:
            cluster = await client.cluster()
    except ApiError as error:
        return [Finding("conductor", "missing", "no answer", str(error))]
    findings = [Finding("conductor", "ok", url)]
    nodes = cluster["nodes"]
    for role in ("prefill", "decode"):
        if not any(
            node["role"] == role and node["state"] in ("ready", "unhealthy", "partial") for node in nodes
        ):
            findings.append(
                Finding(f"{role} nodes", "missing", "none is ready", f"start one: moonpool {role}-node")
            )
    for node in nodes:
        fact = f"{node['role']} on {node['host']}, {state_of(node)}"
        if node["state"] == "ready":
            findings.append(Finding(node["node_id"], "ok", fact))
        else:
            findings.append(Finding(node["node_id"], "slow", fact, "see its log"))
    findings += [Finding("cluster", "slow", sentence) for sentence in cluster.get("degraded", [])]
    return findings
