"""The errors of transfers.

``SpanError`` and ``DescriptorError`` concern the caller's arguments: nothing was posted. The others end a
posted batch: the bytes of its destination spans are undefined, and the transport no longer touches them.
"""

from __future__ import annotations

from typing import Any

from moonpool.runtime.errors import MoonpoolError
from moonpool.runtime.failures import FailureClass


class TransferError(MoonpoolError):
    """Base of all errors of this package. ``facts`` of an error are plain JSON types; ``of_facts`` makes it
    again in another process."""

    failure = FailureClass.TRANSFER

    def facts(self) -> dict[str, Any]:
        return {"type": type(self).__name__, "text": str(self), "has": vars(self)}

    @classmethod
    def of_facts(cls, facts: dict[str, Any], prefix: str) -> TransferError:
        """``prefix``: put before its text. An unknown type becomes ``TransferError``."""
        kind = next((each for each in cls.__subclasses__() if each.__name__ == facts["type"]), cls)
        error = kind.__new__(kind)
        error.args = (prefix + facts["text"],)
        vars(error).update(facts["has"])
        return error


class SpanError(TransferError):
    """A span names bytes that may not be moved. Nothing was posted."""

    code = "INVALID_ARGUMENT"
    failure = FailureClass.REGION

    def __init__(self, index: int, reason: str) -> None:
        super().__init__(f"span {index}: {reason}")
        self.index = index
        self.reason = reason


class RegionError(TransferError):
    """A region is unknown to its owner, or was closed."""

    code = "NOT_FOUND"
    failure = FailureClass.REGION

    def __init__(self, region_id: int, reason: str) -> None:
        super().__init__(f"region {region_id}: {reason}")
        self.region_id = region_id
        self.reason = reason


class DescriptorError(TransferError):
    """Bytes are not a valid ``AgentDescriptor``."""

    code = "INVALID_ARGUMENT"


class PeerLost(TransferError):
    """The peer's process is gone, or cannot be reached by any path."""

    code = "UNAVAILABLE"

    def __init__(self, agent_id: str, reason: str) -> None:
        super().__init__(f"peer {agent_id} is lost: {reason}")
        self.agent_id = agent_id
        self.reason = reason


class PeerBusy(PeerLost):
    """The peer refuses one more connection; those that are open go on."""

    def __init__(self, agent_id: str) -> None:
        super().__init__(agent_id, "it has no connection to spare")


class StaleEpoch(TransferError):
    """Another incarnation of the agent answers at this address. Connect with its new descriptor."""

    code = "FAILED_PRECONDITION"
    failure = FailureClass.NODE

    def __init__(self, agent_id: str, expected: int, found: int) -> None:
        super().__init__(
            f"peer {agent_id} was expected at epoch {expected}, but epoch {found} answers: it was restarted"
        )
        self.agent_id = agent_id
        self.expected = expected
        self.found = found


class AccessDenied(TransferError):
    """The peer and this agent do not share the cluster's key, or the peer is not for this agent's role."""

    code = "PERMISSION_DENIED"

    def __init__(self, agent_id: str, reason: str) -> None:
        super().__init__(
            f"peer {agent_id} refused: {reason}; security.cluster_key must be the same on all nodes"
        )
        self.agent_id = agent_id
        self.reason = reason


class DeadlineExceeded(TransferError):
    """The deadline has passed."""

    code = "DEADLINE_EXCEEDED"

    def __init__(self, agent_id: str, deadline_s: float, what: str) -> None:
        super().__init__(f"{what} with peer {agent_id} was not done within {deadline_s:g} s")
        self.agent_id = agent_id
        self.deadline_s = deadline_s


class ChecksumMismatch(TransferError):
    """The bytes that arrived have another checksum than expected."""

    code = "DATA_LOSS"

    def __init__(self, index: int, expected: int, found: int) -> None:
        super().__init__(f"span {index}: checksum {found:#018x}, expected {expected:#018x}")
        self.index = index
        self.expected = expected
        self.found = found


class PathFailed(TransferError):
    """A path to a peer failed, so the batch tries the next one. Callers see it only as a cause."""

    code = "UNAVAILABLE"

    def __init__(self, path: str, reason: str, *, interrupted: bool = False) -> None:
        super().__init__(f"path {path}: {reason}")
        self.path = path
        self.reason = reason
        # True: another batch on the same connection was stopped. The path itself works.
        self.interrupted = interrupted


class NoPath(TransferError):
    """No common transport moves bytes between these kinds of memory. Nothing was moved."""

    code = "FAILED_PRECONDITION"

    def __init__(self, agent_id: str, paths: list[str]) -> None:
        tried = ", ".join(paths) or "no path"
        super().__init__(
            f"{tried} to peer {agent_id} cannot move device memory; add shm or tcp to transfer.transports"
        )
        self.agent_id = agent_id


class GrantLapsed(TransferError):
    """The grant to read or write another process's memory has ended. Nothing is written under it any more,
    and what was read under it must not be used."""

    code = "FAILED_PRECONDITION"
    failure = FailureClass.REGION


class AgentClosed(TransferError):
    """The agent was closed."""

    code = "UNAVAILABLE"

    def __init__(self, agent_id: str) -> None:
        super().__init__(f"transfer agent {agent_id} is closed")
        self.agent_id = agent_id
