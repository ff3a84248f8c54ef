"""Everything that can go wrong while bytes move, as nouns with their facts.

``SpanError`` and ``DescriptorError`` are the caller's to fix: nothing was posted. The others end a
batch that was posted: the bytes of its destination spans are undefined, and the transport no longer touches
them.
"""

from __future__ import annotations

from moonpool.runtime.errors import MoonpoolError


class TransferError(MoonpoolError):
    """Base of all errors of this package."""


class SpanError(TransferError):
    """A span names bytes that may not be moved. Nothing was posted."""

    code = "INVALID_ARGUMENT"

    def __init__(self, index: int, reason: str) -> None:
        super().__init__(f"span {index}: {reason}")
        self.index = index
        self.reason = reason


class RegionError(TransferError):
    """A region is unknown to its owner, or was closed. A batch that was reading it is void."""

    code = "NOT_FOUND"

    def __init__(self, region_id: int, reason: str) -> None:
        super().__init__(f"region {region_id}: {reason}")
        self.region_id = region_id
        self.reason = reason


class DescriptorError(TransferError):
    """Bytes that should be an ``AgentDescriptor`` are not."""

    code = "INVALID_ARGUMENT"


class PeerLost(TransferError):
    """The peer's process is gone, or cannot be reached by any path."""

    code = "UNAVAILABLE"

    def __init__(self, agent_id: str, reason: str) -> None:
        super().__init__(f"peer {agent_id} is lost: {reason}")
        self.agent_id = agent_id
        self.reason = reason


class StaleEpoch(TransferError):
    """Another incarnation of the agent answers at this address: what was known of the old one is void."""

    code = "FAILED_PRECONDITION"

    def __init__(self, agent_id: str, expected: int, found: int) -> None:
        super().__init__(
            f"peer {agent_id} was expected at epoch {expected}, but another incarnation (epoch {found}) "
            "answers"
        )
        self.agent_id = agent_id
        self.expected = expected
        self.found = found


class AccessDenied(TransferError):
    """The peer does not know the cluster's secret, or says that we do not."""

    code = "PERMISSION_DENIED"

    def __init__(self, agent_id: str, reason: str) -> None:
        super().__init__(f"peer {agent_id} refused: {reason}; transfer.secret must be the same on all nodes")
        self.agent_id = agent_id
        self.reason = reason


class DeadlineExceeded(TransferError):
    """The deadline passed first."""

    code = "DEADLINE_EXCEEDED"

    def __init__(self, agent_id: str, deadline_s: float, what: str) -> None:
        super().__init__(f"{what} with peer {agent_id} was not done within {deadline_s:g} s")
        self.agent_id = agent_id
        self.deadline_s = deadline_s


class ChecksumMismatch(TransferError):
    """Bytes arrived that are not the ones promised."""

    code = "DATA_LOSS"

    def __init__(self, index: int, expected: int, found: int) -> None:
        super().__init__(f"span {index}: checksum {found:#018x} arrived, {expected:#018x} was promised")
        self.index = index
        self.expected = expected
        self.found = found


class PathFailed(TransferError):
    """One path to a peer failed; the batch goes on over the next one. Seen by callers only as a cause."""

    code = "UNAVAILABLE"

    def __init__(self, path: str, reason: str, *, interrupted: bool = False) -> None:
        super().__init__(f"path {path}: {reason}")
        self.path = path
        self.reason = reason
        # True: another batch that shared the connection was stopped; the path itself is sound.
        self.interrupted = interrupted


class NoPath(TransferError):
    """Nothing that both sides offer moves bytes between memory of these kinds. Nothing was moved."""

    code = "FAILED_PRECONDITION"

    def __init__(self, agent_id: str, paths: list[str]) -> None:
        tried = ", ".join(paths) or "no path"
        super().__init__(
            f"{tried} to peer {agent_id} cannot move bytes of such memory; "
            "through host memory shm and tcp can (transfer.transports)"
        )
        self.agent_id = agent_id


class AgentClosed(TransferError):
    """The agent was closed; it moves nothing any more."""

    code = "UNAVAILABLE"

    def __init__(self, agent_id: str) -> None:
        super().__init__(f"transfer agent {agent_id} is closed")
        self.agent_id = agent_id
