"""A node's engine and its blocks as peers read them: in one piece, on a GPU, or in parts with several
ranks."""

from __future__ import annotations

from engine.block_bytes import DeviceBytes, HostBytes
from engine.block_memory import BlockMemory
from engine.dtype import choose_device
from engine.engine import Engine
from engine.parallel.rank_hosts import RankHosts
from engine.parallel.sharded_bytes import ShardedBytes
from kvstore.rank_reader import AgentReader, RankReader
from kvstore.sharded_reader import RankTarget, ShardedReader, rank_memory
from kvstore.shards import BlockShard
from protos import node_pb2
from runtime.errors import ConfigError
from runtime.load_progress import Progress
from runtime.options import Config
from transfer import Region, TransferAgent


class NodeMemory:
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
    async def open(cls, config: Config, agent: TransferAgent, progress: Progress) -> NodeMemory:
        """Start the engine. Raises what ``Engine.start`` raises; nothing is left of it then."""
        device = choose_device(config.model.device)
        model, options = config.model.directory, config.engine
        hosts = RankHosts.of(options.parallel, agent.agent_id, config.transfer)
        if device.memory() is not None:
            if options.parallel.tp * options.parallel.pp * options.parallel.cp > 1:
                raise ConfigError(
                    "engine.parallel: the ranks of a node share main memory; on a GPU a node has one rank",
                    "engine.parallel.tp",
                )
            engine = Engine(model, options, config.model, device=device, hosts=hosts)
            await _start(engine, progress)
            region = agent.register(engine.pool_tensor, name="pool")
            tensor = engine.pool_tensor
            blocks = BlockMemory(engine.pool, region, engine.layout, DeviceBytes(tensor, device))
            return cls(engine, blocks, _reader(engine, agent, region, blocks), [])
        # Of the memory for all ranks, rank 0's is ours to allocate.
        shapes = Engine(model, options, config.model, device=device).rank_layouts
        share = options.host_pool_nbytes * shapes[0].block_nbytes // sum(s.block_nbytes for s in shapes)
        region = agent.allocate(max(share, 1), "pool")
        engine = Engine(model, options, config.model, device=device, pool_memory=region.array, hosts=hosts)
        await _start(engine, progress)
        num_blocks = engine.pool.num_blocks
        memories = [region.array, *(engine.ranks.pools if engine.ranks is not None else ())]
        pools = [
            memory[: num_blocks * layout.block_nbytes].reshape(num_blocks, layout.block_nbytes)
            for memory, layout in zip(memories, engine.rank_layouts, strict=True)
        ]
        if engine.ranks is None:
            blocks = BlockMemory(engine.pool, region, engine.layout, HostBytes(pools[0]))
            return cls(engine, blocks, _reader(engine, agent, region, blocks), [])
        try:
            agents = await engine.ranks.start_agents(config.transfer, agent.agent_id, agent.epoch)
        except BaseException:
            await engine.close()
            raise
        shards = [BlockShard(shard.layers, shard.kv_heads) for shard in engine.shards]
        readers: list[RankReader] = [AgentReader(agent, region), *engine.ranks.ranks]
        targets = [RankTarget(*pair) for pair in zip(shards, readers, strict=True)]
        places = [(agent.describe().pack(), region.id), *agents]
        ranks = [rank_memory(shard, *place) for shard, place in zip(shards, places, strict=True)]
        blocks = BlockMemory(engine.pool, region, engine.layout, ShardedBytes(engine.layout, shards, pools))
        return cls(engine, blocks, ShardedReader(engine.layout, targets, blocks.hash), ranks)


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
