"""Description of the machine and the code of a measurement."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import tomllib
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from moonpool.runtime.machine.processor import cpuinfo


def describe_machine() -> str:
    """The machine in one line, such as "AMD EPYC, 2 cores, 24 GiB, Linux 6.1"."""
    cpu = cpuinfo().get("model name") or platform.processor() or platform.machine()
    gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    cores = len(os.sched_getaffinity(0))
    return f"{cpu}, {cores} cores, {gib:.0f} GiB, {platform.system()} {platform.release()}"


@cache
def own_version() -> str:
    """Moonpool's version; where it runs from its sources without being installed, that of pyproject.toml."""
    try:
        return importlib.metadata.version("moonpool")
    except importlib.metadata.PackageNotFoundError:
        sources = Path(__file__).resolve().parents[2] / "pyproject.toml"
        found: str = tomllib.loads(sources.read_text())["project"]["version"]
        return found


def versions_of(packages: Iterable[str]) -> dict[str, str]:
    """The versions of Python and of those distributions that are installed."""
    versions = {"python": platform.python_version()}
    for name in packages:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def commit_here() -> str:
    """The commit of this checkout, with "+" if there are uncommitted changes; empty outside of a checkout."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "--short", "HEAD") + ("+" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.CalledProcessError):
        return ""  # installed from a wheel, or no git
