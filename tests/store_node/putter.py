"""A client that begins a put, writes a part of it, says so, and never goes on: to be killed.

``late``: it stops itself, and writes the rest when it is continued.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys

import numpy as np

from moonpool.kvstore.client.tenant import Tenant
from moonpool.kvstore.remote.object_store import RemoteStore
from moonpool.protos import store_pb2
from moonpool.runtime.config.options import TransferOptions
from moonpool.transfer import Span, TransferAgent, TransferError, checksum


async def main(address: str, nbytes: int, late: bool) -> None:
    tenant = Tenant()
    data = np.full(nbytes, 7, np.uint8)
    async with (
        await TransferAgent.start(TransferOptions(checksum=False), agent_id="putter", epoch=1) as agent,
        RemoteStore("a", address, agent, deadline_s=60) as node,
    ):
        region = agent.register(data)
        info = store_pb2.ObjectInfo(
            key=tenant.key("half"),
            storage=7,
            name="half",
            nbytes=nbytes,
            dtype="uint8",
            shape=[nbytes],
        )
        reply, held = await node.begin(tenant.owner, [info])
        (step,), chunk_nbytes = reply.steps, reply.chunk_nbytes
        half = len(step.chunks.offset) // 2
        ours = [Span(region.id, i * chunk_nbytes, chunk_nbytes) for i in range(half)]
        places = list(zip(step.chunks.region, step.chunks.offset, strict=True))
        sums = [checksum(region.buffer[:chunk_nbytes])] * half
        await node.write(ours, places[:half], sums, reply.write_grant, held)
        print("written", flush=True)
        if late:
            os.kill(os.getpid(), signal.SIGSTOP)
            theirs = [Span(*place, chunk_nbytes) for place in places[half : 2 * half]]
            peer = await node.peer()
            for write in (
                node.write(ours, places[half : 2 * half], sums, reply.write_grant, held),
                # As a client does that does not look at the time.
                peer.write(ours, theirs, deadline_s=30, grant=reply.write_grant),
            ):
                try:
                    await write
                    print("written", flush=True)
                except TransferError as error:
                    print(type(error).__name__, flush=True)
        await asyncio.sleep(3600)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), "late" in sys.argv))
