"""How many processes one model is spread over, and which part of it is whose."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from moonpool.engine.checkpoint.config import ModelConfig
from moonpool.engine.sharding.expert_placement import ExpertPlacement
from moonpool.kvstore.blocks.layout import KVLayout
from moonpool.runtime.config.options import ParallelOptions
from moonpool.runtime.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ParallelPlan:
    """Ranks are numbered stage by stage, in a stage share by share: rank = (stage * cp + share) * tp + place.

    The tp places of a share split every matrix; the cp shares of a place hold the same of it, and compute
    different tokens. Rank 0 leads.
    """

    tp: int = 1
    pp: int = 1
    ep: int = 1
    dp: int = 1
    cp: int = 1
    experts: ExpertPlacement | None = None  # None: dealt out evenly
    all_to_all_tokens: int = 0  # see ParallelOptions

    @classmethod
    def from_options(
        cls, options: ParallelOptions, config: ModelConfig, device: torch.device
    ) -> ParallelPlan:
        """The plan ``options`` ask for.

        Raises ConfigError, which says what would be valid, where the model or the devices do not allow it.
        """
        path = options.expert_plan_path
        plan = cls.of_sizes(options, ExpertPlacement.read(Path(path)) if path else None)
        plan._check_model(config)
        if device.type == "cuda":
            first, count = device.index or 0, options.ranks_per_host
            available = torch.cuda.device_count() - first
            if count > available:
                raise ConfigError(
                    f"engine.parallel: {plan} needs {count} GPUs of this machine from cuda:{first} on, there "
                    f"are {available}: lower one of them, so that a machine has at most {available} ranks",
                    "engine.parallel.tp",
                )
        return plan

    @classmethod
    def of_sizes(cls, options: ParallelOptions, experts: ExpertPlacement | None) -> ParallelPlan:
        """Return the plan without checks, for ``experts`` that were read before."""
        sizes = options.tp, options.pp, options.ep, options.dp, options.cp
        return cls(*sizes, experts, options.all_to_all_tokens)

    def __str__(self) -> str:
        words = f"tp {self.tp} × pp {self.pp}"
        words += f" × cp {self.cp}" if self.cp > 1 else ""
        words += f", ep {self.ep}" if self.ep > 1 else ""
        return words if self.experts is None else f"{words} by plan {self.experts.digest}"

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.cp

    def shard(self, config: ModelConfig, rank: int) -> Shard:
        """What ``rank`` holds. Layers are dealt out evenly, the first stages taking one more where they must.

        The head's work is that of a few layers: so it is the last stage that gets fewer.
        """
        stage, place = rank // (self.cp * self.tp), rank % self.tp
        few, more = divmod(config.num_layers, self.pp)
        first_layer = stage * few + min(stage, more)
        num_kv_heads = max(1, config.num_kv_heads // self.tp)
        sharers = self.tp // self.ep
        _, of_expert, shared = _mlp_columns(config)
        return Shard(
            tp=self.tp,
            pp=self.pp,
            cp=self.cp,
            ep=self.ep,
            rank=rank,
            layers=range(first_layer, first_layer + few + (stage < more)),
            heads=run_of(config.num_heads, self.tp, place),
            # With more ranks than KV heads, neighbours hold the same one.
            kv_heads=range(
                first_kv := place * config.num_kv_heads // self.tp,
                first_kv + num_kv_heads,
            ),
            inter=run_of(config.intermediate_size, self.tp, place),
            expert_placement=self.expert_placement(config),
            all_to_all_tokens=self.all_to_all_tokens,
            expert_inter=run_of(of_expert, sharers, place % sharers),
            # Where a rank has tokens of its own they go through the whole of it.
            shared_inter=run_of(shared, 1, 0) if self.ep > 1 else run_of(shared, self.tp, place),
            vocab=run_of(config.vocab_size, self.tp, place),
        )

    def expert_placement(self, config: ModelConfig) -> ExpertPlacement:
        num_experts = config.moe.num_experts if config.moe else 0
        return self.experts or ExpertPlacement.even(config.num_layers, num_experts, self.ep)

    def shards(self, config: ModelConfig) -> list[Shard]:
        return [self.shard(config, rank) for rank in range(self.world_size)]

    def head_shards(self, config: ModelConfig) -> list[Shard]:
        """Those that make the logits of a step, the last stage's of the first share: their words in order."""
        return [shard for shard in self.shards(config) if shard.is_last and shard.cp_rank == 0]

    def _check_model(self, config: ModelConfig) -> None:
        self._check_experts(config)
        valid_tp = [n for n in range(1, config.num_heads + 1) if _splits(config, n, self.ep)]
        if self.tp not in valid_tp:
            columns = " and ".join(str(n) for n in _mlp_columns(config) if n)
            raise ConfigError(
                f"engine.parallel.tp is {self.tp}: {config.num_heads} attention heads, "
                f"{config.num_kv_heads} KV heads and {columns} MLP columns cannot be split "
                f"so; valid are {', '.join(map(str, valid_tp))}",
                "engine.parallel.tp",
            )
        if self.pp > config.num_layers:
            raise ConfigError(
                f"engine.parallel.pp is {self.pp}: the model has {config.num_layers} layers, "
                f"so valid are 1 to {config.num_layers}",
                "engine.parallel.pp",
            )
        if self.dp != 1:
            raise ConfigError(
                f"engine.parallel.dp is {self.dp}: an engine is one replica; prefill-node and "
                "decode-node start several; valid is 1",
                "engine.parallel.dp",
            )

    def _check_experts(self, config: ModelConfig) -> None:
        name, num_experts = "engine.parallel.ep", config.moe.num_experts if config.moe else 0
        if self.ep > 1 and not num_experts:
            raise ConfigError(f"{name} is {self.ep}: {config.family} has no experts; valid is 1", name)
        valid = [n for n in range(1, self.tp + 1) if self.tp % n == 0 and n <= max(1, num_experts)]
        if self.ep not in valid:
            raise ConfigError(
                f"{name} is {self.ep}: {num_experts} experts are dealt out to a stage's {self.tp} tp ranks; "
                f"valid are {', '.join(map(str, valid))}",
                name,
            )
        if self.experts is not None:
            self.experts.check(config.num_layers, num_experts, self.ep)


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank's part of the model: runs of layers, heads, MLP columns and words, as in the checkpoint."""

    tp: int
    pp: int
    cp: int
    ep: int
    rank: int
    layers: range
    heads: range
    kv_heads: range
    inter: range  # of a dense MLP
    expert_placement: ExpertPlacement  # of mixtures
    all_to_all_tokens: int
    expert_inter: range  # columns of each expert that it holds
    shared_inter: range  # of the expert that every token goes through
    vocab: range

    @property
    def stage(self) -> int:
        return self.rank // self.stage_size

    @property
    def stage_size(self) -> int:
        """Ranks of a stage, which is also how far the same place and share of the next one is."""
        return self.tp * self.cp

    @property
    def cp_rank(self) -> int:
        """Which of a step's tokens are its own, where they are shared out."""
        return self.rank // self.tp % self.cp

    @property
    def tp_rank(self) -> int:
        """Its number among those that split the matrices of the same share."""
        return self.rank % self.tp

    @property
    def expert_rank(self) -> int:
        """Its number among those that experts are dealt out to; neighbours that share columns have one."""
        return self.tp_rank * self.ep // self.tp

    def experts(self, layer: int) -> tuple[int, ...]:
        """Those of a layer's mixture that it holds, ascending."""
        return self.expert_placement.experts_of(layer, self.expert_rank)

    @property
    def tensor_ranks(self) -> range:
        """Those whose parts of a matrix make the whole: of this stage and share."""
        first = self.rank - self.tp_rank
        return range(first, first + self.tp)

    @property
    def context_ranks(self) -> range:
        """Those that hold the same as this one, and compute other tokens: of this stage and place."""
        first = self.stage * self.stage_size + self.tp_rank
        return range(first, first + self.stage_size, self.tp)

    def layout(self, config: ModelConfig, block_size: int, dtype: str) -> KVLayout:
        """Of the rank's part of every KV block."""
        return KVLayout(
            num_layers=len(self.layers),
            num_kv_heads=len(self.kv_heads),
            block_size=block_size,
            head_dim=config.head_dim,
            dtype=dtype,
        )

    @property
    def is_first(self) -> bool:
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        return self.stage == self.pp - 1


def _splits(config: ModelConfig, tp: int, ep: int) -> bool:
    """Whether ``tp`` ranks can have equal parts of a layer; words and their embeddings need not be equal."""
    kv_fits = config.num_kv_heads % tp == 0 or tp % config.num_kv_heads == 0
    if config.num_heads % tp or not kv_fits or tp % ep:
        return False
    dense, of_experts, shared = _mlp_columns(config)
    return not (dense % tp or of_experts % (tp // ep) or shared % tp)


def _mlp_columns(config: ModelConfig) -> tuple[int, int, int]:
    """How wide the MLPs of the model are: a dense one, an expert, the shared expert; 0: none."""
    moe = config.moe
    if moe is None:
        return config.intermediate_size, 0, 0
    dense = config.intermediate_size if len(moe.layers) < config.num_layers else 0
    return dense, moe.expert_inter, moe.shared_inter


def run_of(total: int, parts: int, i: int) -> range:
    """The i-th of ``parts`` runs that cover ``total``: equal ones, or as nearly as can be."""
    return range(total * i // parts, total * (i + 1) // parts)
