"""The work and memory of a model's layers in a decode step, known before any is loaded."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from moonpool.engine.checkpoint.config import ModelConfig
from moonpool.engine.checkpoint.quantisation import AtLoad
from moonpool.engine.checkpoint.weights import Checkpoint
from moonpool.engine.sharding.stage_cut import StageMemory, cut
from moonpool.engine.sharding.tensor_slices import expected_tensors
from moonpool.runtime.errors import ConfigError

_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_EXPERT = re.compile(r"\.experts\.\d+\.")
_ROUNDED_NBYTES = {"int8": 1.0, "int4": 0.5}
# Multiplications in the time of reading a byte of weights: about what CPUs with bf16 or AVX-512, and GPUs
# since the A100, reach. Only mixtures and weights in few bits depend on it: all else has as many products
# a byte in every matrix.
_PRODUCTS_PER_BYTE = {"cpu": 8.0, "cuda": 100.0}


@dataclass(frozen=True, slots=True)
class StepShape:
    """rows: tokens of one micro-batch. has_head: whether each has logits, as in decoding; a prompt has them
    for one token only. itemsize: bytes of an element that is computed. device: cpu or cuda."""

    rows: int
    has_head: bool
    itemsize: int
    device: str


@dataclass(frozen=True, slots=True)
class ModelWork:
    """work: the time of reading the weights and of multiplying by them, in bytes that are read meanwhile.
    Attention over the context is not in it, nor are norms."""

    layers: tuple[float, ...]
    head: float
    layers_nbytes: tuple[float, ...]
    embedding_nbytes: float
    head_nbytes: float

    @classmethod
    def of(cls, config: ModelConfig, step: StepShape) -> ModelWork:
        """Raises CheckpointError where the bytes of quantised weights cannot be read."""
        tensors = expected_tensors(config)
        in_layer, in_head = _element_nbytes(config, tensors, step.itemsize)
        ratio = step.rows / _PRODUCTS_PER_BYTE[step.device]
        work, nbytes = [0.0] * config.num_layers, [0.0] * config.num_layers
        for name, shape in tensors.items():
            if (found := _LAYER.match(name)) is None:
                continue
            elements, i = prod(shape), int(found[1])
            nbytes[i] += elements * in_layer
            read, multiplied = 1.0, 1.0
            if config.moe is not None and _EXPERT.search(name):
                multiplied = config.moe.top_k / config.moe.num_experts
                read = 1.0 - (1.0 - multiplied) ** step.rows  # of the experts, if tokens choose evenly
            work[i] += elements * (read * in_layer + multiplied * ratio)
        words = config.vocab_size * config.hidden_size
        head = words * (in_head + ratio) if step.has_head else 0.0
        return cls(tuple(work), head, tuple(nbytes), words * step.itemsize, words * in_head)


def balanced_layers(
    config: ModelConfig, num_stages: int, step: StepShape, *, tp: int = 1, limit_nbytes: float | None = None
) -> tuple[int, ...]:
    """Return the layers of each stage, such that the slowest stage has the least work.

    limit_nbytes: of weights on one of the ``tp`` ranks of a stage; None: no limit is known. Raises
    ConfigError where no cut holds it.
    """
    work = ModelWork.of(config, step)
    memory = None
    if limit_nbytes is not None:
        memory = StageMemory(work.layers_nbytes, work.embedding_nbytes, work.head_nbytes, limit_nbytes * tp)
    found = cut(work.layers, work.head, num_stages, memory)
    if found is None:
        total = (sum(work.layers_nbytes) + work.embedding_nbytes + work.head_nbytes) / 1e9
        raise ConfigError(
            f"engine.parallel: {total:.1f} GB of weights do not fit {num_stages} stages of {tp} ranks with "
            f"room for {(limit_nbytes or 0) / 1e9:.1f} GB each: raise pp or tp, or engine.gpu_memory",
            "engine.parallel.pp",
        )
    return found


def _element_nbytes(
    config: ModelConfig, tensors: Mapping[str, tuple[int, ...]], itemsize: int
) -> tuple[float, float]:
    """Return the mean bytes of an element of the layers, and of the head."""
    if config.weights is None:
        return itemsize, itemsize
    if isinstance(config.weights, AtLoad):
        return _ROUNDED_NBYTES[config.weights.kind], 1.0
    elements = sum(prod(shape) for name, shape in tensors.items() if _LAYER.match(name))
    return Checkpoint(config.path).shapes.nbytes("model.layers.") / elements, itemsize
