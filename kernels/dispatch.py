"""Which form of an operation runs: decided once, at import, by what this machine has."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar, cast

from kernels import reference
from kernels.checks import checked
from kernels.cpu.library import load

Form = TypeVar("Form", bound=Callable[..., Any])


def best(plain: Form) -> Form:
    """The fastest form of the operation whose torch form is ``plain``, with its signature."""
    form = plain
    if load() is not None:
        from kernels.cpu import ops

        form = cast(Form, getattr(ops, plain.__name__))
    return checked(form) if os.environ.get("MOONPOOL_KERNELS", "") == "checked" else form


argmax_rows = best(reference.argmax_rows)
paged_decode_attention = best(reference.paged_decode_attention)
paged_prefill_attention = best(reference.paged_prefill_attention)
rms_norm = best(reference.rms_norm)
rotate_and_write = best(reference.rotate_and_write)
silu_mul = best(reference.silu_mul)
write_kv = best(reference.write_kv)
