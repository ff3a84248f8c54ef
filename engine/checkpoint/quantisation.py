"""Weights in few bits: the method of a checkpoint or of a load, and what it makes of stored tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from moonpool.engine.checkpoint import methods
from moonpool.engine.checkpoint.weights import Derived, Shapes
from moonpool.engine.errors import CheckpointError, UnsupportedModel
from moonpool.kernels.reference import QuantisedWeight


class Method(Protocol):
    @property
    def name(self) -> str: ...

    def weight(self, module: str, shape: tuple[int, int], stored: Shapes) -> Derived | None:
        """How ``module``'s weight [out, in] is made from what the checkpoint stores; None: it is stored
        plain. Raises CheckpointError where shapes contradict each other."""
        ...


def method_of(path: Path, words: object) -> Method:
    """The method that ``quantization_config`` names. Raises UnsupportedModel with the known ones."""
    name = words.get("quant_method") if isinstance(words, dict) else None
    known = sorted(module.name.replace("_", "-") for module in iter_modules(methods.__path__))
    if name not in known:
        raise UnsupportedModel(
            path, f"quantization_config: quant_method {name!r} is not one of {', '.join(known)}"
        )
    module = import_module(f"{methods.__name__}.{name.replace('-', '_')}")
    method: Method = module.read(path, words)
    return method


# Inputs with one scale; see docs/decisions/kernels.md.
_INT4_GROUP = 64
# Read as plain tensors, or too small to matter and decisive: routers.
_PLAIN = ("gate", "shared_expert_gate", "kv_b_proj")


@dataclass(frozen=True, slots=True)
class AtLoad:
    """Plain weights are rounded when they are loaded: the layers' to ``kind``, the head to 8 bits.

    A matrix is rounded before it is cut, so that weights do not depend on the parallel plan.
    """

    kind: Literal["int8", "int4"]

    @property
    def name(self) -> str:
        return f"{self.kind} at load"

    def derive(
        self, expected: Mapping[str, tuple[int, ...]], derived: Mapping[str, Derived]
    ) -> dict[str, Derived]:
        """``derived`` with every matrix of a layer in few bits. expected: names and shapes of all tensors."""
        made = dict(derived)
        for name, shape in expected.items():
            module = name.removesuffix(".weight")
            is_matrix = len(shape) == 2 and module != name and name.startswith("model.layers.")
            if is_matrix and not module.endswith(_PLAIN):
                plain = derived.get(name)
                sources: Mapping[str, tuple[int, ...]] = {name: shape} if plain is None else plain.sources
                made[name] = Derived(sources, partial(self._round, None if plain is None else plain.make))
        return made

    def _round(self, make: Callable[..., Any] | None, *stored: Tensor) -> QuantisedWeight:
        plain = stored[0] if make is None else make(*stored)
        return QuantisedWeight.of(plain, self.kind, _INT4_GROUP if self.kind == "int4" else 0)

    def head(self, words: Tensor) -> QuantisedWeight:
        """words: [words of the shard, hidden]."""
        return QuantisedWeight.of(words, "int8")


def derive_stored(
    method: Method, expected: Mapping[str, tuple[int, ...]], derived: Mapping[str, Derived], stored: Shapes
) -> dict[str, Derived]:
    """``derived`` with the matrices that are stored in few bits, also those it makes others from."""
    made = dict(derived)
    for name, shape in expected.items():
        plain = derived.get(name)
        if len(shape) != 2 or not name.endswith(".weight"):
            continue
        if plain is None:
            found = method.weight(name.removesuffix(".weight"), (shape[0], shape[1]), stored)
            if found is not None:
                made[name] = found
        elif len(plain.sources) == 1:
            ((source, size),) = plain.sources.items()
            found = None
            if len(size) == 2:
                found = method.weight(source.removesuffix(".weight"), (size[0], size[1]), stored)
            if found is not None:
                made[name] = Derived(found.sources, partial(_both, found.make, plain.make))
    return made


def _both(first: Callable[..., Any], then: Callable[..., Any], *stored: Tensor) -> Any:
    return then(first(*stored))


# ---------------------------------------------------------------- what methods share


def read_words(path: Path, words: Mapping[str, Any], *needed: str) -> None:
    """Raise CheckpointError unless quantization_config has all words ``needed``."""
    for word in needed:
        if words.get(word) is None:
            raise CheckpointError(path, f"config.json: quantization_config has no {word}")


def wanted_bits(path: Path, bits: object) -> int:
    if bits not in (4, 8):
        raise UnsupportedModel(path, f"quantization_config: weights of {bits} bits: only 4 and 8 are read")
    assert isinstance(bits, int)
    return bits


def unpacked(words: Tensor, bits: int) -> Tensor:
    """int32 [n, m] → uint8 [n, m × codes of a word], the codes in the low bits first."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    codes = words.contiguous()[..., None] >> shifts & (1 << bits) - 1
    return codes.to(torch.uint8).flatten(-2)


def ordered(weight: QuantisedWeight, groups: Tensor | None, path: Path, module: str) -> QuantisedWeight:
    """``weight`` with the columns of a group together. groups: int32 [in], the group of each column."""
    ins, size = weight.shape[1], weight.group
    in_turn = torch.arange(ins, dtype=torch.int32) // size
    if groups is None or torch.equal(groups, in_turn):
        return weight
    order = torch.argsort(groups, stable=True)
    if not torch.equal(groups[order], in_turn):
        raise CheckpointError(path, f"{module}: g_idx has groups that are not of {size} inputs")
    return replace(weight, codes=weight.codes[:, order], order=order)


def float8(
    module: str,
    shape: tuple[int, int],
    scale: str,
    scale_shape: tuple[int, ...],
    block: tuple[int, int] | None,
) -> Derived:
    """A float8 matrix with one scale, one an output, or one for each ``block`` of outputs and inputs."""
    outs, ins = shape
    if block is not None and len(scale_shape) == 2:
        scale_shape = -(-outs // block[0]), -(-ins // block[1])  # as it must be: checked at reading
    elif scale_shape not in ((), (1,), (1, 1), (outs, 1)):
        scale_shape = (outs, 1)

    def make(codes: Tensor, scales: Tensor) -> QuantisedWeight:
        wide = scales.float()
        if block is not None and wide.dim() == 2:
            every, group = wide.repeat_interleave(block[0], 0)[:outs], block[1]
        else:
            every, group = wide.reshape(-1, 1).expand(outs, 1), ins
        return QuantisedWeight("fp8", codes.view(torch.uint8), every.contiguous(), group)

    return Derived({f"{module}.weight": shape, scale: scale_shape}, make)
