"""Mooncake's Transfer Engine over TCP, without a metadata server."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from mooncake.engine import TransferEngine  # type: ignore[import-not-found,unused-ignore]

from moonpool.bench.transfer.peers.child_protocol import Batches, serve

# A call for 4,096 spans fails: its queue is full.
_MOST_SPANS = 1024


class Mooncake:
    def __init__(self, address: int, nbytes: int, variant: str) -> None:
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

    def mover(self, direction: str, here: Batches, there: Batches, nbytes: int) -> Callable[[], None]:
        engine = self._engine
        move = engine.batch_transfer_sync_read if direction == "read" else engine.batch_transfer_sync_write

        def one(ours: list[int], theirs: list[int]) -> None:
            for at in range(0, len(ours), _MOST_SPANS):
                part = slice(at, at + _MOST_SPANS)
                if move(self._target, ours[part], theirs[part], [nbytes] * len(ours[part])) < 0:
                    raise RuntimeError("the transfer failed")

        def run() -> None:
            if len(here) == 1:
                one(here[0], there[0])
            else:
                list(self._threads.map(one, here, there))

        return run


if __name__ == "__main__":
    serve(Mooncake)
