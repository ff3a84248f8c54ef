"""``MoonpoolConnector``: vLLM keeps, shares and finds KV blocks in Moonpool's store. docs/vllm.md shows how.

It is imported when it is asked for: the other modules here need no vLLM.
"""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    if name != "MoonpoolConnector":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from moonpool.connectors.vllm.connector import MoonpoolConnector

    return MoonpoolConnector
