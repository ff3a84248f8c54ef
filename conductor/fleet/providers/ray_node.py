"""The actor that runs one node's process on a machine of a Ray cluster. Imported by Ray's workers."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Final

from ray.util import get_node_ip_address

from moonpool.conductor.fleet.providers.provider import FAILED, RUNNING, STARTING, STOPPING
from moonpool.runtime.errors import ChildFailed
from moonpool.runtime.service.child import Child

ENDED: Final = "ended"
"""Its process was stopped. The actor waits for its end: it cannot end itself without being made again."""
_READY_TIMEOUT_S = 120.0  # a large checkpoint takes a while to load
_STOP_TIMEOUT_S = 5.0  # beyond its drain


class RayNode:
    """Starts a node when it is made, also when Ray makes it again, and ends with it.

    A node that ends after it served takes the actor with it, and Ray makes a new one. A node that never
    served does not: the actor stays and tells why.
    """

    def __init__(self, node_id: str, role: str, toml: str, options: Sequence[str], drain_s: float) -> None:
        """``toml``: the options of the cluster; ``options``: those of this node, as ``key=value``."""
        self._node_id = node_id
        self._role = role
        self._toml = toml
        self._options = options
        self._drain_s = drain_s
        self._state: str = STARTING
        self._reason = ""
        self._stopping: Future[None] = Future()
        # The kernel ends a child with the thread that started it: Ray's own threads come and go.
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)
        self._thread.start()

    def status(self) -> tuple[str, str, str]:
        """Return role, state, and why it failed."""
        return self._role, self._state, self._reason

    def stop(self) -> None:
        """Drain and end the node; the state is ``ENDED`` then. Returns at once. Idempotent."""
        if not self._stopping.done():
            self._state = STOPPING
            self._stopping.set_result(None)

    async def _run(self) -> None:
        directory = Path(tempfile.mkdtemp(prefix="moonpool-"))  # only this user reads it: it has the key
        try:
            has_served = await self._serve(directory)
        finally:
            shutil.rmtree(directory, ignore_errors=True)
        if self._stopping.done():
            self._state = ENDED
        elif has_served:
            os._exit(1)  # Ray makes a new one

    async def _serve(self, directory: Path) -> bool:
        """Run the node until its end; returns whether it has served."""
        file = directory / "cluster.toml"
        file.write_text(self._toml, encoding="utf-8")
        host = get_node_ip_address()
        own = (
            *(f"node.id={self._node_id}", f"node.host={host}", f"transfer.tcp.host={host}"),
            *("node.port=0", "node.metrics_port=0"),
        )
        command = [sys.executable, "-m", "moonpool.node", "--role", self._role, "--config", str(file)]
        for option in (*self._options, *own):
            command += ["--set", option]
        environment = {"OMP_WAIT_POLICY": "PASSIVE"}
        # Its log is Ray's of this actor: `ray logs`.
        child = Child(self._node_id, command, directory / "log", environment=environment, sends_json=True)
        stop = asyncio.wrap_future(self._stopping)
        await child.start()
        ready = asyncio.ensure_future(child.wait_ready(_READY_TIMEOUT_S))
        await asyncio.wait((ready, stop), return_when=asyncio.FIRST_COMPLETED)
        if stop.done():
            ready.cancel()
            await child.stop(self._drain_s + _STOP_TIMEOUT_S)
            return False
        try:
            ready.result()
        except ChildFailed as failure:
            child.kill()
            await child.wait()
            self._reason, self._state = str(failure).partition("\n")[0], FAILED
            return False
        self._state = RUNNING
        ended = asyncio.ensure_future(child.wait())
        await asyncio.wait((ended, stop), return_when=asyncio.FIRST_COMPLETED)
        if stop.done():
            await child.stop(self._drain_s + _STOP_TIMEOUT_S)
        else:
            print(f"{child.failure(f'ended with code {child.returncode}')}", file=sys.stderr, flush=True)
        return True
