"""Dense layers that the CPU library runs in one call, in steps that only decode."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moonpool.engine.checkpoint.config import ModelConfig
from moonpool.engine.model.attention import Attention
from moonpool.engine.model.inputs import StepInputs
from moonpool.engine.model.weight_loader import Layer, Mlp
from moonpool.engine.sharding.parallel_plan import Shard
from moonpool.kernels.cpu.decoder_layers import DecoderLayers, DecoderRules, LayerTensors
from moonpool.kernels.cpu.library import POOL_PAIRS, load
from moonpool.kernels.mode import mode
from moonpool.kernels.packed import PackedLinear
from moonpool.kernels.quantised import QuantisedLinear
from moonpool.kernels.reference.dtypes import FP8


class Decoder:
    """A rank's layers in that form, where they have it: dense, with a gated SiLU, whole on this rank."""

    def __init__(
        self,
        config: ModelConfig,
        layers: Sequence[Layer],
        attention: Attention,
        shard: Shard,
        dtype: torch.dtype,
    ) -> None:
        self._config, self._shard, self._dtype = config, shard, dtype
        self._layers, self._attention = layers, attention
        self._made: dict[torch.dtype, DecoderLayers | None] = {}  # by the pool's dtype

    def of(self, inputs: StepInputs, pool: Tensor) -> DecoderLayers | None:
        """Return the layers for such a step; None: operations are called one by one."""
        is_decode = inputs.chunk_table is None and inputs.num_decodes == len(inputs.token_ids) > 0
        if not is_decode or inputs.context is not None or inputs.decode_places is not None:
            return None
        if pool.dtype not in self._made:
            self._made[pool.dtype] = self._make(pool)
        return self._made[pool.dtype]

    def _make(self, pool: Tensor) -> DecoderLayers | None:
        config, shard, library = self._config, self._shard, load()
        if library is None or not pool.is_cpu or mode() == "checked" or shard.tp > 1:
            return None
        if config.latent is not None or config.qk_norm == "all" or config.activation != "silu":
            return None
        dtypes = self._dtype, pool.dtype
        made = [self._layer(i, layer, pool.dtype) for i, layer in enumerate(self._layers)]
        layers = [layer for layer in made if layer is not None]
        if dtypes not in POOL_PAIRS or not made or len(layers) < len(made):
            return None
        rules = DecoderRules(len(shard.heads), config.soft_cap, config.rms_norm_eps)
        return DecoderLayers(library, dtypes, layers, rules)

    def _layer(self, i: int, layer: Layer, pages: torch.dtype) -> LayerTensors | None:
        mlp = layer.mlp
        if not isinstance(mlp, Mlp) or layer.attention_out is not None or layer.mlp_out is not None:
            return None
        if layer.attention_in is None or layer.mlp_in is None or layer.sinks is not None:
            return None
        norms = (layer.attention_in, layer.mlp_in, layer.q_norm, layer.k_norm)
        if any(norm is not None and norm.dtype is not self._dtype for norm in norms):
            return None
        structs = [
            linear.struct(self._dtype) if isinstance(linear, PackedLinear | QuantisedLinear) else None
            for linear in (layer.qkv, layer.o, mlp.gate_up, mlp.down)
        ]
        qkv, o, gate_up, down = structs
        if qkv is None or o is None or gate_up is None or down is None:
            return None
        norms_heads, has_scales = self._config.qk_norm == "head", pages == FP8
        cos, sin = self._attention.cos_sin[i]
        return LayerTensors(
            layer.attention_in,
            layer.q_norm if norms_heads else None,
            layer.k_norm if norms_heads else None,
            layer.mlp_in,
            cos,
            sin,
            layer.window,
            self._attention.scale,
            layer.k_scale if has_scales else 1.0,
            layer.v_scale if has_scales else 1.0,
            qkv,
            o,
            gate_up,
            down,
        )
