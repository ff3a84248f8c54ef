"""Loads a checkpoint's tensors as layers: fused, in the model's dtype, on its device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moonpool.engine.checkpoint.config import LatentConfig, ModelConfig, MoeConfig
from moonpool.engine.checkpoint.quantisation import AtLoad, derive_stored
from moonpool.engine.checkpoint.weights import Checkpoint
from moonpool.engine.collectives.link import Link
from moonpool.engine.device.weight_copies import WeightCopies
from moonpool.engine.experts.capacity import CapacityRouter
from moonpool.engine.experts.group_router import GroupRouter
from moonpool.engine.experts.mixture import Experts, MixtureOfExperts, Router, SharedExpert
from moonpool.engine.experts.parallel_mixture import ExpertParallelMixture
from moonpool.engine.model.activations import ACTIVATIONS, Activation
from moonpool.engine.model.latent import LatentInput, LatentOutput
from moonpool.engine.sharding.parallel_plan import Shard, run_of
from moonpool.engine.sharding.tensor_slices import expected_tensors
from moonpool.kernels.packed import PackedExperts, PackedLinear
from moonpool.kernels.quantised import Linear, QuantisedExperts, linear_of
from moonpool.kernels.reference import QuantisedWeight

_EMBEDDING = "model.embed_tokens"


@dataclass(slots=True)
class Mlp:
    """The dense MLP: x [n, hidden] → [n, hidden], with tp a summand."""

    gate_up: Linear
    down: Linear
    activate: Activation

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(self.activate(self.gate_up(x)))


@dataclass(slots=True)
class Layer:
    attention_in: Tensor | None  # norms, see ``Norms``
    qkv: Linear | LatentInput
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: Linear | LatentOutput
    attention_out: Tensor | None
    mlp_in: Tensor | None
    mlp: Callable[[Tensor], Tensor]
    mlp_out: Tensor | None
    window: int
    sinks: Tensor | None  # float32 [heads]
    k_scale: float = 1.0  # of float8 pages, if the checkpoint has them
    v_scale: float = 1.0


class Loader:
    """Reads one rank's part of a checkpoint. The loader keeps files mapped: drop it after loading."""

    def __init__(
        self,
        config: ModelConfig,
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        device: torch.device,
        shard: Shard,
        expert_load: Tensor,
        link: Link | None,
    ) -> None:
        """``link``: for expert parallelism. ``expert_load``: see ``ExpertLoad``, counters of the
        mixtures. Raises CheckpointError or UnsupportedModel before any tensor is loaded."""
        derived = {} if config.derived is None else config.derived(config)
        if isinstance(config.weights, AtLoad):
            derived = config.weights.derive(expected_tensors(config), derived)
        elif config.weights is not None:
            derived = derive_stored(config.weights, expected_tensors(config), derived, checkpoint.shapes)
        checkpoint.derive(derived)
        checkpoint.check(expected_tensors(config, shard), expected_tensors(config))
        self._config = config
        self._shard = shard
        self._adds_bias = shard.tp_rank == 0  # a bias is added once to a sum over ranks
        self._expert_load = expert_load
        self._link = link
        self._checkpoint = checkpoint
        self._dtype = dtype
        self._device = device
        self._copies = WeightCopies(device)

    def embedding(self) -> Tensor:
        """Load [words of the shard, hidden] in its stored dtype, if that is narrower: widening a step's
        rows is exact and cheap, and this is the largest matrix of a small model."""
        embedding = _plain(self._checkpoint.read(f"{_EMBEDDING}.weight"))
        narrow = embedding.dtype.itemsize <= self._dtype.itemsize
        dtype = embedding.dtype if narrow else self._dtype
        ours = torch.empty(embedding.shape, dtype=dtype, device=self._device)
        self._copies.copy(ours, embedding)
        self._checkpoint.drop_pages()
        return ours

    def head(self) -> Linear:
        name, method = "lm_head" if not self._config.tie_word_embeddings else _EMBEDDING, self._config.weights
        if not isinstance(method, AtLoad):
            return self._linear([name], bias=False)
        words = method.head(self.tensor(f"{name}.weight").cpu())
        return linear_of([words], None, self._dtype, self._device)

    def layer(self, i: int) -> Layer:
        config = self._config
        layer, attention, norms = f"model.layers.{i}", f"model.layers.{i}.self_attn", config.norms
        sparse = config.moe is not None and i in config.moe.layers
        o = self._linear([f"{attention}.o_proj"], bias=config.o_bias and self._adds_bias)
        k_scale = self._scale(attention, "k")
        return Layer(
            attention_in=self.norm(layer, norms.attention_in),
            qkv=self._latent_input(attention)
            if config.latent
            else self._linear([f"{attention}.{part}_proj" for part in "qkv"], bias=config.qkv_bias),
            q_norm=self.norm(attention, "q_norm" if config.qk_norm else ""),
            k_norm=self.norm(attention, "k_norm" if config.qk_norm else ""),
            o=self._latent_output(attention, o) if config.latent else o,
            attention_out=self.norm(layer, norms.attention_out),
            mlp_in=self.norm(layer, norms.mlp_in),
            mlp=self.mixture(i) if sparse else self._mlp(f"{layer}.mlp", bias=config.mlp_bias),
            mlp_out=self.norm(layer, norms.mlp_out),
            window=config.windows[i],
            sinks=self._stacked([f"{attention}.sinks"], torch.float32) if config.sinks else None,
            k_scale=k_scale,
            v_scale=k_scale if config.latent else self._scale(attention, "v"),
        )

    def _latent_input(self, attention: str) -> LatentInput:
        latent, bias = self._config.latent, self._config.qkv_bias
        assert latent is not None
        kv_a_norm = self.norm(attention, "kv_a_layernorm")
        assert kv_a_norm is not None
        two_steps = latent.q_rank > 0
        return LatentInput(
            latent,
            q_a=self._linear([f"{attention}.q_a_proj"], bias=bias) if two_steps else None,
            q_a_norm=self.norm(attention, "q_a_layernorm" if two_steps else ""),
            q=self._linear([f"{attention}.{'q_b_proj' if two_steps else 'q_proj'}"], bias=False),
            kv_a=self._linear([f"{attention}.kv_a_proj_with_mqa"], bias=bias),
            kv_a_norm=kv_a_norm,
            up_k=self._up(attention, latent)[:, : latent.nope_dim].contiguous(),
        )

    def _latent_output(self, attention: str, o: Linear) -> LatentOutput:
        latent = self._config.latent
        assert latent is not None
        up_v = self._up(attention, latent)[:, latent.nope_dim :]
        return LatentOutput(latent, up_v.transpose(1, 2).contiguous(), o)

    def _up(self, attention: str, latent: LatentConfig) -> Tensor:
        """Load the matrices from latents to keys and values: [heads, nope_dim + v_dim, kv_rank]."""
        rows = self.tensor(f"{attention}.kv_b_proj.weight")
        return rows.view(-1, latent.nope_dim + latent.v_dim, latent.kv_rank)

    def _mlp(self, name: str, *, bias: bool) -> Mlp:
        return Mlp(
            gate_up=self._linear([f"{name}.gate_proj", f"{name}.up_proj"], bias=bias),
            down=self._linear([f"{name}.down_proj"], bias=bias and self._adds_bias),
            activate=ACTIVATIONS[self._config.activation],
        )

    def mixture(self, i: int) -> MixtureOfExperts | ExpertParallelMixture:
        """Load layer i's mixture with the shard's experts."""
        moe = self._config.moe
        assert moe is not None
        name = f"model.layers.{i}.{moe.block}"
        gate, up, down = moe.projections
        ids = [f"{name}.experts.{e}" for e in self._shard.experts(i)]
        router = self._router(f"{name}.gate", moe)
        gates_ups, downs = [[f"{e}.{gate}", f"{e}.{up}"] for e in ids], [[f"{e}.{down}"] for e in ids]
        experts = Experts(
            gate_up=self._packed_experts(gates_ups),
            down=self._packed_experts(downs),
            activate=ACTIVATIONS[self._config.activation],
        )
        if moe.bias:
            experts.gate_up_bias = self._expert_biases(gates_ups)
            # Once to the sum over the ranks that split the columns of these experts.
            if self._shard.tp_rank % (self._shard.tp // self._shard.ep) == 0:
                experts.down_bias = self._expert_biases(downs)
        load = self._expert_load[i]
        if self._shard.ep == 1:
            shared = self._shared_expert(name) if moe.shared_inter else None
            return MixtureOfExperts(router=router, experts=experts, shared=shared, load=load[:-1])
        parts = self._shared_parts(name) if moe.shared_inter else []
        chooses: Router | GroupRouter | CapacityRouter = router
        if self._shard.expert_capacity:
            chooses = CapacityRouter(
                router, moe.num_experts, self._shard.expert_capacity, reroutes=self._shard.reroutes
            )
        return ExpertParallelMixture(chooses, experts, parts, load, i, self._shard, self._link)

    def _router(self, name: str, moe: MoeConfig) -> Router | GroupRouter:
        gate = self._linear([name], bias=moe.bias)
        if moe.routing is None:
            return Router(gate, moe.top_k, moe.renormalize)
        correction = None
        if moe.routing.scoring == "sigmoid":
            correction = self._stacked([f"{name}.e_score_correction_bias"], torch.float32)
        return GroupRouter(gate, moe.top_k, moe.renormalize, moe.routing, correction)

    def _shared_expert(self, name: str) -> SharedExpert:
        mlp = self._mlp(f"{name}.{self._shared_name}", bias=False)
        return SharedExpert(mlp, self._shared_gate(name))

    @property
    def _shared_name(self) -> str:
        assert self._config.moe is not None
        return self._config.moe.shared

    def _shared_parts(self, name: str) -> list[SharedExpert]:
        """Load the shared expert whole, as a summand of each tp rank."""
        gate, up, down = (
            self.matrix(f"{name}.{self._shared_name}.{part}_proj.weight") for part in ("gate", "up", "down")
        )
        runs = [run_of(len(gate), self._shard.tp, tp_rank) for tp_rank in range(self._shard.tp)]
        columns = [slice(run.start, run.stop) for run in runs]
        return [
            SharedExpert(
                Mlp(
                    PackedLinear(torch.cat([gate[c], up[c]]), None, self._dtype),
                    PackedLinear(down[:, c].contiguous(), None, self._dtype),
                    ACTIVATIONS[self._config.activation],
                ),
                self._shared_gate(name),
            )
            for c in columns
        ]

    def _shared_gate(self, name: str) -> Linear | None:
        if self._shared_name != "shared_expert":
            return None
        return self._linear([f"{name}.shared_expert_gate"], bias=False)

    def _packed_experts(self, names: list[list[str]]) -> PackedExperts | QuantisedExperts:
        """Load one matrix per expert, fused from those with the same input."""
        if self._config.weights is not None:
            return QuantisedExperts([self._linear(some, bias=False) for some in names])
        rows = self.matrix(*(f"{name}.weight" for some in names for name in some))
        return PackedExperts(rows.view(len(names), -1, rows.shape[1]), self._dtype)

    def _expert_biases(self, names: list[list[str]]) -> Tensor:
        """Load one bias per expert: [num_experts, out]."""
        return self.tensor(*(f"{name}.bias" for some in names for name in some)).view(len(names), -1)

    def _scale(self, attention: str, which: str) -> float:
        """Read a scale by vLLM's names; default 1."""
        for name in (f"{attention}.{which}_scale", f"{attention}.{which}_proj.{which}_scale"):
            found = self._checkpoint.find(name)
            if found is not None:
                return float(found)
        return 1.0

    def norm(self, module: str, name: str) -> Tensor | None:
        """Load the weight of a norm; None for the name "". With an offset it is float32, so that the sum is
        not rounded."""
        if not name:
            return None
        offset = self._config.norm_offset
        dtype = torch.float32 if offset else self._dtype
        return self._stacked([f"{module}.{name}.weight"], dtype).add_(offset)

    def tensor(self, *names: str) -> Tensor:
        """Load tensors, stacked along the first dimension, in the model's dtype."""
        return self._stacked(names, self._dtype)

    def matrix(self, *names: str) -> Tensor:
        """Load matrices to be packed: on a CPU that computes in float32, bfloat16 is kept."""
        return self._stack_matrices([_plain(self._checkpoint.read(name)) for name in names])

    def _stack_matrices(self, parts: list[Tensor]) -> Tensor:
        stored = {part.dtype for part in parts}
        stays = self._device.type == "cpu" and self._dtype is torch.float32 and stored == {torch.bfloat16}
        return self._stack(parts, torch.bfloat16 if stays else self._dtype)

    def _stacked(self, names: Sequence[str], dtype: torch.dtype) -> Tensor:
        return self._stack([_plain(self._checkpoint.read(name)) for name in names], dtype)

    def _stack(self, parts: list[Tensor], dtype: torch.dtype) -> Tensor:
        rows = [len(part) for part in parts]
        whole = torch.empty((sum(rows), *parts[0].shape[1:]), dtype=dtype, device=self._device)
        # Copied one by one: needs no memory beyond the result.
        for part, target in zip(parts, torch.split(whole, rows), strict=True):
            self._copies.copy(target, part)
            self._checkpoint.drop_pages()
        return whole

    def _linear(self, names: list[str], *, bias: bool) -> Linear:
        """Load one matrix fused from several with the same input."""
        biases = self.tensor(*(f"{name}.bias" for name in names)) if bias else None
        parts = [self._checkpoint.read(f"{name}.weight") for name in names]
        plain = [part for part in parts if isinstance(part, Tensor)]
        if len(plain) == len(parts):
            return PackedLinear(self._stack_matrices(plain), biases, self._dtype)
        linear = linear_of(parts, biases, self._dtype, self._device)
        self._checkpoint.drop_pages()
        return linear


def _plain(weight: Tensor | QuantisedWeight) -> Tensor:
    return weight if isinstance(weight, Tensor) else weight.dequantised()
