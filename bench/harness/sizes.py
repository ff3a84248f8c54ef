"""Sizes in bytes as people write them: 64KiB."""

from __future__ import annotations

from typing import Any

import click

from moonpool.runtime.config.conversion import to_size

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
_UNITS = ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB"))


def size_name(nbytes: int) -> str:
    for unit, name in _UNITS:
        if nbytes >= unit and nbytes % unit == 0:
            return f"{nbytes // unit}{name}"
    return f"{nbytes}B"


class _Size(click.ParamType[int]):
    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            nbytes = value if isinstance(value, int) else to_size(value)
        except ValueError:
            self.fail(f"sizes look like 64KiB, not {value!r}", param, ctx)
        if nbytes < 1:
            self.fail(f"a size is one byte or more, not {value!r}", param, ctx)
        return nbytes


SIZE = _Size()
"""The type of an option: bytes."""
