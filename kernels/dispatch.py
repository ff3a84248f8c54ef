"""Choice of the form of each operation: made once, at import, for this machine."""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any, TypeVar, cast

import torch

from moonpool.kernels import reference
from moonpool.kernels.checks import checked
from moonpool.kernels.cpu.library import load
from moonpool.kernels.mode import mode

Form = TypeVar("Form", bound=Callable[..., Any])

_TRITON_MODULES = (
    "decode",
    "prefill",
    "merge",
    "rows",
    "kv",
    "experts",
    "adapters",
    "quantised",
    "checksums",
)


def best(plain: Form) -> Form:
    """The fastest form of the operation with the torch form ``plain``; it has the same signature."""
    form = plain if load() is None else _find("cpu", ("operations",), plain)
    if torch.cuda.is_available():
        has_triton = mode() != "torch" and find_spec("triton") is not None
        form = _by_device(form, _find("triton", _TRITON_MODULES, plain) if has_triton else plain)
    return checked(form) if mode() == "checked" else form


def _find(package: str, modules: tuple[str, ...], plain: Form) -> Form:
    """The function of the same name in one of ``modules``, or ``plain``."""
    for module in modules:
        form = getattr(import_module(f"moonpool.kernels.{package}.{module}"), plain.__name__, None)
        if form is not None:
            return cast(Form, form)
    return plain


def _by_device(cpu: Form, other: Form) -> Form:
    """A function that calls ``cpu`` if its first tensor is in host memory, else ``other``."""

    @functools.wraps(cpu)
    def call(first: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return (cpu if first.is_cpu else other)(first, *args, **kwargs)

    return cast(Form, call)


add_lora = best(reference.add_lora)
argmax_rows = best(reference.argmax_rows)
checksum_spans = best(reference.checksum_spans)
combine_experts = best(reference.combine_experts)
forbid_tokens = best(reference.forbid_tokens)
group_by_expert = best(reference.group_by_expert)
group_rows = best(reference.group_rows)
grouped_matmul = best(reference.grouped_matmul)
merge_attention_states = best(reference.merge_attention_states)
paged_decode_attention = best(reference.paged_decode_attention)
paged_prefill_attention = best(reference.paged_prefill_attention)
quantised_matmul = best(reference.quantised_matmul)
rms_norm = best(reference.rms_norm)
rotate_and_write = best(reference.rotate_and_write)
route_experts = best(reference.route_experts)
silu_mul = best(reference.silu_mul)
write_kv = best(reference.write_kv)
