"""A client that begins a put, writes a part of it, says so, and never goes on: to be killed."""

from __future__ import annotations

import asyncio
import sys
import time

import numpy as np

from moonpool.kvstore.client.tenant import Tenant
from moonpool.kvstore.remote.object_store import RemoteStore
from moonpool.protos import store_pb2
from moonpool.runtime.config.options import TransferOptions
from moonpool.transfer import Span, TransferAgent, checksum


async def main(address: str, nbytes: int) -> None:
    tenant = Tenant()
    data = np.full(nbytes, 7, np.uint8)
    async with (
        await TransferAgent.start(TransferOptions(), agent_id="putter", epoch=1) as agent,
        RemoteStore("a", address, agent, deadline_s=60) as node,
    ):
        region = agent.register(data)
        info = store_pb2.ObjectInfo(
            key=tenant.key("half"),
            version=time.time_ns(),
            name="half",
            nbytes=nbytes,
            dtype="uint8",
            shape=[nbytes],
        )
        (step,), chunk_nbytes = await node.begin(tenant.owner, [info])
        half = len(step.chunks.offset) // 2
        ours = [Span(region.id, i * chunk_nbytes, chunk_nbytes) for i in range(half)]
        places = list(zip(step.chunks.region, step.chunks.offset, strict=True))[:half]
        await node.write(ours, places, [checksum(region.buffer[:chunk_nbytes])] * half)
        print("written", flush=True)
        await asyncio.sleep(3600)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
