"""NIXL over UCX, whose transports UCX_TLS chooses. variant: thread or no-thread, to make progress."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
from nixl_cu12._api import nixl_agent, nixl_agent_config  # type: ignore[import-not-found,unused-ignore]

from moonpool.bench.transfer.peers.child_protocol import Batches, serve


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

    def mover(self, direction: str, here: Batches, there: Batches, nbytes: int) -> Callable[[], None]:
        agent = self._agent

        def descriptors(addresses: list[int]) -> Any:
            return agent.get_xfer_descs(np.array([(a, nbytes, 0) for a in addresses], np.uint64), "DRAM")

        handles = [
            agent.initialize_xfer(direction.upper(), descriptors(ours), descriptors(theirs), self._target)
            for ours, theirs in zip(here, there, strict=True)
        ]

        def run() -> None:
            # All from one thread: an agent is not to be called from two at a time.
            states = [agent.transfer(handle) for handle in handles]
            while "PROC" in states:
                states = [
                    agent.check_xfer_state(handle) if state == "PROC" else state
                    for handle, state in zip(handles, states, strict=True)
                ]
            if set(states) != {"DONE"}:
                raise RuntimeError(f"the transfers ended as {states}")

        return run


if __name__ == "__main__":
    serve(Nixl)
