"""Conversion to the types that options have. Importing this takes 0.1 s, for pydantic."""

from __future__ import annotations

from typing import Any

from pydantic import ByteSize, FiniteFloat, TypeAdapter

_SIZE = TypeAdapter(ByteSize)
_ADAPTERS: dict[Any, TypeAdapter[Any]] = {
    float: TypeAdapter(FiniteFloat),
    **{kind: TypeAdapter(kind) for kind in (int, bool, str, tuple[str, ...])},
}


def to_size(text: str) -> int:
    """A number of bytes, from a text such as "4MiB". Raises ValueError."""
    return int(_SIZE.validate_python(text))


def to_type(kind: Any, value: Any, *, strict: bool) -> Any:
    """``value`` as a ``kind``; ``strict``: it must be one already. Raises ValueError, also for inf, nan."""
    return _ADAPTERS[kind].validate_python(value, strict=strict)
