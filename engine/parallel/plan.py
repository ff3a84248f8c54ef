"""How many processes one model is spread over, and which part of it is whose."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.config import ModelConfig
from kvstore.layout import KVLayout
from runtime.errors import ConfigError
from runtime.options import ParallelOptions


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

    @classmethod
    def of(cls, options: ParallelOptions, config: ModelConfig, device: torch.device) -> ParallelPlan:
        """The plan ``options`` ask for.

        Raises ConfigError, which says what would be valid, where the model or the devices do not allow it.
        """
        plan = cls(options.tp, options.pp, options.ep, options.dp, options.cp)
        plan._check_model(config)
        if device.type == "cuda" and plan.world_size > (num_devices := torch.cuda.device_count()):
            raise ConfigError(
                f"engine.parallel: {plan} needs {plan.world_size} GPUs, "
                f"there are {num_devices}: lower one of them to at most {num_devices} in all",
                "engine.parallel.tp",
            )
        return plan

    def __str__(self) -> str:
        words = f"tp {self.tp} × pp {self.pp}"
        return words if self.cp == 1 else f"{words} × cp {self.cp}"

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
        moe = config.moe
        return Shard(
            tp=self.tp,
            pp=self.pp,
            cp=self.cp,
            rank=rank,
            layers=range(first_layer, first_layer + few + (stage < more)),
            heads=_share(config.num_heads, self.tp, place),
            # With more ranks than KV heads, neighbours hold the same one.
            kv_heads=range(
                first_kv := place * config.num_kv_heads // self.tp,
                first_kv + num_kv_heads,
            ),
            inter=_share(config.intermediate_size, self.tp, place),
            experts=range(moe.num_experts if moe else 0),
            expert_inter=_share(moe.expert_inter if moe else 0, self.tp, place),
            shared_inter=_share(moe.shared_inter if moe else 0, self.tp, place),
            vocab=_share(config.vocab_size, self.tp, place),
        )

    def shards(self, config: ModelConfig) -> list[Shard]:
        return [self.shard(config, rank) for rank in range(self.world_size)]

    def head_shards(self, config: ModelConfig) -> list[Shard]:
        """Those that make the logits of a step, the last stage's of the first share: their words in order."""
        return [shard for shard in self.shards(config) if shard.is_last and shard.share == 0]

    def _check_model(self, config: ModelConfig) -> None:
        valid_tp = [n for n in range(1, config.num_heads + 1) if _splits(config, n)]
        if self.tp not in valid_tp:
            columns = " and ".join(map(str, _mlp_columns(config)))
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
        for name, why in (
            ("ep", f"{config.family} has no experts"),
            ("dp", "an engine is one replica; prefill-node and decode-node start several"),
        ):
            if (value := getattr(self, name)) != 1:
                raise ConfigError(
                    f"engine.parallel.{name} is {value}: {why}; valid is 1", f"engine.parallel.{name}"
                )


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank's part of the model: runs of layers, heads, MLP columns and words, as in the checkpoint."""

    tp: int
    pp: int
    cp: int
    rank: int
    layers: range
    heads: range
    kv_heads: range
    inter: range  # of a dense MLP
    experts: range  # of a mixture
    expert_inter: range  # columns of each of these
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
    def share(self) -> int:
        """Which of a step's tokens are its own, where they are shared out."""
        return self.rank // self.tp % self.cp

    @property
    def place(self) -> int:
        """Its number among those that split the matrices of the same share."""
        return self.rank % self.tp

    @property
    def tensor_ranks(self) -> range:
        """Those whose parts of a matrix make the whole: of this stage and share."""
        first = self.rank - self.place
        return range(first, first + self.tp)

    @property
    def context_ranks(self) -> range:
        """Those that hold the same as this one, and compute other tokens: of this stage and place."""
        first = self.stage * self.stage_size + self.place
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


def _splits(config: ModelConfig, tp: int) -> bool:
    """Whether ``tp`` ranks can have equal parts of a layer; words and their embeddings need not be equal."""
    kv_fits = config.num_kv_heads % tp == 0 or tp % config.num_kv_heads == 0
    return config.num_heads % tp == 0 and kv_fits and not any(n % tp for n in _mlp_columns(config))


def _mlp_columns(config: ModelConfig) -> list[int]:
    """How wide the MLPs of the model are: dense ones, experts, the shared expert, as there are."""
    moe = config.moe
    dense = config.intermediate_size if moe is None or len(moe.layers) < config.num_layers else 0
    widths = (dense, moe.expert_inter, moe.shared_inter) if moe else (dense,)
    return [width for width in widths if width]


def _share(total: int, parts: int, i: int) -> range:
    """The i-th of ``parts`` runs that cover ``total``: equal ones, or as nearly as can be."""
    return range(total * i // parts, total * (i + 1) // parts)
