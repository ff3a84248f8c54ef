"""What this host allows the transfer engine, in words: for ``moonpool doctor``."""

from __future__ import annotations

import os
from pathlib import Path

from transfer.host import boot_id
from transfer.lifeline import readable_by_peers
from transfer.ucx.library import load_ucx

_THP = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_YAMA = Path("/proc/sys/kernel/yama/ptrace_scope")


def host_report() -> dict[str, str]:
    """One line for each way to a peer, best first: whether it is open here, and what that means."""
    return {
        "same process": "memory is copied directly",
        "same host": _same_host(),
        "network": _network(),
        "memory": _memory(),
    }


def _same_host() -> str:
    if not boot_id():
        return "not told apart from other hosts (no boot id): peers are reached over TCP"
    if readable_by_peers():
        return "reads straight from the peer's memory (process_vm_readv)"
    scope = _YAMA.read_text().strip() if _YAMA.exists() else "0"
    reason = f"kernel.yama.ptrace_scope is {scope}" if scope not in ("0", "1") else "the sandbox forbids it"
    return f"reads from shared memory, mapped (process_vm_readv is not allowed: {reason})"


def _network() -> str:
    ucx = load_ucx()
    if ucx is None:
        return "TCP, several connections to each peer; no libucp, so no RDMA (pip install moonpool[ucx])"
    version = ".".join(map(str, ucx.version))
    rdma = "with RDMA" if ucx.rdma else "without RDMA: built without verbs, or no device"
    return f"TCP, several connections to each peer; UCX {version} at {ucx.path}, {rdma} (transfer.transports)"


def _memory() -> str:
    if not readable_by_peers():
        return "shared memory (memfd) in small pages"
    try:
        modes = _THP.read_text()
    except OSError:
        modes = ""
    if "[never]" in modes or not modes:
        return (
            "anonymous memory in small pages: transparent huge pages are off (faults are some 4 times slower)"
        )
    return f"anonymous memory in huge pages; {os.cpu_count()} processors"
