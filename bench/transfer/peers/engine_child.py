"""One of the two processes of a peer, in the peer's own Python: NIXL, or Mooncake's Transfer Engine."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

Batches = list[list[int]]  # the addresses of the blocks of each
_HUGE_NBYTES = 2 << 20


class _Mooncake:
    """Over TCP, without a metadata server."""

    # A call for 4,096 spans fails: the engine's queue is full.
    max_spans = 1024

    def __init__(self, address: int, nbytes: int, variant: str) -> None:
        from mooncake.engine import TransferEngine  # type: ignore[import-not-found,unused-ignore]

        self._engine = TransferEngine()
        if self._engine.initialize("127.0.0.1", "P2PHANDSHAKE", variant, ""):
            raise RuntimeError("the engine could not be initialized")
        if self._engine.register_memory(address, nbytes):
            raise RuntimeError("the pool could not be registered")
        self.facts: Any = f"127.0.0.1:{self._engine.get_rpc_port()}"
        self._target = ""
        self._threads = ThreadPoolExecutor(8)

    def connect(self, facts: Any) -> None:
        self._target = facts

    def mover(self, direction: str, here: Batches, there: Batches, nbytes: int) -> Callable[[], object]:
        engine = self._engine
        move = engine.batch_transfer_sync_read if direction == "read" else engine.batch_transfer_sync_write

        def one(ours: list[int], theirs: list[int]) -> None:
            for at in range(0, len(ours), self.max_spans):
                part = slice(at, at + self.max_spans)
                if move(self._target, ours[part], theirs[part], [nbytes] * len(ours[part])) < 0:
                    raise RuntimeError("the transfer failed")

        if len(here) == 1:
            return lambda: one(here[0], there[0])
        return lambda: list(self._threads.map(one, here, there))


class _Nixl:
    """Over UCX, on the transports of UCX_TLS. variant: thread or no-thread, to make progress."""

    def __init__(self, address: int, nbytes: int, variant: str) -> None:
        from nixl_cu12._api import (  # type: ignore[import-not-found,unused-ignore]
            nixl_agent,
            nixl_agent_config,
        )

        config = nixl_agent_config(variant == "thread", backends=["UCX"])
        self._agent = nixl_agent(f"agent{os.getpid()}", config)
        self._agent.register_memory([(address, nbytes, 0, "")], "DRAM")
        self.facts: Any = self._agent.get_agent_metadata().hex()
        self._target = ""

    def connect(self, facts: Any) -> None:
        name = self._agent.add_remote_agent(bytes.fromhex(facts))
        self._target = name.decode() if isinstance(name, bytes) else name

    def mover(self, direction: str, here: Batches, there: Batches, nbytes: int) -> Callable[[], object]:
        agent = self._agent

        def descriptors(addresses: list[int]) -> Any:
            return agent.get_xfer_descs(np.array([(a, nbytes, 0) for a in addresses], np.uint64), "DRAM")

        handles = [
            agent.initialize_xfer(direction.upper(), descriptors(ours), descriptors(theirs), self._target)
            for ours, theirs in zip(here, there, strict=True)
        ]

        def run() -> None:
            # All from one thread: an agent must not be called from two at a time.
            states = [agent.transfer(handle) for handle in handles]
            while "PROC" in states:
                states = [
                    agent.check_xfer_state(handle) if state == "PROC" else state
                    for handle, state in zip(handles, states, strict=True)
                ]
            if set(states) != {"DONE"}:
                raise RuntimeError(f"the transfers ended as {states}")

        return run


class Side:
    """A pool in huge pages, present, as Moonpool's own. ``ready``: its address, and facts for ``connect``."""

    def __init__(self, engine: str, pool_nbytes: int, variant: str) -> None:
        mapping = mmap.mmap(-1, pool_nbytes + _HUGE_NBYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        mapping.madvise(mmap.MADV_HUGEPAGE)
        whole = np.frombuffer(mapping, np.uint8)
        start = -int(whole.__array_interface__["data"][0]) % _HUGE_NBYTES
        self._pool = whole[start : start + pool_nbytes]
        self._pool[:] = 0
        address = int(self._pool.__array_interface__["data"][0])
        make: Any = {"nixl": _Nixl, "mooncake": _Mooncake}[engine]
        self._engine = make(address, pool_nbytes, variant)
        self.ready = {"address": address, "facts": self._engine.facts}
        self._move: Callable[[], object] = lambda: None

    def connect(self, facts: Any) -> None:
        self._engine.connect(facts)

    def prepare(self, direction: str, nbytes: int, here: Batches, there: Batches) -> None:
        self._move = self._engine.mover(direction, here, there, nbytes)

    def move(self, seconds: float) -> list[float]:
        """Move all batches at once, again and again: the seconds of each pass but the first."""
        taken: list[float] = []
        self._move()
        until = time.perf_counter() + seconds
        while not taken or time.perf_counter() < until:
            began_s = time.perf_counter()
            self._move()
            taken.append(time.perf_counter() - began_s)
        return taken
