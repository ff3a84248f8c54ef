"""The root of all errors that Moonpool raises.

Each package has one branch below ``MoonpoolError``. Errors carry their facts as attributes; the RPC or HTTP
boundary maps them to a status.
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from moonpool.runtime.failures import FailureClass
from moonpool.runtime.redaction import redacted


class MoonpoolError(Exception):
    """Base of all errors. ``str(error)`` is a sentence: what happened, where, and what to do.

    ``code`` is the name of the gRPC status of a call that raises this error. ``failure`` says what failed:
    each branch of the tree has its own, and an error that stands for another has that one's. The sentence
    has no secrets.
    """

    code: ClassVar[str] = "INTERNAL"
    failure: FailureClass = FailureClass.WORKER

    def __init__(self, *sentence: object) -> None:
        super().__init__(*(redacted(part) if isinstance(part, str) else part for part in sentence))


class ConfigError(MoonpoolError):
    """A configuration value is unknown, of the wrong type or invalid. Nothing has been started."""

    code = "INVALID_ARGUMENT"
    failure = FailureClass.REQUEST

    def __init__(self, message: str, key: str = "") -> None:
        super().__init__(message)
        self.key = key


class PortInUse(MoonpoolError):
    """Another process listens on the address already. Nothing has been started."""

    code = "FAILED_PRECONDITION"
    failure = FailureClass.WORKER

    def __init__(self, host: str, port: int, option: str) -> None:
        super().__init__(
            f"port {port} on {host} is in use: stop the process that listens there, or set another {option}"
        )
        self.host = host
        self.port = port


class ChildFailed(MoonpoolError):
    """A child process ended or did not become ready. ``tail`` is the end of its log, if any."""

    failure = FailureClass.WORKER

    def __init__(self, name: str, what: str, log: Path | None = None, tail: str = "") -> None:
        where = f". The end of {log}:\n{tail.rstrip() or '(empty)'}" if log is not None else ""
        super().__init__(f"{name} {what}{where}")
        self.name = name
        self.log = log
        self.tail = tail


class LifeEnded(MoonpoolError):
    """A node lost a rank or its device in a step that computed this request. The node starts again."""

    code = "ABORTED"
    failure = FailureClass.GROUP

    def __init__(self, how: str, failure: FailureClass = FailureClass.GROUP) -> None:
        """``failure``: what was lost."""
        super().__init__(how)
        self.failure = failure


class NodeUnavailable(MoonpoolError):
    """A node did not answer or disconnected during a call. The call may have had an effect there."""

    code = "UNAVAILABLE"
    failure = FailureClass.NODE

    def __init__(self, node_id: str, reason: str) -> None:
        super().__init__(f"node {node_id} is unavailable: {reason}")
        self.node_id = node_id
        self.reason = reason


class RemoteError(MoonpoolError):
    """A node answered a call with an error: ``kind`` names its exception, ``status`` is the gRPC status, and
    ``failure`` is the class of that exception."""

    failure = FailureClass.NODE

    def __init__(
        self,
        node_id: str,
        kind: str,
        status: str,
        details: str,
        failure: FailureClass = FailureClass.NODE,
    ) -> None:
        super().__init__(f"node {node_id}: {details}")
        self.failure = failure
        self.node_id = node_id
        self.kind = kind
        self.status = status
        self.details = details


def failure_of(error: BaseException) -> FailureClass:
    """What failed: as an error of ours says; else a call that was cancelled or out of time, or a defect."""
    if isinstance(error, MoonpoolError):
        return error.failure
    import asyncio  # here: `moonpool --help` needs none of it

    if isinstance(error, TimeoutError | asyncio.CancelledError):
        return FailureClass.REQUEST
    return FailureClass.WORKER
