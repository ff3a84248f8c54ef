"""Errors of the backend."""

from __future__ import annotations

from moonpool.runtime.errors import MoonpoolError


class Unsupported(MoonpoolError):
    """This engine or this setting of it cannot be served; the message says which and what works."""


class StoreAway(MoonpoolError):
    """The store is not asked now: nothing was read or stored."""

    code = "UNAVAILABLE"
