"""A second machine for the ranks of a local cluster's nodes, played on this one."""

from __future__ import annotations

import asyncio
import itertools
import os
import shutil
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from moonpool.runtime.config.options import Config
from moonpool.runtime.errors import ChildFailed, ConfigError
from moonpool.runtime.machine.gpus import computes_on_gpus
from moonpool.runtime.network.sockets import free_port
from moonpool.runtime.service.child import Child

NUM_HOSTS = 2
_NAME = "host-1"
_LOOPBACK = "127.0.0.1"
_COMMANDS = ("ip", "unshare", "nsenter")
_POLL_S = 0.01
_STOP_S = 5.0
_numbers = itertools.count()


class PlayedHost:
    """The second machine: a network namespace behind a cable of its own, where this process may make one;
    else it has our loopback address.

    near, far: the addresses of this machine and of that one. Memory and disks are those of this machine, but
    agents there find no memory of processes here to map: they use TCP.
    """

    def __init__(self, directory: Path) -> None:
        self.near = self.far = _LOOPBACK
        self._directory = directory
        self._holder: Child | None = None  # the namespace and its cable end with its processes
        self._within: tuple[str, ...] = ()  # before commands that run there

    async def open(self) -> str:
        """Make the machine; return what it is, as a sentence. Raises ChildFailed."""
        missing = [name for name in _COMMANDS if shutil.which(name) is None]
        if missing or os.geteuid() != 0:
            why = f"there is no {missing[0]}" if missing else "network namespaces need root"
            return f"the second machine has the loopback address of this one: {why}"
        holder = Child(_NAME, ["unshare", "--net", "sleep", "infinity"], self._directory / f"{_NAME}.log")
        await holder.start()
        self._holder = holder
        while _namespace(str(holder.pid)) == _namespace("self"):
            if holder.returncode is not None:
                raise holder.failure("could not make a network namespace")
            await asyncio.sleep(_POLL_S)
        cable, network = f"mpup{os.getpid()}-{next(_numbers)}", await self._free_network()
        self.near, self.far = f"{network}.253", f"{network}.254"
        there = self._within = ("nsenter", f"--net=/proc/{holder.pid}/ns/net")
        for command in (
            ("ip", "link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", str(holder.pid)),
            ("ip", "address", "add", f"{self.near}/30", "dev", cable),
            ("ip", "link", "set", cable, "up"),
            (*there, "ip", "address", "add", f"{self.far}/30", "dev", "eth0"),
            (*there, "ip", "link", "set", "lo", "up"),
            (*there, "ip", "link", "set", "eth0", "up"),
        ):
            await _output(*command)
        return f"the second machine, {self.far}, is the network namespace of process {holder.pid}"

    async def close(self) -> None:
        """Idempotent."""
        if self._holder is not None:
            await self._holder.stop(_STOP_S)

    @staticmethod
    async def _free_network() -> str:
        """Of those set aside for benchmarks."""
        taken = await _output("ip", "-4", "-oneline", "address")
        networks = (f"198.19.{(os.getpid() + number) % 256}" for number in range(256))
        return next(network for network in networks if f"{network}.25" not in taken)

    def cluster_config(self, config: Config) -> Config:
        """The configuration of a cluster whose nodes have ranks on both machines. Raises ConfigError."""
        parallel = config.engine.parallel
        others = config.cluster.engine != "moonpool" or config.fleet.provider == "ray"
        if parallel.dp > 1 or computes_on_gpus(config) or others:
            raise ConfigError(
                "a second machine is played for ranks on CPUs, of nodes on this one without replicas: leave "
                "out --hosts, or engine.parallel.dp, cluster.engine, Ray, or the GPUs (model.device=cpu)",
                "--hosts",
            )
        return replace(
            config,
            transfer=replace(config.transfer, tcp=replace(config.transfer.tcp, host=self.near)),
            engine=replace(config.engine, parallel=replace(parallel, trusted_network=True)),
        )

    def ranks_of(
        self, name: str, config: Config, file: Path, environment: Mapping[str, str]
    ) -> tuple[tuple[str, ...], Child]:
        """Options of the node ``name``, so that the second half of its stages is there, and the launcher of
        their ranks, not started. ``config``: of the node; ``file``: with the cluster's options."""
        leader = f"{self.near}:{free_port(self.near)}"
        command = [
            *(*self._within, sys.executable, "-m", "torch.distributed.run", "--standalone"),
            f"--nproc-per-node={config.engine.parallel.world_size // NUM_HOSTS}",
            *("--max-restarts=1000000", "--shutdown-timeout=1", "-m", "moonpool.engine.ranks.worker"),
            *("--leader", leader, "--config", str(file)),
            *("--set", f"node.id={_NAME}", "--set", f"transfer.tcp.host={self.far}"),
        ]
        log = self._directory / f"{name}-on-{_NAME}.log"
        options = (f"engine.parallel.hosts={NUM_HOSTS}", f"engine.parallel.listen={leader}")
        return options, Child(f"{name} on {_NAME}", command, log, environment=environment)


class NodeOverHosts(Child):
    """A node, and torchrun with its ranks on the second machine: they start and end together."""

    def __init__(self, launcher: Child, *arguments: Any, **words: Any) -> None:
        """``launcher``: torchrun's. The others: of the node, as for ``Child``."""
        super().__init__(*arguments, **words)
        self._launcher = launcher

    async def start(self) -> None:
        await self._launcher.stop(_STOP_S)
        await self._launcher.start()
        await super().start()

    async def stop(self, timeout_s: float) -> None:
        await super().stop(timeout_s)
        await self._launcher.stop(_STOP_S)

    def kill(self) -> None:
        super().kill()
        self._launcher.terminate()


def _namespace(process: str) -> str:
    return os.readlink(f"/proc/{process}/ns/net")


async def _output(*command: str) -> str:
    """Raises ChildFailed."""
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    output = (await process.communicate())[0].decode()
    if process.returncode:
        raise ChildFailed(" ".join(command), f"ended with code {process.returncode}: {output.strip()}")
    return output
