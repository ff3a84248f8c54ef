"""The model configuration of a checkpoint's config.json."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Literal

from moonpool.engine.checkpoint import families
from moonpool.engine.checkpoint.fingerprint import fingerprint
from moonpool.engine.checkpoint.quantisation import AtLoad, Method
from moonpool.engine.checkpoint.rope import RopeConfig
from moonpool.engine.checkpoint.weights import Derived
from moonpool.engine.errors import UnsupportedModel
from moonpool.runtime.config.model_directory import read_model_config


@dataclass(frozen=True, slots=True)
class Norms:
    """Names of a layer's norms in the checkpoint; "": none. Those "in" norm the input of attention or MLP,
    those "out" the result before it is added to the residual."""

    attention_in: str = "input_layernorm"
    attention_out: str = ""
    mlp_in: str = "post_attention_layernorm"
    mlp_out: str = ""


@dataclass(frozen=True, slots=True)
class LatentConfig:
    """Multi-head latent attention: all heads attend to one vector a token, its rotated key and its latent."""

    q_rank: int  # of the queries' projection in two steps; 0: in one
    kv_rank: int  # elements of a latent
    nope_dim: int  # elements of a head's query and key that are not rotated
    rope_dim: int  # and that are
    v_dim: int
    is_interleaved: bool  # adjacent elements are rotated, not halves


@dataclass(frozen=True, slots=True)
class Routing:
    """How DeepSeek chooses experts: of the best groups, weighted by ``factor``."""

    scoring: Literal["softmax", "sigmoid"]  # sigmoid: with a correction for each expert, only of the choice
    num_groups: int
    top_groups: int
    factor: float


@dataclass(frozen=True, slots=True)
class MoeConfig:
    """The mixture-of-experts part of a model."""

    layers: frozenset[int]  # the others are dense
    num_experts: int
    top_k: int
    renormalize: bool  # the chosen experts' probabilities sum to 1
    expert_inter: int  # columns of one expert's MLP
    shared_inter: int  # of the shared expert; 0: none
    block: str  # the mixture's module name in the checkpoint
    projections: tuple[str, str, str]  # names of an expert's gate, up and down matrices
    bias: bool = False  # of the router and the experts
    routing: Routing | None = None  # None: softmax over all experts
    shared: str = "shared_expert"  # its module's name; without a gate unless it is this


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of a Llama-like decoder. Sizes are in elements, windows in tokens."""

    path: Path
    family: str  # model_type, a module of ``families``
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int  # of keys as the pool has them
    max_position: int
    rms_norm_eps: float
    ropes: tuple[RopeConfig, ...]  # per layer
    windows: tuple[int, ...]  # per layer; 0: full attention
    tie_word_embeddings: bool
    stored_dtype: str  # float32, bfloat16 or float16
    eos_token_ids: frozenset[int]
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: Literal["", "head", "all"] = ""  # of queries and keys: of each head, or of all heads as one row
    norms: Norms = Norms()
    norm_offset: float = 0.0  # added to the stored weights of norms
    activation: Literal["silu", "gelu_tanh", "clamped"] = "silu"  # of the MLPs' gates
    scale: float = 0.0  # of attention scores; 0: head_dim ** -0.5
    soft_cap: float = 0.0  # of attention scores, cap * tanh(score / cap); 0: none
    logit_soft_cap: float = 0.0
    embedding_scale: float = 1.0
    latent: LatentConfig | None = None  # None: keys and values of heads
    sinks: bool = False  # a logit of each head that takes part in the softmax and has no value
    moe: MoeConfig | None = None  # None: every layer is dense
    # Tensors that the checkpoint stores in another form than Llama's; None: it stores all of them so.
    derived: Callable[[ModelConfig], dict[str, Derived]] | None = None
    weights: Method | AtLoad | None = None  # in few bits; None: plain

    @property
    def widest_window(self) -> int:
        """The most tokens that any layer attends to; 0: some layer attends to all."""
        return max(self.windows) if all(self.windows) else 0

    def for_length(self, max_len: int) -> ModelConfig:
        """Return the model with the rotary frequencies for sequences of up to ``max_len`` tokens. Other
        lengths may have others: their KV differs."""
        ropes = (replace(rope, is_long=max_len > rope.original_max_position) for rope in self.ropes)
        return replace(
            self,
            ropes=tuple(n if n.kind == "longrope" else o for n, o in zip(ropes, self.ropes, strict=True)),
        )

    def fingerprint(self) -> bytes:
        """Return 16 bytes that name the weights: those stored, and how they are changed at load. Raises
        CheckpointError."""
        return fingerprint(self.path, self.weights.name if isinstance(self.weights, AtLoad) else "")

    def with_weights(self, option: str) -> ModelConfig:
        """Return the model with weights by ``engine.weights``: ``auto`` (as stored), ``int8`` or ``int4``.

        Raises UnsupportedModel where the checkpoint's are in few bits already.
        """
        if option == "auto":
            return self
        kind: Literal["int8", "int4"] = "int8" if option == "int8" else "int4"
        if self.weights not in (None, AtLoad(kind)):
            raise UnsupportedModel(
                self.path,
                f"engine.weights is {option}, but its weights are quantised already "
                f"({self.weights.name if self.weights else ''}): set engine.weights to auto",
            )
        return replace(self, weights=AtLoad(kind))

    @classmethod
    def from_checkpoint(cls, path: Path | str) -> ModelConfig:
        """Read config.json (fields of transformers 5 and older) and generation_config.json.

        Raises ModelMissing without a config.json, CheckpointError for unreadable or contradictory files,
        UnsupportedModel for features the engine lacks. The latter two name the field.
        """
        path = Path(path)
        raw = read_model_config(path)
        family = raw.get("model_type")
        known = sorted(module.name for module in iter_modules(families.__path__))
        if family not in known:
            raise UnsupportedModel(path, f"model_type {family!r} is not one of {', '.join(known)}")
        config: ModelConfig = import_module(f"{families.__name__}.{family}").read(path, raw)
        return config
