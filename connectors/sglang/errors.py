"""Errors of the backend."""

from __future__ import annotations

from moonpool.runtime.errors import MoonpoolError
from moonpool.runtime.failures import FailureClass


class Unsupported(MoonpoolError):
    """This engine or this setting of it cannot be served; the message says which and what works."""

    failure = FailureClass.REQUEST


class StoreAway(MoonpoolError):
    """The store is not asked now: nothing was read or stored."""

    code = "UNAVAILABLE"
    failure = FailureClass.STORE
