"""Classes of failure: what failed, said by every error and counted under one name."""

from __future__ import annotations

from enum import StrEnum


class FailureClass(StrEnum):
    """What failed. docs/runbooks.md says for each where to look and what to do."""

    REQUEST = "request"  # what was asked is invalid, refused, or out of time: nothing is broken
    RANK = "rank"  # a rank of a group ended or is silent
    WORKER = "worker"  # a process of ours cannot start, ended, or has a defect
    DEVICE = "device"  # a GPU, or its memory and the KV pool in it: lost, or short
    GROUP = "group"  # ranks do not fit together, or a node's ranks ended in a step
    COLLECTIVE = "collective"  # an exchange among ranks broke, and no rank is known as its cause
    TRANSFER = "transfer"  # bytes did not get from one process to another
    STORE = "store"  # cached blocks and objects, in memory or on disk
    NODE = "node"  # a node cannot be reached, has left, or does not take the request
    CONDUCTOR = "conductor"  # a conductor cannot be reached, is closing, or has a defect
    INDEX = "index"  # Redis, or what is written in it
    REGION = "region"  # memory of another process: unknown, closed, or its grant has ended

    @classmethod
    def of_wire(cls, word: str) -> FailureClass:
        """The class that a message names; NODE for a word that this version does not know."""
        return next((each for each in cls if each.value == word), cls.NODE)


# Causes by the gRPC status of an error. Those of a failed attempt are in ``conductor.requests.attempt``.
_CAUSES = {
    "INVALID_ARGUMENT": "invalid",
    "OUT_OF_RANGE": "invalid",
    "UNIMPLEMENTED": "invalid",
    "PERMISSION_DENIED": "denied",
    "UNAUTHENTICATED": "denied",
    "NOT_FOUND": "missing",
    "ALREADY_EXISTS": "refused",
    "FAILED_PRECONDITION": "refused",
    "RESOURCE_EXHAUSTED": "full",
    "DEADLINE_EXCEEDED": "late",
    "DATA_LOSS": "corrupt",
    "ABORTED": "broken",
    "UNAVAILABLE": "lost",
}
CAUSES = frozenset({*_CAUSES.values(), "ended_life", "disorder", "error"})


def cause_of_status(status: str) -> str:
    """One of ``CAUSES`` for the name of a gRPC status."""
    return _CAUSES.get(status, "error")
