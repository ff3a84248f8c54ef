"""The actors that run one node's processes on machines of a Ray cluster. Imported by Ray's workers."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import tempfile
import threading
import traceback
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Final

import ray
from ray.exceptions import RayError
from ray.util import get_node_ip_address

from moonpool.conductor.fleet.providers.provider import FAILED, RUNNING, STARTING, STOPPING
from moonpool.runtime.errors import ChildFailed
from moonpool.runtime.network.sockets import free_port, host_port
from moonpool.runtime.service.child import Child

ENDED: Final = "ended"
"""Its process was stopped. The actor waits for its end: it cannot end itself without being made again."""
_READY_TIMEOUT_S = 120.0  # a large checkpoint takes a while to load
_STOP_TIMEOUT_S = 5.0  # beyond its drain
_LOOK_S = 1.0  # of ranks on other machines, for their node
_ANSWER_S = 5.0
_ENVIRONMENT = {"OMP_WAIT_POLICY": "PASSIVE"}


class RayNode:
    """Starts a node when it is made, also when Ray makes it again, and ends with it.

    A node that ends after it served takes the actor with it, and Ray makes a new one. A node that never
    served does not: the actor stays and tells why.
    """

    def __init__(
        self, node_id: str, role: str, toml: str, options: Sequence[str], drain_s: float, hosts: int
    ) -> None:
        """``toml``: the options of the cluster; ``options``: those of this node, as ``key=value``. ``hosts``:
        machines of its ranks; a ``RayRankHost`` is on each of the others."""
        self._node_id = node_id
        self._hosts = hosts
        self._listen = ""
        self._role = role
        self._toml = toml
        self._options = options
        self._drain_s = drain_s
        self._state: str = STARTING
        self._reason = ""
        self._has_served = False
        self._stopping: Future[None] = Future()
        # The kernel ends a child with the thread that started it: Ray's own threads come and go.
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)
        self._thread.start()

    def status(self) -> tuple[str, str, str]:
        """Return role, state, and why it failed."""
        return self._role, self._state, self._reason

    def rank_address(self) -> str:
        """Return where it listens for the machines of its ranks; empty: not yet."""
        return self._listen

    def stop(self) -> None:
        """Drain and end the node; the state is ``ENDED`` then. Returns at once. Idempotent."""
        if not self._stopping.done():
            # Nothing runs any more of one that failed.
            self._state = ENDED if self._state == FAILED else STOPPING
            self._stopping.set_result(None)

    async def _run(self) -> None:
        try:
            # Only this user reads it: it has the key.
            with tempfile.TemporaryDirectory(prefix="moonpool-", ignore_cleanup_errors=True) as directory:
                await self._serve(Path(directory))
        except Exception as error:
            # Whatever it is: nothing runs, and what asks for the state is told.
            if not self._has_served:
                self._reason, self._state = f"{type(error).__name__}: {error}", FAILED
            with contextlib.suppress(OSError):  # Ray's log may be on the same full disk
                traceback.print_exc()
        if self._stopping.done():
            self._state = ENDED
        elif self._has_served:
            os._exit(1)  # Ray makes a new one

    async def _serve(self, directory: Path) -> None:
        """Run the node until its end."""
        file = directory / "cluster.toml"
        file.write_text(self._toml, encoding="utf-8")
        host = get_node_ip_address()
        own = (
            *(f"node.id={self._node_id}", f"node.host={host}", f"transfer.tcp.host={host}"),
            *("node.port=0", "node.metrics_port=0"),
        )
        command = [sys.executable, "-m", "moonpool.node", "--role", self._role, "--config", str(file)]
        listen = host_port(host, free_port(host)) if self._hosts > 1 else ""
        for option in (*self._options, *own, f"engine.parallel.listen={listen}"):
            command += ["--set", option]
        # Its log is Ray's of this actor: `ray logs`.
        child = Child(self._node_id, command, directory / "log", environment=_ENVIRONMENT, sends_json=True)
        stop = asyncio.wrap_future(self._stopping)
        await child.start()
        self._listen = listen
        ready = asyncio.ensure_future(child.wait_ready(_READY_TIMEOUT_S))
        await asyncio.wait((ready, stop), return_when=asyncio.FIRST_COMPLETED)
        if stop.done():
            ready.cancel()
            await child.stop(self._drain_s + _STOP_TIMEOUT_S)
            return
        try:
            ready.result()
        except ChildFailed as failure:
            child.kill()
            await child.wait()
            self._reason, self._state = str(failure).partition("\n")[0], FAILED
            return
        self._state, self._has_served = RUNNING, True
        ended = asyncio.ensure_future(child.wait())
        await asyncio.wait((ended, stop), return_when=asyncio.FIRST_COMPLETED)
        if stop.done():
            await child.stop(self._drain_s + _STOP_TIMEOUT_S)
        else:
            print(f"{child.failure(f'ended with code {child.returncode}')}", file=sys.stderr, flush=True)


class RayRankHost:
    """The launcher of a node's ranks on another machine: starts all again when one ends, and follows the node
    to where that is started again."""

    def __init__(
        self, node_actor: str, namespace: str, name: str, toml: str, first: int, ranks: int, world_size: int
    ) -> None:
        """``node_actor``: the name of the ``RayNode``; ``name``: of this machine in logs. ``first``: of its
        ``ranks``, among ``world_size`` on all machines but the node's."""
        self._node_actor, self._namespace = node_actor, namespace
        self._name = name
        self._toml = toml
        self._environments = [
            {
                "RANK": str(first + local),
                "WORLD_SIZE": str(world_size),
                "LOCAL_RANK": str(local),
                "LOCAL_WORLD_SIZE": str(ranks),
            }
            for local in range(ranks)
        ]
        # See ``RayNode``.
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)
        self._thread.start()

    async def _run(self) -> None:
        leader = ""
        try:
            # Only this user reads it: it has the key.
            with tempfile.TemporaryDirectory(prefix="moonpool-", ignore_cleanup_errors=True) as directory:
                file = Path(directory) / "cluster.toml"
                file.write_text(self._toml, encoding="utf-8")
                while True:
                    while not (leader := await asyncio.to_thread(self._leader) or leader):  # noqa: ASYNC110
                        await asyncio.sleep(_LOOK_S)
                    await self._follow(leader, file)
        except Exception:
            # Whatever it is: Ray's log of this actor is told, and a new one starts afresh.
            traceback.print_exc()
        finally:
            os._exit(1)  # Ray makes a new one

    async def _follow(self, leader: str, file: Path) -> None:
        """Run the ranks for the node at ``leader`` until one ends, or the node listens elsewhere."""
        command = [
            sys.executable,
            "-m",
            "moonpool.engine.ranks.worker",
            "--leader",
            leader,
            "--config",
            str(file),
        ]
        for option in (f"node.id={self._name}", f"transfer.tcp.host={get_node_ip_address()}"):
            command += ["--set", option]
        # Their log is Ray's of this actor.
        children = [
            Child(self._name, command, None, environment=_ENVIRONMENT | environment)
            for environment in self._environments
        ]
        ends = []
        try:
            for child in children:
                await child.start()
                ends.append(asyncio.ensure_future(child.wait()))
            while await asyncio.to_thread(self._leader) in ("", leader):
                done, _ = await asyncio.wait(ends, timeout=_LOOK_S, return_when=asyncio.FIRST_COMPLETED)
                if done:
                    return
        finally:
            for child in children[: len(ends)]:
                child.kill()
            if ends:
                await asyncio.wait(ends)

    def _leader(self) -> str:
        """Return where the node listens; empty: it does not, or does not answer."""
        try:
            actor = ray.get_actor(self._node_actor, namespace=self._namespace)
            address: str = ray.get(actor.rank_address.remote(), timeout=_ANSWER_S)
        except (RayError, ValueError):
            return ""
        return address
