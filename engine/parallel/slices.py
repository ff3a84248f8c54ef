"""Which part of each of the checkpoint's tensors a rank reads."""

from __future__ import annotations

from engine.config import ModelConfig
from engine.parallel.plan import Shard

#: One slice for each dimension that is cut, from the first on; empty: the whole tensor.
Part = tuple[slice, ...]

_ALL = slice(None)


class Slices:
    """The parts of one rank, by tensor name.

    Matrices that read what every rank has are split by rows (their outputs are a rank's own), those that read
    a rank's own by columns (their outputs are then summed over the ranks).
    """

    def __init__(self, config: ModelConfig, shard: Shard) -> None:
        size = config.head_dim
        heads, kv_heads = _scaled(shard.heads, size), _scaled(shard.kv_heads, size)
        inter, vocab = _scaled(shard.inter, 1), _scaled(shard.vocab, 1)
        self._whole = shard.tp == 1
        self._rows = {
            "q_proj": heads,
            "k_proj": kv_heads,
            "v_proj": kv_heads,
            "gate_proj": inter,
            "up_proj": inter,
            "embed_tokens": vocab,
            "lm_head": vocab,
        }
        self._columns = {"o_proj": heads, "down_proj": inter}

    def __call__(self, name: str) -> Part:
        """``name``: such as model.layers.0.self_attn.q_proj.weight."""
        path, _, kind = name.rpartition(".")
        module = path.rpartition(".")[2]
        if self._whole:
            return ()
        if module in self._rows:
            return (self._rows[module],)
        if module in self._columns and kind == "weight":
            return (_ALL, self._columns[module])
        return ()


def _scaled(run: range, size: int) -> slice:
    return slice(run.start * size, run.stop * size)
