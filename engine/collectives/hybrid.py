"""One link out of two: memory within a machine, torch.distributed between machines."""

from __future__ import annotations

from torch import Tensor

from moonpool.engine.collectives.shm import ShmLink
from moonpool.engine.collectives.torch_distributed import TorchLink
from moonpool.engine.sharding.parallel_plan import Shard


class HybridLink:
    """See ``Link``. Whole stages are on one machine, so what the ranks of a stage exchange stays there."""

    def __init__(self, near: ShmLink, far: TorchLink, shard: Shard, stages_per_machine: int) -> None:
        self._near = near
        self._far = far
        stage, n = shard.stage, stages_per_machine
        self._next: ShmLink | TorchLink = near if (stage + 1) % n else far
        self._before: ShmLink | TorchLink = near if stage % n else far
        self._leader: ShmLink | TorchLink = near if shard.pp == n else far
        self.all_reduce = near.all_reduce
        self.all_gather = near.all_gather
        self.reduce_scatter = near.reduce_scatter
        self.all_to_all = near.all_to_all
        self.exchange_cp = near.exchange_cp

    def send(self, hidden: Tensor) -> None:
        self._next.send(hidden)

    def receive(self, num_tokens: int) -> Tensor:
        return self._before.receive(num_tokens)

    def gather(self, logits: Tensor | None, num_rows: int) -> Tensor | None:
        return self._leader.gather(logits, num_rows)

    def close(self) -> None:
        self._near.close()
        self._far.close()
