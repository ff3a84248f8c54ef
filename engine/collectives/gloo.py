"""Gloo listening at an address of our choosing."""

from __future__ import annotations

import os
from datetime import timedelta
from functools import partial

import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroupGloo, Store

# What an operator sets who knows better than we do by which network machines reach each other.
INTERFACE = "GLOO_SOCKET_IFNAME"
_NAME = "gloo_here"


def gloo_backend(address: str) -> str:
    """The name of a torch.distributed backend, valid until the next call: Gloo, listening at ``address``.

    Left to itself Gloo listens where the machine's own name leads, and tells the others to connect to that:
    on many machines it leads to 127.0.1.1, where nobody else comes. ``GLOO_SOCKET_IFNAME``, where it is set,
    is obeyed.
    """
    dist.Backend.register_backend(_NAME, partial(_group, address), devices=["cpu"])
    return _NAME


def _group(address: str, store: Store, rank: int, size: int, timeout: timedelta) -> ProcessGroupGloo:
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # torch's stub has another name
    options._timeout = timeout
    options._devices = [
        ProcessGroupGloo.create_default_device()
        if os.environ.get(INTERFACE)
        else ProcessGroupGloo.create_device(hostname=address)
    ]
    return ProcessGroupGloo(store, rank, size, options)
