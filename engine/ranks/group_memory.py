"""Memory that the ranks of a group share: board, exchange buffers, pools, expert load."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch._C._distributed_c10d import TCPStore

from moonpool.engine.checkpoint.config import ModelConfig
from moonpool.engine.collectives.board import SharedBoard, SharedMemory
from moonpool.engine.device.selection import page_dtype
from moonpool.engine.experts.load import ExpertLoad
from moonpool.engine.memory.packing import Packing
from moonpool.engine.ranks.assignment import Assignment
from moonpool.engine.ranks.link_factory import exchange_shape, open_store
from moonpool.engine.ranks.step_message import payload_nbytes
from moonpool.runtime.network.sockets import host_port


class GroupMemory:
    """The leader's memory for one loaded model. ``assignments``: one per rank, with the paths of this memory.

    pools: of ranks 1 and up; empty with separate pools. expert_load: None for models without experts.
    shape: of the board and the exchange memory, for other machines.
    ``uncounted``: load of remote ranks to subtract, [world_size - 1, num_layers, num_experts].
    """

    def __init__(
        self,
        config: ModelConfig,
        leader: Assignment,
        timeout_s: float,
        *,
        separate_pools: bool,
    ) -> None:
        """``leader``: rank 0's assignment, without paths."""
        plan, options = leader.plan, leader.options
        self._store: TCPStore | None = None
        if leader.link != "shm":
            self._store = open_store(leader.address)
            leader = replace(leader, store=host_port(self._store.host, self._store.port))
        max_blocks = -(-leader.max_len // options.block_size)
        payload = payload_nbytes(
            max_tokens=options.max_batch_tokens,
            max_rows=leader.max_rows,
            max_blocks=max_blocks,
            has_places=Packing.of(config.windows) is not None,
        )
        self.board = SharedBoard.create(plan.world_size, payload, timeout_s)
        exchange = SharedMemory.create(
            "exchange", plan.world_size * exchange_shape(leader, config).rank_nbytes
        )
        self._memories = [exchange]
        self.pools: list[SharedMemory] = []
        self.expert_load: ExpertLoad | None = None
        self.uncounted: torch.Tensor | None = None
        self.shape = {
            "world_size": plan.world_size,
            "payload_nbytes": payload,
            "exchange_nbytes": exchange.array.nbytes,
            "timeout_s": timeout_s,
        }
        leader = replace(leader, board=self.board.path, exchange=exchange.path)
        if config.moe is not None:
            load = SharedMemory.create("expert-load", ExpertLoad.nbytes(config, plan.world_size))
            self._memories.append(load)
            self.expert_load = ExpertLoad(config, load.array, plan.world_size)
            if not separate_pools:
                leader = replace(leader, expert_load=load.path)
        self.assignments = [replace(leader, rank=rank) for rank in range(plan.world_size)]
        if separate_pools:
            return
        assert leader.num_blocks is not None, "only GPUs are asked how many fit, and they share no pools"
        pages = page_dtype(options, leader.dtype)
        for rank in range(1, plan.world_size):
            layout = plan.shard(config, rank).layout(config, options.block_size, pages)
            pool = SharedMemory.create(f"pool-{rank}", leader.num_blocks * layout.block_nbytes)
            self.pools.append(pool)
            self.assignments[rank] = replace(self.assignments[rank], pool=pool.path)

    def set_remote_load(self, found: list[list[list[int]]]) -> None:
        """Store the tables of all ranks but 0, which they counted without shared memory."""
        assert self.expert_load is not None
        tables = torch.tensor(found, dtype=torch.int64)
        self.expert_load.tables[1:] = tables if self.uncounted is None else tables - self.uncounted

    def close(self) -> None:
        for memory in [*self._memories, *self.pools]:
            memory.close()
        self.board.close()
