"""The checkpoint tensors a rank reads, and the slice of each."""

from __future__ import annotations

from moonpool.engine.checkpoint.config import LatentConfig, ModelConfig
from moonpool.engine.checkpoint.weights import Part
from moonpool.engine.sharding.parallel_plan import ParallelPlan, Shard

_ALL = slice(None)
_MLP_ROWS = ("gate_proj", "up_proj", "w1", "w3")
_MLP_COLUMNS = ("down_proj", "w2")


class TensorSlices:
    """One rank's slices by tensor name.

    Matrices with a replicated input are split by rows, those with a split input by columns; their outputs are
    summands.
    """

    def __init__(self, config: ModelConfig, shard: Shard) -> None:
        size = config.head_dim
        heads, kv_heads = _scaled(shard.heads, size), _scaled(shard.kv_heads, size)
        vocab = _scaled(shard.vocab, 1)
        self._whole = shard.tp == 1
        self._rows = {
            "q_proj": heads,
            "k_proj": kv_heads,
            "v_proj": kv_heads,
            "embed_tokens": vocab,
            "lm_head": vocab,
        }
        if config.qk_norm == "all":
            self._rows |= {"q_norm": heads, "k_norm": kv_heads}
        self._sinks = _scaled(shard.heads, 1)
        self._columns = {"o_proj": heads}
        if (latent := config.latent) is not None:
            queries = _scaled(shard.heads, latent.nope_dim + latent.rope_dim)
            self._rows |= {"q_proj": queries, "q_b_proj": queries}
            self._rows["kv_b_proj"] = _scaled(shard.heads, latent.nope_dim + latent.v_dim)
            self._columns = {"o_proj": _scaled(shard.heads, latent.v_dim)}
        # By the module that contains the MLP.
        self._inter = {
            "mlp": _scaled(shard.inter, 1),
            "experts": _scaled(shard.expert_inter, 1),
            "shared_expert": _scaled(shard.shared_inter, 1),
            "shared_experts": _scaled(shard.shared_inter, 1),
        }

    def __call__(self, name: str) -> Part:
        """Return the slice of ``name``, such as model.layers.0.self_attn.q_proj.weight."""
        if self._whole:
            return ()
        *path, module, kind = name.split(".")
        if kind == "sinks":
            return (self._sinks,)
        if module in _MLP_ROWS or module in _MLP_COLUMNS:
            inter = self._inter[next(part for part in reversed(path) if part in self._inter)]
            if module in _MLP_ROWS:
                return (inter,)
            return (_ALL, inter) if kind == "weight" else ()
        if module in self._rows:
            return (self._rows[module],)
        if module in self._columns and kind == "weight":
            return (_ALL, self._columns[module])
        return ()


def _scaled(run: range, size: int) -> slice:
    return slice(run.start * size, run.stop * size)


def expected_tensors(config: ModelConfig, shard: Shard | None = None) -> dict[str, tuple[int, ...]]:
    """Return names and whole shapes of the checkpoint tensors that ``shard`` (None: the whole model)
    reads."""
    shard = shard or ParallelPlan().shard(config, 0)
    hidden, inter, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
    q_size, kv_size = config.num_heads * head_dim, config.num_kv_heads * head_dim
    attention = {
        "self_attn.q_proj": (q_size, hidden, config.qkv_bias),
        "self_attn.k_proj": (kv_size, hidden, config.qkv_bias),
        "self_attn.v_proj": (kv_size, hidden, config.qkv_bias),
        "self_attn.o_proj": (hidden, q_size, config.o_bias),
    }
    mlp = {
        "mlp.gate_proj": (inter, hidden, config.mlp_bias),
        "mlp.up_proj": (inter, hidden, config.mlp_bias),
        "mlp.down_proj": (hidden, inter, config.mlp_bias),
    }
    named = config.norms
    norms = dict.fromkeys((named.attention_in, named.attention_out, named.mlp_in, named.mlp_out), hidden)
    norms.pop("", None)
    if config.latent is not None:
        attention, more = _latent_linears(config, config.latent)
        norms |= more
    if config.qk_norm == "head":
        norms |= {"self_attn.q_norm": head_dim, "self_attn.k_norm": head_dim}
    elif config.qk_norm == "all":
        norms |= {"self_attn.q_norm": q_size, "self_attn.k_norm": kv_size}
    tied = config.tie_word_embeddings
    tensors: dict[str, tuple[int, ...]] = {}
    if shard.is_first or (shard.is_last and tied):
        tensors["model.embed_tokens.weight"] = (config.vocab_size, hidden)
    for i in shard.layers:
        sparse = config.moe is not None and i in config.moe.layers
        linears = attention | (_mixture_linears(config, shard.experts(i)) if sparse else mlp)
        for name, (out_features, in_features, bias) in linears.items():
            tensors[f"model.layers.{i}.{name}.weight"] = (out_features, in_features)
            if bias:
                tensors[f"model.layers.{i}.{name}.bias"] = (out_features,)
        for name, size in norms.items():
            tensors[f"model.layers.{i}.{name}.weight"] = (size,)
        moe = config.moe if sparse else None
        if moe is not None and moe.routing is not None and moe.routing.scoring == "sigmoid":
            tensors[f"model.layers.{i}.{moe.block}.gate.e_score_correction_bias"] = (moe.num_experts,)
        if config.sinks:
            tensors[f"model.layers.{i}.self_attn.sinks"] = (config.num_heads,)
    if shard.is_last:
        tensors["model.norm.weight"] = (hidden,)
    if shard.is_last and not tied:
        tensors["lm_head.weight"] = (config.vocab_size, hidden)
    return tensors


def _latent_linears(
    config: ModelConfig, latent: LatentConfig
) -> tuple[dict[str, tuple[int, int, bool]], dict[str, int]]:
    """Return the matrices, (out, in, has bias), and the norms of latent attention."""
    hidden, queries = config.hidden_size, config.num_heads * (latent.nope_dim + latent.rope_dim)
    latents = latent.kv_rank + latent.rope_dim
    linears = {
        "self_attn.kv_a_proj_with_mqa": (latents, hidden, config.qkv_bias),
        "self_attn.kv_b_proj": (config.num_heads * (latent.nope_dim + latent.v_dim), latent.kv_rank, False),
        "self_attn.o_proj": (hidden, config.num_heads * latent.v_dim, config.o_bias),
    }
    norms = {"self_attn.kv_a_layernorm": latent.kv_rank}
    if not latent.q_rank:
        return linears | {"self_attn.q_proj": (queries, hidden, False)}, norms
    linears["self_attn.q_a_proj"] = (latent.q_rank, hidden, config.qkv_bias)
    linears["self_attn.q_b_proj"] = (queries, latent.q_rank, False)
    return linears, norms | {"self_attn.q_a_layernorm": latent.q_rank}


def _mixture_linears(config: ModelConfig, experts: tuple[int, ...]) -> dict[str, tuple[int, int, bool]]:
    """Return the matrices of a mixture with these experts: (out, in, has bias)."""
    moe, hidden = config.moe, config.hidden_size
    assert moe is not None
    linears = {f"{moe.block}.gate": (moe.num_experts, hidden, moe.bias)}
    gate, up, down = moe.projections
    mlps = [(f"{moe.block}.experts.{e}", moe.expert_inter) for e in experts]
    if moe.shared_inter:
        if moe.shared == "shared_expert":
            linears[f"{moe.block}.shared_expert_gate"] = (1, hidden, False)
        mlps.append((f"{moe.block}.{moe.shared}", moe.shared_inter))
    for name, inter in mlps:
        linears[f"{name}.{gate}"] = linears[f"{name}.{up}"] = (inter, hidden, moe.bias)
        linears[f"{name}.{down}"] = (hidden, inter, moe.bias)
    return linears
