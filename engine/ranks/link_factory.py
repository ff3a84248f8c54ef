"""Choice and construction of a group's link."""

from __future__ import annotations

import platform
import socket
import sys
from datetime import timedelta

import torch
from torch._C._distributed_c10d import TCPStore

from moonpool.engine.checkpoint.config import ModelConfig
from moonpool.engine.collectives.board import SharedBoard, SharedMemory
from moonpool.engine.collectives.exchange_clock import ExchangeClock
from moonpool.engine.collectives.hybrid import HybridLink
from moonpool.engine.collectives.link import Link
from moonpool.engine.collectives.process_group import ProcessGroup, raising_rank_lost
from moonpool.engine.collectives.shm import ExchangeShape, ShmLink
from moonpool.engine.collectives.torch_distributed import TorchLink
from moonpool.engine.device.selection import TORCH_DTYPES
from moonpool.engine.ranks.assignment import Assignment
from moonpool.runtime.errors import ConfigError

# Address of groups on one machine.
_LOCAL_ADDRESS = "127.0.0.1"


def choose_link(option: str, device: torch.device, hosts: int) -> str:
    """Return the link; ``auto``: nccl on GPUs, shm+gloo with several hosts, else shm. Raises ConfigError
    for an impossible choice."""
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "AMD64"):
        raise ConfigError(
            "engine.parallel: several ranks need Linux on x86-64; use tp=1, pp=1, cp=1 here",
            "engine.parallel.tp",
        )
    on_gpu = device.type == "cuda"
    link = option if option != "auto" else "nccl" if on_gpu else "shm+gloo" if hosts > 1 else "shm"
    if (link == "nccl") != on_gpu:
        raise ConfigError(
            f"engine.parallel.link is {link}, but the device is {device.type}: use auto",
            "engine.parallel.link",
        )
    if link == "shm" and hosts > 1:
        raise ConfigError(
            f"engine.parallel.link is shm, but the {hosts} machines of the ranks share no memory: use auto",
            "engine.parallel.link",
        )
    return link


def open_store(address: str) -> TCPStore:
    """Open torch.distributed's rendezvous at a free port of ``address``; empty: for ranks of this machine.

    Open a new one for each group, so that leftovers of lost ranks cannot join. Raises OSError where this
    machine does not have the address.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family) as listening:
        listening.bind((address or _LOCAL_ADDRESS, 0))
        listening.listen()
        host, port = listening.getsockname()[:2]
        fd = listening.detach()
    return TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=fd)


def exchange_shape(assignment: Assignment, config: ModelConfig) -> ExchangeShape:
    return ExchangeShape.of(
        config,
        assignment.plan,
        max_tokens=assignment.options.max_batch_tokens,
        max_rows=assignment.max_rows,
        dtype=TORCH_DTYPES[assignment.dtype],
        steps_in_flight=assignment.steps_in_flight,
    )


def open_link(assignment: Assignment, config: ModelConfig, board: SharedBoard, clock: ExchangeClock) -> Link:
    """Open this rank's side of the link; with torch.distributed wait for the other ranks. Raises RankLost."""
    match assignment.link:
        case "shm":
            return _shm_link(assignment, config, board, clock)
        case "shm+gloo":
            remote = _torch_link(assignment, config, board, clock, within_stages=False)
            local = _shm_link(assignment, config, board, clock)
            stages = assignment.plan.pp // assignment.options.parallel.hosts
            return HybridLink(local, remote, assignment.shard(config), stages)
        case _:
            return _torch_link(assignment, config, board, clock, within_stages=True)


def _shm_link(
    assignment: Assignment, config: ModelConfig, board: SharedBoard, clock: ExchangeClock
) -> ShmLink:
    memory = SharedMemory.open(assignment.exchange)
    shape, shard = exchange_shape(assignment, config), assignment.shard(config)
    return ShmLink(board, memory, shape, config, assignment.plan, shard, clock)


def _torch_link(
    assignment: Assignment,
    config: ModelConfig,
    board: SharedBoard,
    clock: ExchangeClock,
    *,
    within_stages: bool,
) -> TorchLink:
    host, _, port = assignment.store.rpartition(":")
    start_timeout_s = assignment.options.parallel.start_timeout_s
    device, dtype = assignment.torch_device(), TORCH_DTYPES[assignment.dtype]
    with raising_rank_lost(0, f"; the rendezvous is at {assignment.store}"):
        store = TCPStore(host.strip("[]"), int(port), timeout=timedelta(seconds=start_timeout_s))
    ranks = ProcessGroup(
        "nccl" if assignment.link == "nccl" else "gloo",
        store,
        board,
        device,
        address=assignment.address or _LOCAL_ADDRESS,
        start_timeout_s=start_timeout_s,
    )
    shard = assignment.shard(config)
    return TorchLink(
        ranks,
        config,
        assignment.plan,
        shard,
        dtype,
        device,
        clock,
        within_stages=within_stages,
        steps_in_flight=assignment.steps_in_flight,
    )
