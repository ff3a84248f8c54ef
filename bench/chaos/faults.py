"""The faults that a run injects, one after the other."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from urllib.parse import urlsplit

from moonpool.bench.chaos.disk import LoopDisk
from moonpool.bench.chaos.sockets import cut_connections
from moonpool.local.cluster import LocalCluster
from moonpool.runtime.errors import MoonpoolError
from moonpool.runtime.failures import FailureClass

# A fault gets the run's randomness, is over when it returns, and says what it did.
Fault = Callable[[random.Random], Awaitable[str]]


class FaultFailed(MoonpoolError):
    """A fault could not be injected, or the cluster did not recover its process."""

    failure = FailureClass.WORKER


class ClusterFaults:
    """Faults of a local cluster's processes, connections and disk.

    The cluster must not restart its children itself. Each fault leaves every process running.
    """

    def __init__(self, cluster: LocalCluster, disk: LoopDisk | None) -> None:
        self._cluster = cluster
        self._disk = disk
        self._api_port = urlsplit(cluster.url).port or 0

    def faults(self) -> dict[str, Fault]:
        """By name. Those of the disk are missing without one."""
        found: dict[str, Fault] = {
            "kill node": lambda rng: self.kill(self._node(rng), 0.0),
            "stop node": lambda rng: self.stop(self._node(rng), rng.uniform(0.5, 6.0)),
            "kill redis": lambda rng: self.kill("redis", rng.uniform(0.0, 4.0)),
            "stop redis": lambda rng: self.stop("redis", rng.uniform(0.5, 6.0)),
            "cut links": self._cut,
        }
        if self._disk is not None:
            found |= {"full disk": self._fill, "stalled disk": self._stall}
        return found

    async def restart_ended(self) -> list[str]:
        """Restart what ended by itself; returns a sentence for each."""
        sentences = []
        for name, child in self._cluster.children.items():
            if child.returncode is not None:
                sentences.append(f"{name} ended by itself with code {child.returncode} ({child.log})")
                await self._cluster.restart(name)
        return sentences

    def _node(self, rng: random.Random) -> str:
        return rng.choice(self._cluster.nodes).name

    async def kill(self, name: str, down_s: float) -> str:
        """End a child by SIGKILL; start it again ``down_s`` later."""
        child = self._cluster.children[name]
        began_s = time.monotonic()
        os.kill(child.pid, signal.SIGKILL)
        await child.wait()
        await asyncio.sleep(down_s)
        await self._cluster.restart(name)
        return f"killed {name}; ready again after {time.monotonic() - began_s:.1f} s"

    async def stop(self, name: str, seconds: float) -> str:
        """Stop a child by SIGSTOP for so long."""
        await self.stop_process(self._cluster.children[name].pid, seconds)
        return f"stopped {name} for {seconds:.1f} s"

    async def stop_process(self, pid: int, seconds: float) -> None:
        """Stop a process of a node by SIGSTOP for so long. It may end meanwhile."""
        os.kill(pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(seconds)
        finally:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    async def _cut(self, rng: random.Random) -> str:
        name = rng.choice(["conductor", *(node.name for node in self._cluster.nodes)])
        pid = int(self._cluster.children[name].ready["pid"])
        num_cut = cut_connections(pid, except_port=self._api_port)
        return f"cut {num_cut} connections of {name}"

    async def _fill(self, rng: random.Random) -> str:
        assert self._disk is not None
        nbytes, seconds = self._disk.fill(), rng.uniform(1.0, 5.0)
        try:
            await asyncio.sleep(seconds)
        finally:
            self._disk.empty()
        return f"filled the last {nbytes >> 20} MiB of the disk for {seconds:.1f} s"

    async def _stall(self, rng: random.Random) -> str:
        assert self._disk is not None
        seconds = rng.uniform(0.5, 3.0)
        await self._disk.stall(seconds)
        return f"stalled the disk for {seconds:.1f} s"


def command_faults(commands: Mapping[str, str]) -> dict[str, Fault]:
    """Faults that are shell commands of the operator: name to command. A fault is over when it ends.

    Raises when called:
        FaultFailed: the command ended with another code than 0.
    """

    def of(name: str, command: str) -> Fault:
        async def fault(_: random.Random) -> str:
            process = await asyncio.create_subprocess_shell(command)
            if code := await process.wait():
                raise FaultFailed(f"the command of fault {name!r} ended with code {code}: {command}")
            return command

        return fault

    return {name: of(name, command) for name, command in commands.items()}
