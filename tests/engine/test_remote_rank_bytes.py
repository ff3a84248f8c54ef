"""A write to a rank that was given up lands in no other block."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from moonpool.engine.memory.remote_rank_bytes import RemoteRankBytes
from moonpool.kvstore.blocks.layout import KVLayout
from moonpool.kvstore.blocks.shards import BlockShard
from moonpool.kvstore.remote.sharded_reader import rank_memory
from moonpool.runtime.config.options import TransferOptions
from moonpool.transfer import DeadlineExceeded, Span, TransferAgent, WriteGrant, checksum
from tests.transfer.faults import Proxy

LAYOUT = KVLayout(num_layers=4, num_kv_heads=4, block_size=16, head_dim=32, dtype="float32")
NUM_BLOCKS = 16


async def test_a_write_that_was_given_up_changes_nothing_afterwards() -> None:
    options = TransferOptions(transports=("tcp",), checksum=False)
    async with (
        await TransferAgent.start(options, agent_id="leader", epoch=1) as leader,
        await TransferAgent.start(options, agent_id="rank", epoch=1) as rank,
    ):
        nbytes = NUM_BLOCKS * LAYOUT.block_nbytes
        pool, host = rank.allocate(nbytes, "pool"), leader.allocate(nbytes, "host")
        host.array[:] = 1
        grants: list[WriteGrant] = []

        async def grant(number: int) -> int:
            if grants:
                await grants[-1].end()
            grants.append(rank.grant_writes([Span(pool.id, 0, nbytes)]))
            return grants[-1].id

        cable = Proxy(rank.describe().tcp_port)
        descriptor = replace(rank.describe(), tcp_port=cable.port).pack()
        ranks = [rank_memory(BlockShard.whole(LAYOUT), descriptor, pool.id)]
        blocks = RemoteRankBytes(LAYOUT, leader, ranks, grant, lambda: None, deadline_s=60.0)
        sources = list(host.array.reshape(NUM_BLOCKS, -1))
        sums = [checksum(source.data) for source in sources]

        async def save() -> int | None:
            return await asyncio.to_thread(blocks.copy_in, sources, range(NUM_BLOCKS), sums)

        await leader.connect(replace(rank.describe(), tcp_port=cable.port))
        control = cable.forwarding()
        assert await save() is None
        assert (pool.array == 1).all()
        data = [thread for thread in cable.forwarding() if thread not in control]
        host.array[:] = 2
        sums = [checksum(source.data) for source in sources]
        cable.hold()
        blocks._deadline_s = 0.3
        with pytest.raises(DeadlineExceeded):
            await save()
        assert len(grants) == 2
        pool.array[:] = 9  # the blocks are others' now
        blocks._deadline_s = 60.0
        cable.release()
        while all(thread.is_alive() for thread in data):  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        assert (pool.array == 9).all()
        assert await save() is None, "under the new grant it goes on"
        assert np.array_equal(pool.array, host.array)
        await blocks.close()
        cable.close()
