"""Which link a group uses, and its opening."""

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

# Where all ranks are on one machine.
_HERE = "127.0.0.1"


def choose_link(option: str, device: torch.device, hosts: int) -> str:
    """``auto`` is nccl on GPUs, elsewhere shm, and over several hosts shm+gloo. Raises ConfigError for what
    these machines cannot do."""
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "AMD64"):
        raise ConfigError(
            "engine.parallel: ranks share memory in a way that needs Linux on x86-64; use tp=1, pp=1 here",
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
            f"engine.parallel.link is shm, but the ranks are on {hosts} machines, which share no memory: use "
            "auto",
            "engine.parallel.link",
        )
    return link


def open_store(address: str) -> TCPStore:
    """Where the ranks of torch.distributed meet: the leader's, at ``address`` of this machine only, on a port
    that is free. Make a new one for each group: what is left of lost ranks meets nobody there.

    address: as the other machines reach it; empty: only ranks of this machine do. Raises OSError where this
    machine has no such address.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family) as listening:
        listening.bind((address or _HERE, 0))
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
    )


def open_link(assignment: Assignment, config: ModelConfig, board: SharedBoard, clock: ExchangeClock) -> Link:
    """This rank's side of the group's link; with torch.distributed it waits for the other ranks.

    Raises RankLost when they do not come.
    """
    match assignment.link:
        case "shm":
            return _shm_link(assignment, config, board, clock)
        case "shm+gloo":
            far = _torch_link(assignment, config, board, clock, within_stages=False)
            near = _shm_link(assignment, config, board, clock)
            stages = assignment.plan.pp // assignment.options.parallel.hosts
            return HybridLink(near, far, assignment.shard(config), stages)
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
    with raising_rank_lost(0, f"; the ranks' meeting place is {assignment.store}"):
        store = TCPStore(host, int(port), timeout=timedelta(seconds=start_timeout_s))
    ranks = ProcessGroup(
        "nccl" if assignment.link == "nccl" else "gloo",
        store,
        board,
        device,
        address=assignment.address or _HERE,
        start_timeout_s=start_timeout_s,
    )
    shard = assignment.shard(config)
    return TorchLink(ranks, config, assignment.plan, shard, dtype, device, clock, within_stages=within_stages)
