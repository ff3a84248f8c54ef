"""Which form of an operation runs: decided once, at import, by what this machine has."""

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


def best(plain: Form) -> Form:
    """The fastest form of the operation whose torch form is ``plain``, with its signature."""
    form = _cpu_form(plain)
    if torch.cuda.is_available():
        form = _by_device(form, _gpu_form(plain))
    return checked(form) if mode() == "checked" else form


def _cpu_form(plain: Form) -> Form:
    if load() is None:
        return plain
    from moonpool.kernels.cpu import experts as expert_ops
    from moonpool.kernels.cpu import operations as ops

    for module in (ops, expert_ops):
        form = getattr(module, plain.__name__, None)
        if form is not None:
            return cast(Form, form)
    return plain


def _gpu_form(plain: Form) -> Form:
    if mode() == "torch" or find_spec("triton") is None:
        return plain
    for module in ("decode", "prefill", "merge", "rows", "kv", "experts", "adapters"):
        form = getattr(import_module(f"moonpool.kernels.triton.{module}"), plain.__name__, None)
        if form is not None:
            return cast(Form, form)
    return plain


def _by_device(cpu: Form, other: Form) -> Form:
    """``cpu`` where the first tensor lies in main memory, ``other`` anywhere else."""

    @functools.wraps(cpu)
    def call(first: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return (cpu if first.is_cpu else other)(first, *args, **kwargs)

    return cast(Form, call)


add_lora = best(reference.add_lora)
argmax_rows = best(reference.argmax_rows)
combine_experts = best(reference.combine_experts)
group_by_expert = best(reference.group_by_expert)
group_rows = best(reference.group_rows)
grouped_matmul = best(reference.grouped_matmul)
merge_attention_states = best(reference.merge_attention_states)
paged_decode_attention = best(reference.paged_decode_attention)
paged_prefill_attention = best(reference.paged_prefill_attention)
rms_norm = best(reference.rms_norm)
rotate_and_write = best(reference.rotate_and_write)
route_experts = best(reference.route_experts)
silu_mul = best(reference.silu_mul)
write_kv = best(reference.write_kv)
