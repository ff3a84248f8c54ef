"""Errors of requests; mapped to HTTP statuses once, in ``api.errors``."""

from __future__ import annotations

from collections.abc import Sequence

from moonpool.runtime.errors import MoonpoolError
from moonpool.runtime.failures import FailureClass


class ConductorError(MoonpoolError):
    """Base of all errors of ``conductor``."""

    failure = FailureClass.REQUEST


class RequestRejected(ConductorError):
    """Nothing was streamed: the cluster is full, or an SLO would be missed. Try again later."""

    code = "RESOURCE_EXHAUSTED"

    def __init__(self, reason: str, retry_after_s: float, stage: str = "nodes") -> None:
        """``stage``: limit (of requests or tokens), arrival or decode (an SLO), nodes (they refused)."""
        super().__init__(f"{reason}; try again in {max(retry_after_s, 0.1):.1f} s")
        self.reason = reason
        self.retry_after_s = retry_after_s
        self.stage = stage


class RequestInvalid(ConductorError):
    """No node can ever serve this request: it is too large, or a node found it invalid."""

    code = "INVALID_ARGUMENT"


class NoStructures(ConductorError):
    """The request's structure cannot be enforced: no node of a role can."""

    code = "UNIMPLEMENTED"

    def __init__(self, node_id: str) -> None:
        super().__init__(
            f"structured output is not supported: node {node_id} cannot enforce it, nor can another of its "
            "role; install moonpool[serve] there"
        )


class DuplicateRequest(ConductorError):
    """A request with this id is in flight; that one continues."""

    code = "ALREADY_EXISTS"

    def __init__(self, request_id: str) -> None:
        super().__init__(f"request {request_id} is in flight already: ids must be unique")


class ConductorClosed(ConductorError):
    """The conductor is shutting down; the request was stopped on all nodes."""

    code = "UNAVAILABLE"
    failure = FailureClass.CONDUCTOR

    def __init__(self) -> None:
        super().__init__("the conductor is shutting down: send the request to another one")


class NoNodes(ConductorError):
    """No node of ``role`` was available within the time that requests wait for one."""

    code = "UNAVAILABLE"
    failure = FailureClass.NODE

    def __init__(self, role: str, waited_s: float, why: str = "", retry_after_s: float = 1.0) -> None:
        """``why``: there is none."""
        said = why or "start one, or see /v1/cluster"
        super().__init__(f"no {role} node is available (waited {waited_s:.1f} s): {said}")
        self.role = role
        self.retry_after_s = retry_after_s


class OutsideRegions(ConductorError):
    """The tenant is confined to regions, and this conductor is in none of them. Nothing was done."""

    code = "UNAVAILABLE"

    def __init__(self, why: str) -> None:
        super().__init__(f"{why}: send the request to a conductor there")


class DeadlineExceeded(ConductorError):
    """The request's deadline passed. Tokens streamed until then are valid."""

    code = "DEADLINE_EXCEEDED"

    def __init__(self, limit_s: float, num_tokens: int, *, waited: bool = False) -> None:
        """``waited``: it was not its turn, and nothing was computed."""
        passed = f"the request's deadline of {limit_s:g} s passed after {num_tokens} tokens"
        super().__init__(f"the request waited {limit_s:g} s and it was not its turn" if waited else passed)
        self.num_tokens = num_tokens


class RequestFailed(ConductorError):
    """The request was placed ``attempts`` times without another token; ``failure``: the last one's class."""

    failure = FailureClass.NODE

    def __init__(
        self, cause: str, attempts: int, num_tokens: int, failure: FailureClass = FailureClass.NODE
    ) -> None:
        super().__init__(
            f"gave up at token {num_tokens} after {attempts} placements; the last failed with: {cause}"
        )
        self.failure = failure
        self.attempts = attempts


class RequestEndsLives(ConductorError):
    """Nodes lost a rank or their device each time they computed this request: it is not tried again."""

    code = "ABORTED"

    def __init__(self, ended: Sequence[str]) -> None:
        """``ended``: how each life ended."""
        super().__init__(
            f"the request is refused: {len(ended)} nodes lost a rank or their device in a step with it "
            f"({'; '.join(ended)})"
        )


class MigrationFailed(ConductorError):
    """A running request did not move. It goes on where it was, or has ended."""

    code = "FAILED_PRECONDITION"

    def __init__(self, request_id: str, target: str, reason: str) -> None:
        super().__init__(f"request {request_id} was not moved to {target or 'another node'}: {reason}")
        self.reason = reason


class StreamForged(ConductorError):
    """The id of an event was not made by this cluster. No stream was looked up."""

    code = "PERMISSION_DENIED"

    def __init__(self) -> None:
        super().__init__("no conductor of this cluster has made what this stream is to go on from")


class StreamGone(ConductorError):
    """A stream can no longer be resumed, or never could."""

    code = "NOT_FOUND"

    def __init__(self) -> None:
        super().__init__("this stream can no longer be resumed: send the request anew, without Last-Event-ID")
