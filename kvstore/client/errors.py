"""Errors of the client of the store nodes."""

from __future__ import annotations

from collections.abc import Sequence

from moonpool.kvstore.errors import StoreError
from moonpool.runtime.failures import FailureClass


class StoreClientError(StoreError):
    pass


class BadUrl(StoreClientError):
    """No store can be reached by such a URL. Nothing was tried."""

    code = "INVALID_ARGUMENT"
    failure = FailureClass.REQUEST

    def __init__(self, url: str) -> None:
        super().__init__(
            f"{url!r} is not the URL of a store: use the conductor's API (http://HOST:PORT) or the Redis "
            "(redis://HOST:PORT, unix:///PATH)"
        )


class NoStoreNodes(StoreClientError):
    code = "UNAVAILABLE"
    failure = FailureClass.NODE

    def __init__(self, where: str) -> None:
        super().__init__(
            f"no store node is ready in the cluster at {where}: start one with `moonpool store-node`, or "
            "`moonpool up --store 1`"
        )


class NoNodeAnswered(StoreClientError):
    code = "UNAVAILABLE"
    failure = FailureClass.NODE

    def __init__(self, node_ids: Sequence[str]) -> None:
        super().__init__(
            f"none of the store nodes answers ({', '.join(node_ids)}): check that they run, and start them "
            "again with `moonpool store-node`"
        )


class UnknownNode(StoreClientError):
    code = "NOT_FOUND"
    failure = FailureClass.NODE

    def __init__(self, node_id: str, known: Sequence[str]) -> None:
        super().__init__(f"there is no store node {node_id!r}; there are {', '.join(sorted(known))}")


class BadObject(StoreClientError):
    """The value cannot be stored, or not be read into. Nothing was moved."""

    code = "INVALID_ARGUMENT"
    failure = FailureClass.REQUEST


class ObjectMissing(StoreClientError):
    """There is no such object."""

    code = "NOT_FOUND"

    def __init__(self, name: str) -> None:
        super().__init__(f"there is no object {name!r} for this tenant")


class ObjectUnreachable(StoreClientError):
    """The object exists, and no node that has its bytes answers. ``why``: in another way."""

    code = "UNAVAILABLE"

    def __init__(self, name: str, places: Sequence[str], why: str = "") -> None:
        super().__init__(
            f"the object {name!r} is on {', '.join(places)}, and none of them answers: try again, start them "
            "again, or store it with more copies"
            if not why
            else f"the object {name!r} was not read: {why}"
        )


class NoRecords(StoreClientError):
    """No store node can look objects up or change them now. Nothing has changed."""

    code = "UNAVAILABLE"
    failure = FailureClass.INDEX

    def __init__(self, reason: str) -> None:
        super().__init__(f"{reason}. Reads with stale=set() return what the nodes last knew")


class OutcomeUnknown(StoreClientError):
    """A change was sent and no answer came: it may have been made, or may still be."""

    code = "UNKNOWN"

    def __init__(self, what: str, reason: str) -> None:
        super().__init__(f"it is not known whether {what}: {reason}. Read it, or repeat the call")


class PutFailed(StoreClientError):
    """The object is not stored; its former value still is. ``reasons``: the answer of each node."""

    code = "RESOURCE_EXHAUSTED"

    def __init__(self, name: str, what: str, reasons: Sequence[str]) -> None:
        super().__init__(f"{name!r} {what}: {'; '.join(reasons)}")
