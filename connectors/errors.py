"""Errors of the connectors."""

from __future__ import annotations

from moonpool.runtime.errors import MoonpoolError
from moonpool.runtime.failures import FailureClass


class Unsupported(MoonpoolError):
    """This engine or this setting of it cannot be served; the message says which and what works. The engine
    ends at its start."""

    failure = FailureClass.REQUEST


class NodeFailed(MoonpoolError):
    """The store node in vLLM has ended. It is started again; loads and saves fail until then."""

    failure = FailureClass.NODE


class StoreAway(MoonpoolError):
    """The store is not asked now: nothing was read or stored."""

    code = "UNAVAILABLE"
    failure = FailureClass.STORE
