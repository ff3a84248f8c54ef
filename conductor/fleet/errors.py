"""Errors of changes of the fleet."""

from __future__ import annotations

from moonpool.conductor.errors import ConductorError
from moonpool.runtime.failures import FailureClass


class ProviderFailed(ConductorError):
    """A node could not be started, stopped or listed; the text says why. Ask again later."""

    code = "UNAVAILABLE"
    failure = FailureClass.NODE


class PlannerOutdated(ProviderFailed):
    """A planner asked whose epoch is older than ``latest``, which has asked before. Nothing was changed."""

    def __init__(self, sentence: str, latest: int) -> None:
        super().__init__(sentence)
        self.latest = latest


class FleetUnchanged(ConductorError):
    """A change of the fleet was refused; the text says why. Nothing was changed."""

    code = "FAILED_PRECONDITION"


class NodeMissing(ConductorError):
    """There is no node of that name. Nothing was changed."""

    code = "NOT_FOUND"


class AdapterInvalid(ConductorError):
    """An adapter is refused; the text says why."""

    code = "INVALID_ARGUMENT"


class AdapterMissing(ConductorError):
    """There is no adapter of that name."""

    code = "NOT_FOUND"


class AdapterFailed(ConductorError):
    """A node did not load or unload an adapter; ask again later."""

    code = "UNAVAILABLE"
    failure = FailureClass.NODE
