"""NIXL over UCX, whose transports UCX_TLS chooses. variant: thread or no-thread, to make progress."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
from nixl_cu12._api import nixl_agent, nixl_agent_config  # type: ignore[import-not-found,unused-ignore]

from bench.transfer.peers.child import serve


class Nixl:
    def __init__(self, address: int, nbytes: int, variant: str) -> None:
        self._agent = nixl_agent(
            f"agent{os.getpid()}", nixl_agent_config(variant == "thread", backends=["UCX"])
        )
        self._agent.register_memory([(address, nbytes, 0, "")], "DRAM")
        self.facts: Any = self._agent.get_agent_metadata().hex()
        self._target = ""

    def connect(self, facts: Any) -> None:
        name = self._agent.add_remote_agent(bytes.fromhex(facts))
        self._target = name.decode() if isinstance(name, bytes) else name

    def mover(self, direction: str, here: list[int], there: list[int], nbytes: int) -> Callable[[], None]:
        agent = self._agent
        ours, theirs = (
            agent.get_xfer_descs(np.array([(a, nbytes, 0) for a in addresses], np.uint64), "DRAM")
            for addresses in (here, there)
        )
        handle = agent.initialize_xfer(direction.upper(), ours, theirs, self._target)

        def run() -> None:
            state = agent.transfer(handle)
            while state == "PROC":
                state = agent.check_xfer_state(handle)
            if state != "DONE":
                raise RuntimeError(f"the transfer ended as {state}")

        return run


if __name__ == "__main__":
    serve(Nixl)
