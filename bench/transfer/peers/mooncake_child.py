"""Mooncake's Transfer Engine over TCP, without a metadata server."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mooncake.engine import TransferEngine  # type: ignore[import-not-found,unused-ignore]

from bench.transfer.peers.child import serve


class Mooncake:
    def __init__(self, address: int, nbytes: int, variant: str) -> None:
        self._engine = TransferEngine()
        if self._engine.initialize("127.0.0.1", "P2PHANDSHAKE", variant, ""):
            raise RuntimeError("the engine could not be initialized")
        if self._engine.register_memory(address, nbytes):
            raise RuntimeError("the pool could not be registered")
        self.facts: Any = f"127.0.0.1:{self._engine.get_rpc_port()}"
        self._target = ""

    def connect(self, facts: Any) -> None:
        self._target = facts

    def mover(self, direction: str, here: list[int], there: list[int], nbytes: int) -> Callable[[], None]:
        engine = self._engine
        move = engine.batch_transfer_sync_read if direction == "read" else engine.batch_transfer_sync_write
        sizes = [nbytes] * len(here)

        def run() -> None:
            if move(self._target, here, there, sizes) < 0:
                raise RuntimeError("the transfer failed")

        return run


if __name__ == "__main__":
    serve(Mooncake)
