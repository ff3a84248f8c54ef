"""An agent in a process of its own, told what to do over stdin, one JSON line each way.

Arguments: transports, epoch, TCP port (0: any), cluster key, and anything to forbid process_vm_readv.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import uvloop

from moonpool.runtime.config.options import SecurityOptions, TcpOptions, TransferOptions
from moonpool.runtime.security import process
from moonpool.runtime.security.roles import Caller
from moonpool.transfer import AgentDescriptor, Span, TransferAgent, TransferError, agent_memory, checksum
from moonpool.transfer.copying import peer_memory
from moonpool.transfer.memory.region import Region
from moonpool.transfer.native.cuda import load_cuda
from tests.transfer.device import DeviceRegion

REGION_NBYTES = 8 << 20


def pattern(nbytes: int, seed: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


class PeerProcess:
    def __init__(self, agent: TransferAgent) -> None:
        self.agent = agent
        self.regions: dict[int, Region | DeviceRegion] = {}

    async def allocate(self, nbytes: int, seed: int, writable: bool = True) -> dict[str, Any]:
        assert writable
        return self.add(self.agent.allocate(nbytes, "peer"), seed)

    async def allocate_on_device(self, nbytes: int, seed: int, writable: bool = True) -> dict[str, Any]:
        return self.add(DeviceRegion(self.agent, nbytes, writable=writable), seed)

    def add(self, region: Region | DeviceRegion, seed: int) -> dict[str, Any]:
        region.array[:] = pattern(region.nbytes, seed)
        self.agent.allow_writes(region if isinstance(region, Region) else region.region)
        self.regions[region.id] = region
        return {"region": region.id}

    async def register(self, nbytes: int, seed: int, writable: bool = True) -> dict[str, Any]:
        memory = pattern(nbytes, seed)
        memory.flags.writeable = writable
        region = self.agent.register(memory, writable=writable)
        self.agent.allow_writes(region)
        self.regions[region.id] = region
        return {"region": region.id}

    async def close_region(self, region: int) -> dict[str, Any]:
        self.regions.pop(region).close()
        return {}

    async def close_regions(self) -> dict[str, Any]:
        for region in list(self.regions):
            await self.close_region(region)
        return {}

    async def checksum(self, region: int, offset: int, nbytes: int) -> dict[str, Any]:
        return {"checksum": checksum(self.regions[region].buffer[offset : offset + nbytes])}

    async def num_foreign(self, region: int, seed: int, value: int) -> dict[str, Any]:
        """How many bytes are neither as allocated nor ``value``."""
        array = self.regions[region].array
        return {"num_foreign": int(((array != pattern(len(array), seed)) & (array != value)).sum())}

    async def move(
        self,
        descriptor: str,
        direction: str,
        local: int,
        remote: int,
        nbytes: int,
        deadline_s: float,
        **more: Any,
    ) -> dict[str, Any]:
        """The first ``nbytes`` of one region and the other's, by MiB: what it came to, and after how long."""
        peer = await self.agent.connect(AgentDescriptor.unpack(bytes.fromhex(descriptor)))
        ours, theirs = (
            [Span(region, at, 1 << 20) for at in range(0, nbytes, 1 << 20)] for region in (local, remote)
        )
        started = time.perf_counter()
        try:
            report = await getattr(peer, direction)(ours, theirs, deadline_s=deadline_s, **more)
        except TransferError as error:
            return {"outcome": type(error).__name__, "seconds": time.perf_counter() - started}
        return {"outcome": "done", "seconds": report.seconds, "transport": report.transport}

    async def poke(self, region: int, offset: int, value: int) -> dict[str, Any]:
        self.regions[region].array[offset] = value
        return {}

    async def next_note(self) -> dict[str, Any]:
        note = await anext(self.agent.notifications())
        return {"agent_id": note.agent_id, "payload": note.payload.decode()}

    async def echo_notes(self, descriptor: str) -> dict[str, Any]:
        """Send each note back to where ``descriptor`` says."""
        peer = await self.agent.connect(AgentDescriptor.unpack(bytes.fromhex(descriptor)))

        async def echo() -> None:
            async for note in self.agent.notifications():
                peer.notify(note.payload)

        self.echo = asyncio.create_task(echo())
        return {}

    async def drained(self, num_streams: int) -> dict[str, Any]:
        """Wait until no more data connections are served than those ``num_streams`` that are still wanted."""
        async with asyncio.timeout(20):
            while len(self.agent._server) > num_streams:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        return {}

    async def count_threads(self) -> dict[str, Any]:
        return {"threads": threading.active_count()}

    async def read_device(self, descriptor: str, region: int) -> dict[str, Any]:
        """Read the beginning of another agent's region into the first one here."""
        peer = await self.agent.connect(AgentDescriptor.unpack(bytes.fromhex(descriptor)))
        ours = next(iter(self.regions))
        await peer.read([Span(ours, 0, 64)], [Span(region, 0, 64)], deadline_s=5)
        return {}

    async def close_agent(self) -> dict[str, Any]:
        await self.agent.close()
        self.regions.clear()
        return {}

    async def count_device_memory(self) -> dict[str, Any]:
        """Allocations of the stand-in for the CUDA runtime, in this process."""
        values = (ctypes.c_long * 5)()
        ctypes.CDLL(load_cuda().path).stand_in_counts(values)
        return {"allocations": values[0]}

    async def check(self) -> dict[str, Any]:
        # A server thread releases its hold just after the last byte of its reply.
        while self.agent.regions._holds:  # noqa: ASYNC110
            await asyncio.sleep(0)
        self.agent.regions.check_integrity()
        self.agent.grants.check_integrity()
        return {}


def forbid_process_vm_readv() -> None:
    """As on a host where the right is missing. (It cannot be taken away from root for real.)"""
    peer_memory.readable_process = lambda *_: None  # type: ignore[assignment]
    agent_memory.readable_by_peers = lambda: False


def use_security(secret: str) -> None:
    """With the node's files in the directory ``TLS_DIR``, where the environment names one."""
    if (directory := os.environ.get("TLS_DIR", "")) or secret:
        process.use(process.Security(security_options(directory, secret), Caller("node", "peer")))


def security_options(directory: Path | str, secret: str = "", name: str = "node-n") -> SecurityOptions:
    if not directory:
        return SecurityOptions(cluster_key=secret)
    return SecurityOptions(
        secret, f"{directory}/{name}.pem", f"{directory}/{name}.key", f"{directory}/ca.pem"
    )


def tcp_options() -> TcpOptions:
    """At the addresses in ``TCP_HOSTS``, where the environment names some."""
    host, *rails = os.environ.get("TCP_HOSTS", "127.0.0.1").split(",")
    return TcpOptions(host=host, rails=tuple(rails))


def listen_at(port: int) -> None:
    """At the address of an agent that was here before."""
    bind = socket.create_server
    socket.create_server = lambda address, **more: bind((address[0], port), **more)  # type: ignore


async def main(transports: str, epoch: str, port: str, secret: str, forbid: str) -> None:
    if forbid:
        forbid_process_vm_readv()
    names = tuple(transports.split(","))
    use_security(secret)
    options = TransferOptions(transports=names, tcp=tcp_options())
    if int(port):
        listen_at(int(port))
    async with await TransferAgent.start(options, agent_id="peer", epoch=int(epoch)) as agent:
        peer = PeerProcess(agent)
        print(agent.describe().pack().decode(), flush=True)
        loop = asyncio.get_running_loop()
        stdin = asyncio.StreamReader()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(stdin), sys.stdin)
        while line := await stdin.readline():
            command = json.loads(line)
            answer = await getattr(peer, command.pop("do"))(**command)
            print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    uvloop.run(main(*sys.argv[1:]))
