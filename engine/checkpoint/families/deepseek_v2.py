"""DeepSeek-V2: latent attention, and after the first layers mixtures with shared experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from moonpool.engine.checkpoint.config import LatentConfig, ModelConfig, Routing
from moonpool.engine.checkpoint.config_words import ConfigWords
from moonpool.engine.checkpoint.rope import mscale
from moonpool.engine.errors import CheckpointError, UnsupportedModel


def read(path: Path, raw: Mapping[str, Any]) -> ModelConfig:
    words = ConfigWords(
        path, raw, max_position_embeddings=2048, n_shared_experts=2, moe_intermediate_size=1407
    )
    method = words.raw.get("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise UnsupportedModel(
            path, f"topk_method {method!r}: only greedy, group_limited_greedy are computed"
        )
    words.raw["norm_topk_prob"] = False
    config = deepseek(words, "softmax", is_grouped=method != "greedy", experts=64, dense=0)
    # transformers rotates in float32.
    return replace(config, ropes=tuple(replace(rope, is_rounded=False) for rope in config.ropes))


def deepseek(
    words: ConfigWords, scoring: Literal["softmax", "sigmoid"], *, is_grouped: bool, experts: int, dense: int
) -> ModelConfig:
    """Return what DeepSeek-V2 and V3 have in common. experts, dense: how many where the file names none."""
    raw, path = words.raw, words.path
    if raw.get("moe_layer_freq", 1) != 1:
        raise UnsupportedModel(path, f"moe_layer_freq {raw['moe_layer_freq']}: only 1 is computed")
    raw.update(mlp_only_layers=list(range(raw.get("first_k_dense_replace", dense))))
    raw.update(num_experts=words.size("n_routed_experts", experts), num_local_experts=None)
    if words.flag("mlp_bias"):
        raise UnsupportedModel(path, "mlp_bias: only MLPs without biases are computed")
    rank = raw.get("q_lora_rank", 1536)
    latent = LatentConfig(
        q_rank=0 if rank is None else words.size("q_lora_rank", 1536),
        kv_rank=words.size("kv_lora_rank", 512),
        nope_dim=words.size("qk_nope_head_dim", 128),
        rope_dim=words.size("qk_rope_head_dim", 64),
        v_dim=words.size("v_head_dim", 128),
        is_interleaved=words.flag("rope_interleave", default=True),
    )
    moe = words.mixture(experts)
    groups = words.size("n_group", 1) if is_grouped else 1
    if moe.num_experts % groups:
        raise CheckpointError(path, f"config.json: {moe.num_experts} experts in n_group {groups} groups")
    routing = Routing(
        scoring,
        num_groups=groups,
        top_groups=words.size("topk_group", 1) if is_grouped else 1,
        factor=float(raw.get("routed_scaling_factor") or 1.0),
    )
    raw["head_dim"] = latent.rope_dim
    decoder, bias = words.decoder(), words.flag("attention_bias")
    rope = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    stretch = mscale(decoder.ropes[0].factor, float(rope.get("mscale_all_dim") or 0.0))
    return replace(
        decoder,
        num_kv_heads=1,
        head_dim=latent.rope_dim + latent.kv_rank,
        latent=latent,
        qkv_bias=bias,
        o_bias=bias,
        scale=(latent.nope_dim + latent.rope_dim) ** -0.5 * stretch**2,
        moe=replace(
            moe,
            routing=routing,
            shared="shared_experts",
            shared_inter=moe.expert_inter * words.size("n_shared_experts", 1),
        ),
    )
