"""A node's engine and its blocks for peers: whole, or in parts on several ranks."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from moonpool.engine.engine import Engine
from moonpool.engine.memory.block_bytes import BlockBytes, DeviceBytes, HostBytes, device_checksums
from moonpool.engine.memory.block_memory import BlockMemory
from moonpool.engine.memory.remote_rank_bytes import RemoteRankBytes
from moonpool.engine.memory.shared_rank_bytes import SharedRankBytes
from moonpool.engine.ranks.group import RankGroup
from moonpool.engine.ranks.rank_listener import RankListener
from moonpool.engine.setup import EngineSetup
from moonpool.engine.sharding.expert_placement import ExpertPlacement
from moonpool.kvstore.blocks.shards import BlockShard
from moonpool.kvstore.remote.rank_reader import AgentReader, RankReader
from moonpool.kvstore.remote.sharded_reader import RankTarget, ShardedReader, rank_memory
from moonpool.kvstore.store import Bytes
from moonpool.protos import node_pb2
from moonpool.runtime.config.options import Config
from moonpool.runtime.service.load_progress import Progress
from moonpool.transfer import Region, Span, TransferAgent


@dataclass(slots=True)
class EngineMemory:
    """``blocks``: the pool. ``ranks``: each rank's part of the blocks; empty where they are whole."""

    engine: Engine
    blocks: BlockMemory
    reader: ShardedReader
    ranks: list[node_pb2.RankMemory]

    @classmethod
    async def open(
        cls,
        config: Config,
        agent: TransferAgent,
        progress: Progress,
        *,
        separate_pools: bool = False,
        decodes: bool = True,
        kept_experts: Callable[[EngineSetup], Awaitable[ExpertPlacement | None]] | None = None,
    ) -> EngineMemory:
        """Start the engine. Raises as ``Engine.start``; the engine is closed then.

        ``separate_pools``: see ``RankGroup``. ``decodes``: see ``EngineSetup.choose``. ``kept_experts``: the
        placement to begin with, where the plan distributes experts.
        """
        model, options = config.model.directory, config.engine
        setup = EngineSetup.choose(model, options, config.model, None, decodes=decodes)
        experts = await kept_experts(setup) if kept_experts is not None and setup.plan.ep > 1 else None
        region: Region | None = None
        if setup.device.memory() is None:
            # Allocate rank 0's part of the memory for all ranks.
            layouts = setup.rank_layouts
            nbytes = (
                options.host_pool_nbytes * layouts[0].block_nbytes // sum(s.block_nbytes for s in layouts)
            )
            region = agent.allocate(max(nbytes, 1), "pool", mapped=False)
        engine = Engine(
            model,
            options,
            config.model,
            device=setup.device,
            pool_memory=None if region is None else region.array,
            listener=RankListener.from_options(options.parallel, agent.agent_id),
            separate_pools=separate_pools,
            decodes=decodes,
            experts=experts,
        )
        try:
            await engine.start(progress)
            if region is None:
                hasher = device_checksums(engine.pool_tensor, setup.device)
                region = agent.register(engine.pool_tensor, name="pool", checksums=hasher)
            if engine.ranks is not None:
                return await cls._of_ranks(engine, engine.ranks, config, agent, region)
        except BaseException:
            await engine.close()
            raise
        bytes_: BlockBytes
        if setup.device.memory() is None:
            bytes_ = HostBytes(_pool(region.array, engine, 0))
        else:
            bytes_ = DeviceBytes(engine.pool_tensor, setup.device)
        blocks = BlockMemory(engine.pool, region, engine.layout, bytes_)
        # Peers may have their blocks in parts.
        whole = RankTarget(BlockShard.whole(engine.layout), AgentReader(agent, region))
        return cls(engine, blocks, ShardedReader(engine.layout, [whole], blocks.hash), [])

    @classmethod
    async def _of_ranks(
        cls, engine: Engine, group: RankGroup, config: Config, agent: TransferAgent, region: Region
    ) -> EngineMemory:
        agents = await group.start_agents(config.transfer, agent.agent_id, agent.epoch)
        shards = [BlockShard(shard.layers, shard.kv_heads) for shard in engine.shards]
        cp_ranks = [shard.cp_rank for shard in engine.shards]
        readers: list[RankReader] = [AgentReader(agent, region), *group.ranks]
        targets = [RankTarget(*each) for each in zip(shards, readers, cp_ranks, strict=True)]
        regions = [(agent.describe().pack(), region.id), *agents]
        ranks = [
            rank_memory(shard, *where, cp_rank)
            for shard, where, cp_rank in zip(shards, regions, cp_ranks, strict=True)
        ]
        bytes_: BlockBytes
        if group.pools:
            pools: list[list[Bytes]] = [[] for _ in range(engine.plan.cp)]
            for rank, memory in enumerate([region.array, *group.pools]):
                pools[cp_ranks[rank]].append(_pool(memory, engine, rank))
            of_first = [shard for shard, cp_rank in zip(shards, cp_ranks, strict=True) if cp_rank == 0]
            bytes_ = SharedRankBytes(engine.layout, of_first, pools)
        else:
            deadline_s = max(config.transfer.deadline_s, 2 * config.engine.parallel.timeout_s)
            own = agent.grant_writes([Span(region.id, 0, region.nbytes)]).id

            async def grant(rank: int) -> int:
                # Writes within this process are never late.
                return await group.ranks[rank - 1].grant() if rank else own

            bytes_ = RemoteRankBytes(
                engine.layout, agent, ranks, grant, lambda: group.lost, deadline_s=deadline_s
            )
        blocks = BlockMemory(engine.pool, region, engine.layout, bytes_)
        return cls(engine, blocks, ShardedReader(engine.layout, targets, blocks.hash), ranks)


def _pool(memory: Bytes, engine: Engine, rank: int) -> Bytes:
    """Return a rank's blocks at the start of ``memory``: uint8 [num_blocks, block_nbytes]."""
    num_blocks, nbytes = engine.pool.num_blocks // engine.plan.cp, engine.rank_layouts[rank].block_nbytes
    return memory[: num_blocks * nbytes].reshape(num_blocks, nbytes)
