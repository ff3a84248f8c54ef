"""A rank's assignment, and the check that a started rank fits its group."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch

from moonpool.engine.checkpoint.config import ModelConfig
from moonpool.engine.errors import RankRefused
from moonpool.engine.execution.logit_rows import LOGIT_ROWS
from moonpool.engine.sharding.expert_placement import ExpertPlacement
from moonpool.engine.sharding.parallel_plan import ParallelPlan, Shard
from moonpool.runtime.config.engine_options import SpeculativeOptions
from moonpool.runtime.config.options import (
    EngineOptions,
    ParallelOptions,
    TcpOptions,
    TransferOptions,
)


@dataclass(frozen=True, slots=True)
class Assignment:
    """One rank's part in a group, as one line of JSON.

    board, exchange, pool, expert_load: paths of memory that the leader created. Without a pool the rank
    creates its own and is asked for its expert load. store: host:port of torch.distributed's rendezvous,
    empty for shm. address: of this rank's machine for others; empty with one machine.
    """

    rank: int
    model: str
    dtype: str
    device: str
    link: str
    options: EngineOptions
    model_len: int  # longest sequence of the model and its options; max_len: also of the pool
    num_blocks: int | None  # of each rank; None: on GPUs, as many as fit on each of them
    max_len: int
    first_device: int = 0  # of the node's GPUs on each machine
    experts: dict[str, object] | None = None  # ``asdict`` of an ExpertPlacement
    board: str = ""
    exchange: str = ""
    pool: str = ""
    expert_load: str = ""
    store: str = ""
    address: str = ""

    @property
    def plan(self) -> ParallelPlan:
        experts = ExpertPlacement.unpack(self.experts) if self.experts else None
        return ParallelPlan.of_sizes(self.options.parallel, experts)

    @property
    def max_rows(self) -> int:
        """The most rows of logits requested at once."""
        return max(LOGIT_ROWS, self.options.max_batch_size)

    @property
    def steps_in_flight(self) -> int:
        """How many steps run at once, each of another micro-batch: the next one enters the first stage while
        later stages compute the one before.

        Not over NCCL: its sends and receives wait in the order of their launch, so that a rank that sends
        hidden states and one that sends logits would wait for each other. Proposed tokens are verified for
        all sequences in one step.
        """
        parallel = self.options.parallel
        pipelined = parallel.pp > 1 and self.link != "nccl" and self.options.speculative.method == "off"
        return parallel.num_micro_batches if pipelined else 1

    @property
    def decode_parts(self) -> int:
        """Parts of a step's decodes that follow one another through the stages."""
        return 1 if self.steps_in_flight > 1 else self.options.parallel.num_micro_batches

    def shard(self, config: ModelConfig) -> Shard:
        return self.plan.shard(config, self.rank)

    def torch_device(self) -> torch.device:
        """Return this rank's device: the ranks of a machine have a GPU each, in order."""
        if self.device != "cuda":
            return torch.device(self.device)
        return torch.device("cuda", self.first_device + self.rank % self.options.parallel.ranks_per_host)

    def pack(self) -> dict[str, object]:
        return asdict(self)

    @classmethod
    def unpack(cls, words: dict[str, object]) -> Assignment:
        options = words["options"]
        assert isinstance(options, dict)
        parallel = ParallelOptions(**options.pop("parallel"))
        speculative = SpeculativeOptions(**options.pop("speculative"))
        restored = EngineOptions(**options, parallel=parallel, speculative=speculative)
        return cls(**{**words, "options": restored})  # type: ignore[arg-type]

    def identity(self, config: ModelConfig) -> dict[str, str]:
        """Return the properties that must be equal on all ranks, as this process finds them."""
        return {
            "model": config.fingerprint().hex(),
            "dtype": self.dtype,
            "plan": str(self.plan),
            "block size": str(self.options.block_size),
            "pages": self.options.kv_dtype,
            "number of blocks": str(self.num_blocks),
            "longest sequence": str(self.max_len),
            "torch": torch.__version__,
        }


def unpack_transfer_options(words: dict[str, Any]) -> TransferOptions:
    """Restore options from the JSON of their ``asdict``."""
    return TransferOptions(
        **words | {"transports": tuple(words["transports"]), "tcp": TcpOptions(**words["tcp"])}
    )


def check_identity(rank: int, theirs: dict[str, str], ours: dict[str, str], where: str = "") -> None:
    """Raise RankRefused for the first property that differs from the group's."""
    for word in ours | theirs:
        if theirs.get(word) != ours.get(word):
            raise RankRefused(rank, word, theirs.get(word), ours.get(word), where)
