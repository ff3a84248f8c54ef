"""Mooncake Store: a client, and a master where none is named; zero-copy batches."""

from __future__ import annotations

import mmap
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from mooncake.store import MooncakeDistributedStore  # type: ignore[import-not-found,unused-ignore]

_LOCAL_NBYTES = 64 << 20
_START_S = 20.0


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


class Mooncake:
    """lent_nbytes: memory that it lends to the store; 0: what it puts goes to other clients' memory.

    master_port: of another client's master; 0: it starts one, in its own process group. ``ready``: the port.
    """

    def __init__(self, lent_nbytes: int, master_port: int = 0) -> None:
        self.ready = master_port or _free_port()
        self._master: subprocess.Popen[bytes] | None = None
        if not master_port:
            self._start_master()
        self._store = MooncakeDistributedStore()
        segment = lent_nbytes + _LOCAL_NBYTES if lent_nbytes else 0
        arguments = (
            "127.0.0.1",
            "P2PHANDSHAKE",
            segment,
            _LOCAL_NBYTES,
            "tcp",
            "",
            f"127.0.0.1:{self.ready}",
        )
        deadline = time.monotonic() + _START_S
        # The master does not say when it listens: the set-up is tried again.
        while code := self._store.setup(*arguments):
            if self._master is not None and self._master.poll() is not None:
                raise RuntimeError(f"mooncake_master ended with code {self._master.returncode}")
            if time.monotonic() > deadline:
                raise RuntimeError(f"the store was not set up within {_START_S:g} s: its last code is {code}")
            time.sleep(0.2)
        self._keys: list[str] = []
        self._buffers: list[int] = []
        self._generation = 0

    def _start_master(self) -> None:
        command = [str(Path(sys.executable).parent / "mooncake_master"), f"--rpc_port={self.ready}"]
        command += [f"--metrics_port={_free_port()}", "--rpc_address=127.0.0.1"]
        # It is paused during others' turns, and must not declare its client dead after that.
        command += ["--client_ttl=3600"]
        self._directory = tempfile.TemporaryDirectory(prefix="mooncake-")  # what the master writes
        self._master = subprocess.Popen(command, cwd=self._directory.name)

    def prepare(self, count: int, nbytes: int, batch: int) -> None:
        """Objects of one size, moved in batches. Those of an earlier call are removed."""
        self._remove()
        for address in self._buffers:
            self._store.unregister_buffer(address)
        self._buffers.clear()
        self._count, self._nbytes, self._batch = count, nbytes, batch
        self._source, self._into = (self._memory(count * nbytes) for _ in range(2))
        self._source[:] = np.random.default_rng(1).integers(0, 256, count * nbytes, dtype=np.uint8)

    def _memory(self, nbytes: int) -> Any:
        memory = np.frombuffer(mmap.mmap(-1, nbytes), np.uint8)
        memory[:] = 1
        address = int(memory.ctypes.data)
        if self._store.register_buffer(address, nbytes):
            raise RuntimeError("memory could not be registered")
        self._buffers.append(address)
        return memory

    def _remove(self) -> None:
        for key in self._keys:
            self._store.remove(key, True)
        self._keys = []

    def put(self) -> float:
        """Remove the objects, then put all under new names. Returns the seconds of putting."""
        self._remove()
        self._generation += 1
        self._keys = [f"{self._generation}-{number}" for number in range(self._count)]
        return self._move(self._store.batch_put_from, self._buffers[0], list(range(self._count)), 0)

    def get(self, order: list[int]) -> float:
        """Get all objects in this order, each to its own memory. Returns seconds."""
        seconds = self._move(self._store.batch_get_into, self._buffers[1], order, self._nbytes)
        if not (self._source == self._into).all():
            raise RuntimeError("an object that was got differs from the one that was put")
        return seconds

    def _move(self, call: Any, base: int, order: list[int], expected: int) -> float:
        began_s = time.perf_counter()
        for first in range(0, len(order), self._batch):
            numbers = order[first : first + self._batch]
            keys = [self._keys[number] for number in numbers]
            codes = call(
                keys, [base + number * self._nbytes for number in numbers], [self._nbytes] * len(keys)
            )
            if any(code != expected for code in codes):
                raise RuntimeError(f"a batch failed: {codes}")
        return time.perf_counter() - began_s
