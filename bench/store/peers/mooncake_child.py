"""Mooncake Store: a master, and one client that lends the memory itself; zero-copy batches."""

from __future__ import annotations

import mmap
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from mooncake.store import MooncakeDistributedStore  # type: ignore[import-not-found,unused-ignore]

from moonpool.bench.store.peers.child_protocol import serve

_LEASE_MS = 100


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


class Mooncake:
    def __init__(self, directory: Path, block_nbytes: int, num_blocks: int, threads: int) -> None:
        port, metrics = free_port(), free_port()
        binary = Path(sys.executable).parent / "mooncake_master"
        command = [str(binary), f"--rpc_port={port}", f"--metrics_port={metrics}", "--rpc_address=127.0.0.1"]
        # It stands still while it is others' turn, and must not take its own client for dead after that.
        command += [f"--default_kv_lease_ttl={_LEASE_MS}", "--client_ttl=3600"]
        # In this process's group, so it ends with it; what it leaves behind goes to the bench's directory.
        self._master = subprocess.Popen(command, cwd=directory)
        total = block_nbytes * num_blocks
        self._store = MooncakeDistributedStore()
        deadline = time.monotonic() + 20
        segment = 2 * total + (64 << 20)
        arguments = ("127.0.0.1", "P2PHANDSHAKE", segment, 64 << 20, "tcp", "", f"127.0.0.1:{port}")
        # Its master is a process of its own that says nowhere when it listens: the set-up is tried again.
        while self._store.setup(*arguments):
            if time.monotonic() > deadline:
                raise RuntimeError("the store could not be set up")
            time.sleep(0.2)
        self._nbytes = block_nbytes
        self._source, self._into = (self._memory(total) for _ in range(2))
        self._source[:] = np.random.default_rng(1).integers(0, 256, total, dtype=np.uint8)

    def _memory(self, nbytes: int) -> np.ndarray:
        memory = np.frombuffer(mmap.mmap(-1, nbytes), np.uint8)
        memory[:] = 1
        if self._store.register_buffer(memory.ctypes.data, nbytes):
            raise RuntimeError("memory could not be registered")
        return memory

    def _places(self, memory: np.ndarray, blocks: Sequence[int]) -> tuple[list[int], list[int]]:
        base = memory.ctypes.data
        return [base + block * self._nbytes for block in blocks], [self._nbytes] * len(blocks)

    def put(self, generation: int, blocks: Sequence[int]) -> None:
        names = [f"{generation}-{block}" for block in blocks]
        if any(self._store.batch_put_from(names, *self._places(self._source, blocks))):
            raise RuntimeError("a put failed")

    def get(self, generation: int, blocks: Sequence[int]) -> None:
        names = [f"{generation}-{block}" for block in blocks]
        if min(self._store.batch_get_into(names, *self._places(self._into, blocks))) < self._nbytes:
            raise RuntimeError("a get failed")

    def forget(self, generation: int) -> None:
        if not (self._source == self._into).all():
            raise RuntimeError("what came back is not what was put")
        # A get leases what it reads, and so does asking whether it exists; until then nothing is removed.
        time.sleep(3 * _LEASE_MS / 1e3)
        if self._store.remove_all() < 0:
            raise RuntimeError("what was put could not be removed")


if __name__ == "__main__":
    serve(Mooncake)
