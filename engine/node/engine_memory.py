"""A node's engine and its blocks as peers read them: in one piece, or in parts with several ranks."""

from __future__ import annotations

from moonpool.engine.device.selection import choose_device
from moonpool.engine.engine import Engine
from moonpool.engine.memory.block_bytes import BlockBytes, DeviceBytes, HostBytes
from moonpool.engine.memory.block_memory import BlockMemory
from moonpool.engine.memory.remote_rank_bytes import RemoteRankBytes
from moonpool.engine.memory.shared_rank_bytes import SharedRankBytes
from moonpool.engine.ranks.group import RankGroup
from moonpool.engine.ranks.hosts.listener import HostListener
from moonpool.kvstore.blocks.shards import BlockShard
from moonpool.kvstore.remote.rank_reader import AgentReader, RankReader
from moonpool.kvstore.remote.sharded_reader import RankTarget, ShardedReader, rank_memory
from moonpool.kvstore.store import Bytes
from moonpool.protos import node_pb2
from moonpool.runtime.config.options import Config
from moonpool.runtime.service.load_progress import Progress
from moonpool.transfer import Region, TransferAgent


class EngineMemory:
    """``blocks``: the pool; ``ranks``: who holds which part of them, empty where they are whole."""

    def __init__(
        self,
        engine: Engine,
        blocks: BlockMemory,
        reader: ShardedReader,
        ranks: list[node_pb2.RankMemory],
    ) -> None:
        self.engine = engine
        self.blocks = blocks
        self.reader = reader
        self.ranks = ranks

    @classmethod
    async def open(
        cls, config: Config, agent: TransferAgent, progress: Progress, *, separate_pools: bool = False
    ) -> EngineMemory:
        """Start the engine. Raises what ``Engine.start`` raises; nothing is left of it then.

        ``separate_pools``: ranks share no memory with us though they could.
        """
        device = choose_device(config.model.device)
        model, options = config.model.directory, config.engine
        hosts = HostListener.from_options(options.parallel, agent.agent_id, config.transfer)
        region: Region | None = None
        if device.memory() is None:
            # Of the memory for all ranks, rank 0's is ours to allocate.
            shapes = Engine(model, options, config.model, device=device).rank_layouts
            share = options.host_pool_nbytes * shapes[0].block_nbytes // sum(s.block_nbytes for s in shapes)
            region = agent.allocate(max(share, 1), "pool")
        engine = Engine(
            model,
            options,
            config.model,
            device=device,
            pool_memory=None if region is None else region.array,
            hosts=hosts,
            separate_pools=separate_pools,
        )
        await _start(engine, progress)
        if region is None:
            region = agent.register(engine.pool_tensor, name="pool")
        if engine.ranks is None:
            bytes_: BlockBytes = (
                HostBytes(_pool(region.array, engine, 0))
                if device.memory() is None
                else DeviceBytes(engine.pool_tensor, device)
            )
            blocks = BlockMemory(engine.pool, region, engine.layout, bytes_)
            return cls(engine, blocks, _reader(engine, agent, region, blocks), [])
        try:
            return await cls._of_ranks(engine, engine.ranks, config, agent, region)
        except BaseException:
            await engine.close()
            raise

    @classmethod
    async def _of_ranks(
        cls, engine: Engine, group: RankGroup, config: Config, agent: TransferAgent, region: Region
    ) -> EngineMemory:
        agents = await group.start_agents(config.transfer, agent.agent_id, agent.epoch)
        shards = [BlockShard(shard.layers, shard.kv_heads) for shard in engine.shards]
        readers: list[RankReader] = [AgentReader(agent, region), *group.ranks]
        targets = [RankTarget(*pair) for pair in zip(shards, readers, strict=True)]
        places = [(agent.describe().pack(), region.id), *agents]
        ranks = [rank_memory(shard, *place) for shard, place in zip(shards, places, strict=True)]
        bytes_: BlockBytes
        if group.pools:
            pools = [_pool(memory, engine, rank) for rank, memory in enumerate([region.array, *group.pools])]
            bytes_ = SharedRankBytes(engine.layout, shards, pools)
        else:
            deadline_s = max(config.transfer.deadline_s, 2 * config.engine.parallel.timeout_s)
            bytes_ = RemoteRankBytes(engine.layout, agent, ranks, lambda: group.lost, deadline_s=deadline_s)
        blocks = BlockMemory(engine.pool, region, engine.layout, bytes_)
        return cls(engine, blocks, ShardedReader(engine.layout, targets, blocks.hash), ranks)


def _pool(memory: Bytes, engine: Engine, rank: int) -> Bytes:
    """uint8 [num_blocks, block_nbytes]: a rank's blocks, of the memory they begin."""
    num_blocks, nbytes = engine.pool.num_blocks, engine.rank_layouts[rank].block_nbytes
    return memory[: num_blocks * nbytes].reshape(num_blocks, nbytes)


async def _start(engine: Engine, progress: Progress) -> None:
    try:
        await engine.start(progress)
    except BaseException:
        await engine.close()
        raise


def _reader(engine: Engine, agent: TransferAgent, region: Region, blocks: BlockMemory) -> ShardedReader:
    """Of a node whose blocks are whole, from peers whose blocks are not."""
    whole = BlockShard.whole(engine.layout)
    return ShardedReader(engine.layout, [RankTarget(whole, AgentReader(agent, region))], blocks.hash)
