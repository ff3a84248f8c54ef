"""The other process: an agent with a pool, and a plain socket server with the same memory."""

from __future__ import annotations

import asyncio
import socket
import sys
import threading
import time
from typing import Any

import uvloop

from moonpool.bench.transfer.device_memory import DeviceBuffer
from moonpool.bench.transfer.raw_sockets import serve_raw
from moonpool.runtime.config.options import SecurityOptions, TcpOptions, TransferOptions
from moonpool.runtime.security import process
from moonpool.runtime.security.roles import NODE, Caller
from moonpool.transfer import AgentDescriptor, Peer, TransferAgent
from moonpool.transfer.native.cuda import load_cuda

new_event_loop = uvloop.new_event_loop


class Target:
    """busy: a thread computes in Python meanwhile. security: ``SecurityOptions``; None: as this user's.

    ``ready``: descriptor, region, and the sockets' port.
    """

    def __init__(
        self,
        path: str,
        pool_nbytes: int,
        streams: int,
        slice_nbytes: int,
        busy: bool,
        security: dict[str, Any] | None = None,
    ) -> None:
        if security is not None:
            process.use(process.Security(SecurityOptions(**security), Caller(NODE, "target")))
        # No other path: "tcp" must be TCP, though both sides are on this host.
        tcp = TcpOptions(streams=streams, slice_nbytes=slice_nbytes)
        self._options = TransferOptions(transports=(path,), tcp=tcp)
        self._on_device = path == "cuda-ipc"
        self._pool_nbytes = pool_nbytes
        self._busy = busy
        self.ready: dict[str, Any] = {}

    async def start(self) -> None:
        self._agent = agent = await TransferAgent.start(self._options, agent_id="target", epoch=1)
        if self._on_device:
            pool = agent.register(DeviceBuffer(load_cuda(), self._pool_nbytes))
        else:
            pool = agent.allocate(self._pool_nbytes, "pool")
        agent.allow_writes(pool)
        listening = socket.create_server(("127.0.0.1", 0))
        memory = pool.buffer if pool.device is None else memoryview(bytearray(1))
        threading.Thread(target=serve_raw, args=(listening, memory), daemon=True).start()
        if self._busy:
            sys.setswitchinterval(0.0005)
            threading.Thread(target=_compute, daemon=True).start()
        self.ready = {
            "descriptor": agent.describe().pack().decode(),
            "region": pool.id,
            "raw_port": listening.getsockname()[1],
        }

    async def echo_to(self, descriptor: str) -> None:
        """Connect to this agent, and return every notification to it from then on."""
        # Before the answer: the other side then allocates its pools, during which it takes no connection.
        peer = await self._agent.connect(AgentDescriptor.unpack(descriptor.encode()))
        self._echo = asyncio.create_task(self._return(peer))

    async def _return(self, peer: Peer) -> None:
        async for note in self._agent.notifications():
            peer.notify(note.payload)

    async def close(self) -> None:
        await self._agent.close()


def _compute() -> None:
    """Python that does not give the GIL up by itself, as parts of a model step."""
    until = time.monotonic() + 3600
    while time.monotonic() < until:
        sum(range(1000))
