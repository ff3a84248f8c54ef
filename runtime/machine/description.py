"""What a figure was measured on, and by which code: said beside every figure."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Iterable
from pathlib import Path


def describe_machine() -> str:
    """Such as "AMD EPYC, 2 cores, 24 GiB, Linux 6.1"."""
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                cpu = line.split(":", 1)[1].strip()
                break
    gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    cores = len(os.sched_getaffinity(0))
    return f"{cpu}, {cores} cores, {gib:.0f} GiB, {platform.system()} {platform.release()}"


def versions_of(packages: Iterable[str]) -> dict[str, str]:
    """Python's and those of the distributions; what is not installed is left out."""
    versions = {"python": platform.python_version()}
    for name in packages:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def commit_here() -> str:
    """Of the checkout this runs from, "+" behind it with uncommitted changes; empty outside of one: the
    version stands for it then.
    """

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "--short", "HEAD") + ("+" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.CalledProcessError):
        return ""  # installed from a wheel, or no git
