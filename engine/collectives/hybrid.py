"""A link of two: shared memory within a machine, torch.distributed between machines."""

from __future__ import annotations

from moonpool.engine.collectives.shm import ShmLink
from moonpool.engine.collectives.torch_distributed import TorchLink
from moonpool.engine.sharding.parallel_plan import Shard


class HybridLink:
    """See ``Link``. Each stage is on one machine, so exchanges within a stage use shared memory."""

    def __init__(self, local: ShmLink, remote: TorchLink, shard: Shard, stages_per_machine: int) -> None:
        self._links = local, remote
        stage, n = shard.stage, stages_per_machine
        self.send = (local if (stage + 1) % n else remote).send
        self.receive = (local if stage % n else remote).receive
        self.gather = (local if shard.pp == n else remote).gather
        self.all_reduce = local.all_reduce
        self.all_gather = local.all_gather
        self.reduce_scatter = local.reduce_scatter
        self.all_to_all = local.all_to_all
        self.gather_cp = local.gather_cp
        self.scatter_cp = local.scatter_cp

    def serve(self) -> None:
        for link in self._links:
            link.serve()

    def close(self) -> None:
        for link in self._links:
            link.close()
