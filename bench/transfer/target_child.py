"""The other process of the benchmark: an agent with a pool, and a plain socket server with the same memory.

Prints one line of JSON when it is ready and ends when its standard input does.
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys
import threading
import time
from contextlib import suppress

import uvloop

from moonpool.bench.transfer.device_memory import DeviceBuffer
from moonpool.bench.transfer.raw_sockets import serve_raw
from moonpool.runtime.config.options import TcpOptions, TransferOptions
from moonpool.transfer import AgentDescriptor, TransferAgent
from moonpool.transfer.native.cuda import load_cuda


async def main(transport: str, pool_nbytes: int, streams: int, slice_nbytes: int, busy: bool) -> None:
    # No other transport: "tcp" must be tcp, though both sides are on this host.
    tcp = TcpOptions(streams=streams, slice_nbytes=slice_nbytes)
    options = TransferOptions(transports=(transport,), tcp=tcp)
    async with await TransferAgent.start(options, agent_id="target", epoch=1) as agent:
        if transport == "cuda-ipc":
            pool = agent.register(DeviceBuffer(load_cuda(), pool_nbytes))
        else:
            pool = agent.allocate(pool_nbytes, "pool")
        listening = socket.create_server(("127.0.0.1", 0))
        memory = pool.buffer if pool.device is None else memoryview(bytearray(1))
        threading.Thread(target=serve_raw, args=(listening, memory), daemon=True).start()
        if busy:
            sys.setswitchinterval(0.0005)
            threading.Thread(target=_compute, daemon=True).start()
        facts = {
            "descriptor": agent.describe().pack().decode(),
            "region": pool.id,
            "raw_port": listening.getsockname()[1],
        }
        print(json.dumps(facts), flush=True)
        loop = asyncio.get_running_loop()
        stdin = asyncio.StreamReader()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(stdin), sys.stdin)
        echo = asyncio.create_task(_echo(agent, AgentDescriptor.unpack((await stdin.readline()).strip())))
        await stdin.read()
        echo.cancel()
        with suppress(asyncio.CancelledError):
            await echo


async def _echo(agent: TransferAgent, back: AgentDescriptor) -> None:
    """Return every note to where ``back`` says."""
    peer = await agent.connect(back)
    async for note in agent.notifications():
        peer.notify(note.payload)


def _compute() -> None:
    """Python that never lets go of the GIL by itself, as a model step does in parts."""
    until = time.monotonic() + 3600
    while time.monotonic() < until:
        sum(range(1000))


if __name__ == "__main__":
    transport, pool_nbytes, streams, slice_nbytes, busy = sys.argv[1:]
    uvloop.run(main(transport, int(pool_nbytes), int(streams), int(slice_nbytes), busy == "busy"))
