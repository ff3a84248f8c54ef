"""The face of Moonpool: the command line, a whole cluster on this machine (``moonpool up``), and
``moonpool.connect``, the client of its store nodes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moonpool.objects import connect

__all__ = ["connect"]


def __getattr__(name: str) -> Any:
    if name != "connect":
        raise AttributeError(f"module 'moonpool' has no attribute {name!r}")
    # Only when it is asked for: gRPC and numpy take half a second, and `moonpool --help` needs neither.
    from moonpool.objects import connect

    return connect
