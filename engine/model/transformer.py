"""One decoder for all families, dense and MoE. Their differences are configuration."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor

from moonpool.engine.adapters.pages import DOWN, GATE_UP, OUT, QKV, AdapterPages, StepAdapters
from moonpool.engine.checkpoint.config import ModelConfig
from moonpool.engine.checkpoint.weights import Checkpoint
from moonpool.engine.collectives.link import Link
from moonpool.engine.experts.load import new_table
from moonpool.engine.experts.parallel_mixture import ExpertParallelMixture
from moonpool.engine.model.attention import Attention
from moonpool.engine.model.decoder import Decoder
from moonpool.engine.model.inputs import StepInputs
from moonpool.engine.model.weight_loader import Layer, Loader, Mlp
from moonpool.engine.sharding.parallel_plan import ParallelPlan, Shard, run_of
from moonpool.engine.sharding.tensor_slices import TensorSlices
from moonpool.kernels.dispatch import rms_norm


class Model:
    """One rank's weights and forward pass. All state of sequences is in the pool."""

    def __init__(
        self,
        config: ModelConfig,
        checkpoint: Checkpoint,
        *,
        dtype: torch.dtype,
        device: torch.device,
        max_len: int,
        shard: Shard | None = None,
        link: Link | None = None,
        expert_load: Tensor | None = None,
    ) -> None:
        """Load the shard's part of the checkpoint (None: all). ``dtype``: of computation. ``link``: to the
        other ranks. ``expert_load``: this rank's table (see ``ExpertLoad``); None: a new one.

        Raises CheckpointError before anything is loaded.
        """
        self.shard = shard = shard or ParallelPlan().shard(config, 0)
        self.link = link
        self.expert_load = new_table(config, device) if expert_load is None else expert_load
        loader = Loader(config, checkpoint, dtype, device, shard, self.expert_load, link)
        self.config = config
        self.dtype, self._device = dtype, device
        # Rounded, as transformers multiplies.
        self._embedding_scale = torch.tensor(config.embedding_scale, dtype=dtype).item()
        self.layers = [loader.layer(i) for i in shard.layers]
        if shard.is_first:
            self.embedding = loader.embedding()
        if shard.is_last:
            self.head = loader.head()
            self.norm = loader.norm("model", "norm")
        self.attention = Attention(config, shard, link, dtype=dtype, device=device, max_len=max_len)
        self._decoder = Decoder(config, self.layers, self.attention, shard, dtype)
        self.adapters: AdapterPages | None = None  # in the pool, once there is one

    def forward(self, inputs: StepInputs, pool: Tensor, hidden: Tensor | None = None) -> Tensor:
        """Run the shard's layers, writing KV to ``pool``. Return [num_tokens, hidden]; normed on the last
        stage.

        ``hidden``: the result of the stage before; None on the first.
        """
        shard = self.shard
        if inputs.moves is not None:
            self.attention.move(pool, inputs.moves)
        if self.config.latent is not None:
            # A latent is the key and, from its rotated part on, the value.
            pool = pool.expand(-1, -1, 2, -1, -1, -1)
        hidden = self.embed(inputs.token_ids) if hidden is None else hidden
        adapted = None if self.adapters is None else self.adapters.step(inputs)
        residual: Tensor | None = None
        one_call = None if adapted is not None else self._decoder.of(inputs, pool)
        if one_call is not None:
            residual = one_call(
                hidden, pool, inputs.positions, inputs.slots, inputs.decode_table, inputs.decode_lens
            )
        for i, layer in enumerate(self.layers if one_call is None else ()):
            x, residual = self._norm(hidden, layer.attention_in, residual)
            qkv = layer.qkv(x)
            if adapted is not None:
                adapted.add(qkv, x, i, QKV)
            attended = self.attention(qkv, inputs, pool, i, layer)
            part = layer.o(attended)
            if adapted is not None:
                adapted.add(part, attended, i, OUT)
            if (
                self.link is not None
                and isinstance(layer.mlp, ExpertParallelMixture)
                and layer.mlp.worth_exchanging(len(part))
            ):
                hidden, residual = self._exchange(part, residual, layer, layer.mlp), None
                continue
            x, residual = self._norm(
                self._normed(self._sum(part), layer.attention_out), layer.mlp_in, residual
            )
            mixed = layer.mlp(x) if adapted is None else self._adapted_mlp(x, layer, i, adapted)
            hidden = self._normed(self._sum(mixed), layer.mlp_out)
        if not shard.is_last:
            return hidden if residual is None else hidden + residual
        normed, _ = self._norm(hidden, self.norm, residual)
        return normed

    def _adapted_mlp(self, x: Tensor, layer: Layer, i: int, adapted: StepAdapters) -> Tensor:
        """As ``layer.mlp``, with adapters; mixtures of experts have none."""
        mlp = layer.mlp
        if not isinstance(mlp, Mlp):
            return mlp(x)
        gate_up = mlp.gate_up(x)
        adapted.add(gate_up, x, i, GATE_UP)
        inner = mlp.activate(gate_up)
        out = mlp.down(inner)
        adapted.add(out, inner, i, DOWN)
        return out

    def read_mixture(self, layer: int, shard: Shard) -> ExpertParallelMixture:
        """Read the experts that ``shard`` has of a layer, by its number in the model; nothing else changes.
        Raises CheckpointError."""
        checkpoint = Checkpoint(self.config.path, part=TensorSlices(self.config, shard))
        loader = Loader(self.config, checkpoint, self.dtype, self._device, shard, self.expert_load, self.link)
        mixture = loader.mixture(layer)
        assert isinstance(mixture, ExpertParallelMixture), "experts on one rank do not move"
        if self._device.type == "cuda":  # steps run on another stream
            torch.cuda.current_stream(self._device).synchronize()
        return mixture

    @contextmanager
    def without_ranks(self) -> Iterator[None]:
        """Compute without exchanges inside the ``with``: with wrong results, in the time and memory of a
        step."""
        link, self.link, self.attention.link = self.link, None, None
        try:
            yield
        finally:
            self.link = self.attention.link = link

    def _norm(self, hidden: Tensor, weight: Tensor | None, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the normed sum of both, and the sum. ``weight``: None: the sum is not normed."""
        eps = self.config.rms_norm_eps
        if weight is None:
            total = hidden if residual is None else hidden + residual
            return total, total
        if residual is None:
            return rms_norm(hidden, weight, eps), hidden
        normed, residual = rms_norm(hidden, weight, eps, residual=residual)
        return normed, residual

    def _normed(self, hidden: Tensor, weight: Tensor | None) -> Tensor:
        return hidden if weight is None else rms_norm(hidden, weight, self.config.rms_norm_eps)

    def _exchange(
        self, part: Tensor, residual: Tensor, layer: Layer, mixture: ExpertParallelMixture
    ) -> Tensor:
        """Run the rest of a layer with the step's tokens distributed over the tp ranks.

        part: [num_tokens, hidden], this rank's summand of the attention. Returns residual, attention and
        experts summed: [num_tokens, hidden].
        """
        assert self.link is not None
        runs = [run_of(len(part), self.shard.tp, tp_rank) for tp_rank in range(self.shard.tp)]
        counts, own = [len(run) for run in runs], runs[self.shard.tp_rank]
        attended = self._normed(self.link.reduce_scatter(part, counts), layer.attention_out)
        x, residual = self._norm(attended, layer.mlp_in, residual[own.start : own.stop])
        mixed = self._normed(mixture.exchange(x, counts), layer.mlp_out)
        return self.link.all_gather(mixed + residual, counts)

    def embed(self, token_ids: Tensor) -> Tensor:
        """token_ids: int64 [n]. Returns [n, hidden]; each tp rank looks up its own words."""
        words = self.shard.vocab
        if self.shard.tp == 1:
            hidden = F.embedding(token_ids, self.embedding).to(self.dtype)
        else:
            row = token_ids - words.start
            elsewhere = (row < 0) | (row >= len(words))
            hidden = F.embedding(row.masked_fill_(elsewhere, 0), self.embedding).to(self.dtype)
            hidden = self._sum(hidden.masked_fill_(elsewhere[:, None], 0))
        return hidden if self._embedding_scale == 1.0 else hidden.mul_(self._embedding_scale)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden: [n, hidden]. Returns [n, words of the shard]."""
        logits, cap = self.head(hidden), self.config.logit_soft_cap
        return logits.div_(cap).tanh_().mul_(cap) if cap else logits

    def _sum(self, part: Tensor) -> Tensor:
        """Return the sum over the tp ranks. May overwrite ``part``."""
        return part if self.shard.tp == 1 or self.link is None else self.link.all_reduce(part)
