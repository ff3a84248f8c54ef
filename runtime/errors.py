"""The root of every error Moonpool raises on purpose.

Each package grows one branch below ``MoonpoolError``. An error is a noun a caller can act on and carries its
facts as attributes; it is turned into a gRPC status or an HTTP answer once, at that boundary.
"""

from __future__ import annotations


class MoonpoolError(Exception):
    """Base of all. ``str(error)`` is a sentence for a person: what happened, where, and what to do."""


class ConfigError(MoonpoolError):
    """A configuration value is unknown, of the wrong type, or impossible. Nothing has been started."""


class NodeUnavailable(MoonpoolError):
    """A node did not answer, or went away during a call. The call may have had an effect there."""

    def __init__(self, node_id: str, reason: str) -> None:
        super().__init__(f"node {node_id} is unavailable: {reason}")
        self.node_id = node_id
        self.reason = reason
