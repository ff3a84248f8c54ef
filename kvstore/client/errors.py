"""What can go wrong between a program and the store nodes that keep its objects."""

from __future__ import annotations

from collections.abc import Sequence

from moonpool.kvstore.errors import StoreError


class StoreClientError(StoreError):
    """Root of the client's errors."""


class BadUrl(StoreClientError):
    """No store can be reached by such a URL. Nothing has been tried."""

    code = "INVALID_ARGUMENT"

    def __init__(self, url: str) -> None:
        super().__init__(
            f"{url!r} is no store: give the conductor's API (http://HOST:PORT) or the index's Redis "
            "(redis://HOST:PORT, unix:///PATH)"
        )


class NoStoreNodes(StoreClientError):
    """The cluster has no store node that is ready."""

    code = "UNAVAILABLE"

    def __init__(self, where: str) -> None:
        super().__init__(
            f"no store node is ready in the cluster at {where}: start one with `moonpool store-node`, or "
            "`moonpool up --store 1`"
        )


class NoNodeAnswered(StoreClientError):
    """The index still names store nodes, and none of them answers: what they have cannot be known."""

    code = "UNAVAILABLE"

    def __init__(self, node_ids: Sequence[str]) -> None:
        super().__init__(
            f"none of the store nodes answers ({', '.join(node_ids)}): whether the object is there cannot be "
            "known; look whether they run, and start them again with `moonpool store-node`"
        )


class UnknownNode(StoreClientError):
    """The store node somebody named is not there."""

    code = "NOT_FOUND"

    def __init__(self, node_id: str, known: Sequence[str]) -> None:
        super().__init__(f"there is no store node {node_id!r}; there are {', '.join(sorted(known))}")


class BadObject(StoreClientError):
    """This cannot be stored, or not be read into. Nothing has been moved."""

    code = "INVALID_ARGUMENT"


class ObjectMissing(StoreClientError):
    """No store node has the object. ``name``; ``unreachable``: nodes that could not be asked."""

    code = "NOT_FOUND"

    def __init__(self, name: str, unreachable: Sequence[str] = ()) -> None:
        hint = f"; {', '.join(unreachable)} could not be asked" if unreachable else ""
        super().__init__(f"there is no object {name!r} for this tenant{hint}")
        self.name = name
        self.unreachable = tuple(unreachable)


class PutFailed(StoreClientError):
    """The object is not stored, or not as often as asked. ``reasons``: what each node said."""

    code = "RESOURCE_EXHAUSTED"

    def __init__(self, name: str, what: str, reasons: Sequence[str]) -> None:
        super().__init__(f"{name!r} {what}: {'; '.join(reasons)}")
        self.name = name
        self.reasons = tuple(reasons)
