"""Finding the processes that a process has started, and stopping one."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

import psutil


def stop(pid: int) -> None:
    """SIGSTOP; returns when every thread has stopped: on a busy machine some go on for a while."""
    os.kill(pid, signal.SIGSTOP)
    while any(_state(task) not in "tTZ" for task in Path(f"/proc/{pid}/task").iterdir()):
        time.sleep(0.001)


def _state(task: Path) -> str:
    try:
        return (task / "stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "Z"  # the thread has ended


def children_of(pid: int) -> list[psutil.Process]:
    """Its children, and those that the fork server has forked for it, which say so in their title."""
    found = psutil.Process(pid).children()
    for process in psutil.process_iter():
        try:
            if f"(of process {pid})" in " ".join(process.cmdline()):
                found.append(process)
        except psutil.Error:
            continue  # it ended meanwhile
    return found


def descendants_of(pid: int) -> list[psutil.Process]:
    """The children of ``pid``, theirs, and so on."""
    children = children_of(pid)
    return [*children, *(other for child in children for other in descendants_of(child.pid))]


def are_gone(processes: list[psutil.Process], timeout_s: float = 60.0) -> bool:
    _, alive = psutil.wait_procs(processes, timeout=timeout_s)
    with contextlib.suppress(psutil.NoSuchProcess):  # it ended just now: the others are asked again
        return all(process.status() == psutil.STATUS_ZOMBIE for process in alive)
    return are_gone(alive, timeout_s)
