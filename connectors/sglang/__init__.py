"""``MoonpoolStorage``: SGLang's HiCache keeps, shares and finds pages in Moonpool's store.

docs/sglang.md shows how. It is imported when it is asked for: the other modules here need no SGLang.
"""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    if name != "MoonpoolStorage":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from moonpool.connectors.sglang.backend import MoonpoolStorage

    return MoonpoolStorage
