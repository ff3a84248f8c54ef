"""Sizes in bytes as people write them: 64KiB."""

from __future__ import annotations

from typing import Any

import click

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
_UNITS = ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB"))


def size_name(nbytes: int) -> str:
    for unit, name in _UNITS:
        if nbytes >= unit and nbytes % unit == 0:
            return f"{nbytes // unit}{name}"
    return f"{nbytes}B"


def size_of(name: str) -> int:
    """Bytes of ``64KiB`` and the like. Raises ValueError."""
    for unit, suffix in _UNITS:
        if name.endswith(suffix):
            return int(name.removesuffix(suffix)) * unit
    return int(name.removesuffix("B"))


class _Size(click.ParamType[int]):
    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            nbytes = value if isinstance(value, int) else size_of(value)
        except ValueError:
            self.fail(f"sizes look like 64KiB, not {value!r}", param, ctx)
        if nbytes < 1:
            self.fail(f"a size is one byte or more, not {value!r}", param, ctx)
        return nbytes


SIZE = _Size()
"""The type of an option: bytes."""
