"""Moonpool: KV-cache-centric LLM serving. ``moonpool.connect`` is the client of its store nodes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moonpool.objects import connect

__all__ = ["connect"]


def __getattr__(name: str) -> Any:
    if name != "connect":
        raise AttributeError(f"module 'moonpool' has no attribute {name!r}")
    # Lazily: gRPC and numpy take half a second, and `moonpool --help` needs neither.
    from moonpool.objects import connect

    return connect
