"""Errors of the connector."""

from __future__ import annotations

from moonpool.runtime.errors import MoonpoolError
from moonpool.runtime.failures import FailureClass


class Unsupported(MoonpoolError):
    """This engine or this setting of it cannot be served; the message says which and what works. vLLM ends at
    its start."""

    failure = FailureClass.REQUEST


class NodeFailed(MoonpoolError):
    """The store node in the engine has ended. It is started again; loads and saves fail until then."""

    failure = FailureClass.NODE
