"""The parallel plan of a model, and each rank's shard of it."""

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
    """Sizes of parallelism. rank = (stage * cp + cp_rank) * tp + tp_rank; rank 0 leads.

    tp ranks split every matrix. cp ranks have equal weights, compute different tokens and have different
    blocks: block b of the pool is on cp rank b % cp, as its block b // cp. Stages (pp) split the layers.
    """

    tp: int = 1
    pp: int = 1
    ep: int = 1
    dp: int = 1
    cp: int = 1
    experts: ExpertPlacement | None = None  # None: evenly
    all_to_all_tokens: int = 0  # see ParallelOptions
    pp_layers: tuple[int, ...] = ()  # of each stage; empty: nearly equal
    expert_capacity: float = 0.0  # see ParallelOptions
    reroutes: bool = True  # choices beyond it; else they are dropped

    @classmethod
    def from_options(
        cls, options: ParallelOptions, config: ModelConfig, device: torch.device
    ) -> ParallelPlan:
        """Return the plan of ``options``. Raises ConfigError, with the valid values, if the model or the
        devices do not allow it."""
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
        layers = tuple(map(int, options.pp_layers.split("+"))) if options.pp_layers else ()
        capacity, reroutes = options.expert_capacity, options.expert_overflow == "reroute"
        return cls(*sizes, experts, options.all_to_all_tokens, layers, capacity, reroutes)

    def __str__(self) -> str:
        words = f"tp {self.tp} × pp {self.pp}"
        words += f" ({' + '.join(map(str, self.pp_layers))} layers)" if self.pp_layers else ""
        words += f" × cp {self.cp}" if self.cp > 1 else ""
        words += f", ep {self.ep}" if self.ep > 1 else ""
        return words if self.experts is None else f"{words} by plan {self.experts.digest}"

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.cp

    def shard(self, config: ModelConfig, rank: int) -> Shard:
        stage, tp_rank = rank // (self.cp * self.tp), rank % self.tp
        of_stages = self.stage_layers(config)
        first_layer = sum(of_stages[:stage])
        num_kv_heads = max(1, config.num_kv_heads // self.tp)
        column_ranks = self.tp // self.ep
        _, of_expert, shared = _mlp_columns(config)
        return Shard(
            tp=self.tp,
            pp=self.pp,
            cp=self.cp,
            ep=self.ep,
            rank=rank,
            layers=range(first_layer, first_layer + of_stages[stage]),
            heads=run_of(config.num_heads, self.tp, tp_rank),
            # With more ranks than KV heads, neighbours have the same head.
            kv_heads=range(first_kv := tp_rank * config.num_kv_heads // self.tp, first_kv + num_kv_heads),
            inter=run_of(config.intermediate_size, self.tp, tp_rank),
            expert_placement=self.expert_placement(config),
            all_to_all_tokens=self.all_to_all_tokens,
            expert_inter=run_of(of_expert, column_ranks, tp_rank % column_ranks),
            # In an all-to-all a rank computes the whole shared expert for its own tokens.
            shared_inter=run_of(shared, 1, 0) if self.ep > 1 else run_of(shared, self.tp, tp_rank),
            vocab=run_of(config.vocab_size, self.tp, tp_rank),
            expert_capacity=self.expert_capacity,
            reroutes=self.reroutes,
        )

    def stage_layers(self, config: ModelConfig) -> tuple[int, ...]:
        """Return the number of layers of each stage. Without ``pp_layers`` they are split evenly; the first
        stages get one more if necessary, as the last stage has the head's work, too."""
        few, more = divmod(config.num_layers, self.pp)
        return self.pp_layers or tuple(few + (stage < more) for stage in range(self.pp))

    def expert_placement(self, config: ModelConfig) -> ExpertPlacement:
        num_experts = config.moe.num_experts if config.moe else 0
        return self.experts or ExpertPlacement.even(config.num_layers, num_experts, self.ep)

    def shards(self, config: ModelConfig) -> list[Shard]:
        return [self.shard(config, rank) for rank in range(self.world_size)]

    def head_shards(self, config: ModelConfig) -> list[Shard]:
        """Return the shards that compute logits, in order of their words: last stage, cp rank 0."""
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
        if self.pp_layers and sum(self.pp_layers) != config.num_layers:
            raise ConfigError(
                f"engine.parallel.pp_layers is {'+'.join(map(str, self.pp_layers))}: these are "
                f"{sum(self.pp_layers)} layers, the model has {config.num_layers}",
                "engine.parallel.pp_layers",
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
                f"{name} is {self.ep}: {num_experts} experts are distributed over {self.tp} tp ranks; "
                f"valid are {', '.join(map(str, valid))}",
                name,
            )
        if self.expert_capacity and self.ep == 1:
            raise ConfigError(
                f"engine.parallel.expert_capacity is {self.expert_capacity:g}: without expert parallelism "
                "(engine.parallel.ep) no rank waits for another's experts; valid is 0",
                "engine.parallel.expert_capacity",
            )
        if self.experts is not None:
            self.experts.check(config.num_layers, num_experts, self.ep)


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank's part of the model: ranges of layers, heads, MLP columns and words of the checkpoint."""

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
    expert_inter: range  # columns of each of its experts
    shared_inter: range  # of the shared expert
    vocab: range
    expert_capacity: float  # as of the plan
    reroutes: bool

    @property
    def stage(self) -> int:
        return self.rank // self.stage_size

    @property
    def stage_size(self) -> int:
        """The number of ranks of a stage."""
        return self.tp * self.cp

    @property
    def cp_rank(self) -> int:
        """Its number among the ranks with equal weights."""
        return self.rank // self.tp % self.cp

    @property
    def tp_rank(self) -> int:
        """Its number among the ranks that split the matrices."""
        return self.rank % self.tp

    @property
    def expert_rank(self) -> int:
        """Its number among the ranks of experts; tp ranks that split the same experts have equal ones."""
        return self.tp_rank * self.ep // self.tp

    def experts(self, layer: int) -> tuple[int, ...]:
        """Return its experts of a layer, ascending."""
        return self.expert_placement.experts_of(layer, self.expert_rank)

    @property
    def tensor_ranks(self) -> range:
        """The tp ranks of its stage and cp rank."""
        first = self.rank - self.tp_rank
        return range(first, first + self.tp)

    @property
    def context_ranks(self) -> range:
        """The cp ranks of its stage and tp rank."""
        first = self.stage * self.stage_size + self.tp_rank
        return range(first, first + self.stage_size, self.tp)

    def layout(self, config: ModelConfig, block_size: int, dtype: str) -> KVLayout:
        """Return the layout of the rank's part of a KV block."""
        return KVLayout(
            num_layers=len(self.layers),
            num_kv_heads=len(self.kv_heads),
            block_size=block_size,
            head_dim=config.head_dim,
            dtype=dtype,
            components=("latent",) if config.latent else ("k", "v"),
            variant="long rotary factors" if any(rope.is_long for rope in config.ropes) else "",
        )

    @property
    def is_first(self) -> bool:
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        return self.stage == self.pp - 1


def _splits(config: ModelConfig, tp: int, ep: int) -> bool:
    """Return whether ``tp`` ranks can have equal parts of a layer; words may be split unevenly."""
    kv_fits = config.num_kv_heads % tp == 0 or tp % config.num_kv_heads == 0
    if config.num_heads % tp or not kv_fits or tp % ep:
        return False
    dense, of_experts, shared = _mlp_columns(config)
    return not (dense % tp or of_experts % (tp // ep) or shared % tp)


def _mlp_columns(config: ModelConfig) -> tuple[int, int, int]:
    """Return the columns of a dense MLP, an expert and the shared expert; 0: the model has none."""
    moe = config.moe
    if moe is None:
        return config.intermediate_size, 0, 0
    dense = config.intermediate_size if len(moe.layers) < config.num_layers else 0
    return dense, moe.expert_inter, moe.shared_inter


def run_of(total: int, parts: int, i: int) -> range:
    """Return range i of ``parts`` nearly equal ranges that cover ``total``."""
    return range(total * i // parts, total * (i + 1) // parts)
