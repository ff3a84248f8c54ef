"""Which link a group uses, and its opening."""

from __future__ import annotations

import platform
import sys
from datetime import timedelta

import torch
from torch._C._distributed_c10d import TCPStore

from engine.config import ModelConfig
from engine.dtype import TORCH_DTYPES
from engine.parallel.assignment import Assignment
from engine.parallel.board import Board, SharedMemory
from engine.parallel.clock import ExchangeClock
from engine.parallel.link import Link
from engine.parallel.shm_link import ExchangeShape, ShmLink
from engine.parallel.torch_link import TorchLink
from runtime.errors import ConfigError


def choose_link(option: str, device: torch.device) -> str:
    """``auto`` is nccl on GPUs, shm elsewhere. Raises ConfigError for what this machine cannot do."""
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "AMD64"):
        raise ConfigError(
            "engine.parallel: ranks share memory in a way that needs Linux on x86-64; use tp=1, pp=1 here",
            "engine.parallel.tp",
        )
    on_gpu = device.type == "cuda"
    link = option if option != "auto" else "nccl" if on_gpu else "shm"
    if (link == "nccl") != on_gpu:
        raise ConfigError(
            f"engine.parallel.link is {link}, but the device is {device.type}: use auto",
            "engine.parallel.link",
        )
    return link


def exchange_shape(assignment: Assignment, config: ModelConfig) -> ExchangeShape:
    return ExchangeShape.of(
        config,
        assignment.plan,
        max_tokens=assignment.options.max_batch_tokens,
        max_rows=assignment.max_rows,
        dtype=TORCH_DTYPES[assignment.dtype],
    )


def open_link(assignment: Assignment, config: ModelConfig, board: Board, clock: ExchangeClock) -> Link:
    """This rank's side of the group's link; with torch.distributed it waits for the other ranks.

    Raises RankLost when they do not come.
    """
    plan, shard = assignment.plan, assignment.shard(config)
    if assignment.link == "shm":
        memory = SharedMemory.open(assignment.exchange)
        return ShmLink(board, memory, exchange_shape(assignment, config), config, plan, shard, clock)
    host, _, port = assignment.store.rpartition(":")
    parallel = assignment.options.parallel
    return TorchLink(
        assignment.link,
        TCPStore(host, int(port), timeout=timedelta(seconds=parallel.start_timeout_s)),
        parallel.timeout_s,
        parallel.start_timeout_s,
        config,
        plan,
        shard,
        TORCH_DTYPES[assignment.dtype],
        assignment.torch_device(),
        clock,
    )
