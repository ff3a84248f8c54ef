"""The transports that work on this host for each kind of peer, for ``moonpool doctor``."""

from __future__ import annotations

import os
from pathlib import Path

from moonpool.runtime.config.options import TransferOptions
from moonpool.runtime.network.sockets import loopback_only
from moonpool.runtime.security import process
from moonpool.transfer.agent_memory import pool_backing
from moonpool.transfer.connections.descriptor import boot_id
from moonpool.transfer.memory.lifeline import readable_by_peers, yama_scope
from moonpool.transfer.native.compiled_copy import compiled_copy
from moonpool.transfer.native.cuda import CudaUnavailable, load_cuda
from moonpool.transfer.native.ucx import Ucx, load_ucx
from moonpool.transfer.paths.ucx.topology import interfaces, num_rdma_rails, rdma_devices

_THP = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_SHMEM_THP = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")


def host_report(options: TransferOptions) -> dict[str, str]:
    """A line for each kind of peer (the transport, and why), and for each hardware and library found."""
    ucx = load_ucx()
    return {
        "same process": _same_process(options),
        "same host": _same_host(options),
        "other hosts": _other_hosts(options, ucx),
        "CUDA": _cuda(options),
        "UCX": _ucx(ucx),
        "RDMA": ", ".join(map(str, rdma_devices())) or "no device",
        "interfaces": ", ".join(map(str, interfaces())) or "none but the loopback",
        "pool memory": _memory(options, with_ucx="ucx" in options.transports and ucx is not None),
    }


def _same_process(options: TransferOptions) -> str:
    if "local" in options.transports:
        return "local: memory is copied directly"
    return "as any other peer: transfer.transports lacks local"


def _same_host(options: TransferOptions) -> str:
    if "shm" not in options.transports:
        return "as on other hosts: transfer.transports lacks shm"
    if not boot_id():
        return "as on other hosts: this host has no boot id to recognise it by"
    if readable_by_peers():
        way = "peers' pools are mapped, other memory is read by process_vm_readv, which is allowed"
        if compiled_copy() is None:
            way = "process_vm_readv, which is allowed; g++ would make it faster"
        return f"shm: {way}"
    scope = yama_scope()
    reason = f"kernel.yama.ptrace_scope is {scope}" if scope else "the sandbox forbids it"
    return f"shm: peers' pools are mapped, other memory passes through sockets ({reason})"


def _cuda(options: TransferOptions) -> str:
    """How device memory is moved, on this host and to others."""
    try:
        cuda = load_cuda()
    except CudaUnavailable as error:
        return f"not in use: {error}"
    version = ".".join(map(str, cuda.version))
    found = f"{cuda.num_devices} devices by {version} at {cuda.path}; device memory goes"
    allocator = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or ""
    if "cuda-ipc" not in options.transports:
        return f"{found} through locked host memory: transfer.transports lacks cuda-ipc"
    if "expandable_segments:True" in allocator:
        return f"{found} through locked host memory: CUDA IPC has no handle for torch's expandable segments"
    return f"{found} by cuda-ipc to devices of this host's processes, else through locked host memory"


def _other_hosts(options: TransferOptions, ucx: Ucx | None) -> str:
    """The first of ``transfer.transports`` that works on this host."""
    for name in options.transports:
        if name == "tcp":
            reach = f"listens on {options.tcp.host}"
            if loopback_only(options.tcp.host):
                reach += ", so reached from this host only (transfer.tcp.host)"
            tls = "with TLS" if process.current().tls is not None else "without TLS"
            way = f"tcp: {options.tcp.streams} connections to each address of a peer, {tls}; {reach}"
            return f"{way}; {_rails(options)}{_no_ucx(options, ucx)}"
        if name == "ucx" and ucx is not None:
            after = ", then tcp" if "tcp" in options.transports else ""
            if ucx.rdma:
                return f"ucx: RDMA by {_rdma_rails()}{after}"
            return f"ucx: its TCP, because {_no_rdma(ucx)}{after}"
    return "none: transfer.transports has neither tcp nor a ucx that works here"


def _rails(options: TransferOptions) -> str:
    if options.tcp.rails:
        return f"batches are spread over it and {', '.join(options.tcp.rails)}"
    up = [interface.name for interface in interfaces() if interface.up]
    if len(up) > 1:
        return f"one address, though {', '.join(up)} are up (transfer.tcp.rails)"
    return "one address"


def _rdma_rails() -> str:
    """The devices that UCX spreads a batch over."""
    active = [device for device in rdma_devices() if device.active]
    if not active:
        return "no active device"
    nearest = active[: num_rdma_rails(active)]
    names = ", ".join(device.name for device in nearest)
    why = f"the nearest of {len(active)}" if len(nearest) < len(active) else "all that are active"
    return f"{names} ({why})"


def _no_ucx(options: TransferOptions, ucx: Ucx | None) -> str:
    if any(device.active for device in rdma_devices()) and "ucx" not in options.transports:
        return "; there is RDMA, but transfer.transports lacks ucx"
    if "ucx" in options.transports and ucx is None:
        return "; ucx is asked for, but there is no libucp"
    return ""


def _ucx(ucx: Ucx | None) -> str:
    if ucx is None:
        return "no libucp (pip install moonpool[ucx], or the system's)"
    version = ".".join(map(str, ucx.version))
    transports = ", ".join(ucx.transports) or "its built-in ones"
    origin = "the wheel's" if ucx.from_wheel else "the system's"
    verbs = "with verbs" if "ib" in ucx.transports else "without verbs"
    rdma = "RDMA is possible" if ucx.rdma else f"no RDMA, because {_no_rdma(ucx)}"
    return f"{version}, {origin}, {verbs}, at {ucx.path}; modules: {transports}; {rdma}"


def _no_rdma(ucx: Ucx) -> str:
    return "this host has no RDMA device" if "ib" in ucx.transports else "this libucp is built without verbs"


def _memory(options: TransferOptions, *, with_ucx: bool) -> str:
    if pool_backing(options, with_ucx=with_ucx) == "memfd":
        pages = "huge" if _mode(_SHMEM_THP) in ("always", "within_size", "advise", "force") else "small"
        return f"shared memory (memfd) in {pages} pages ({_SHMEM_THP} is {_mode(_SHMEM_THP) or 'absent'})"
    if _mode(_THP) in ("never", ""):
        return (
            "anonymous memory in small pages: transparent huge pages are off (faults are some 4 times slower)"
        )
    return "anonymous memory in huge pages"


def _mode(setting: Path) -> str:
    """The selected mode, in brackets; empty: there is no such setting."""
    try:
        return setting.read_text().partition("[")[2].partition("]")[0]
    except OSError:
        return ""
