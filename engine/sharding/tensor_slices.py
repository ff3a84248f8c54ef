"""Which part of each of the checkpoint's tensors a rank reads."""

from __future__ import annotations

from moonpool.engine.checkpoint.config import ModelConfig
from moonpool.engine.sharding.parallel_plan import Shard

#: One slice for each dimension that is cut, from the first on; empty: the whole tensor.
Part = tuple[slice, ...]

_ALL = slice(None)
_MLP_ROWS = ("gate_proj", "up_proj", "w1", "w3")
_MLP_COLUMNS = ("down_proj", "w2")


class TensorSlices:
    """The parts of one rank, by tensor name.

    Matrices that read what every rank has are split by rows (their outputs are a rank's own), those that read
    a rank's own by columns (their outputs are then summed over the ranks).
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
        self._columns = {"o_proj": heads}
        # By the module an MLP lies in: a layer's own is `mlp`.
        self._inter = {
            "mlp": _scaled(shard.inter, 1),
            "experts": _scaled(shard.expert_inter, 1),
            "shared_expert": _scaled(shard.shared_inter, 1),
        }

    def __call__(self, name: str) -> Part:
        """``name``: such as model.layers.0.self_attn.q_proj.weight."""
        if self._whole:
            return ()
        *path, module, kind = name.split(".")
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
