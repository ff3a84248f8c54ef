"""Errors of a store node."""

from __future__ import annotations

from moonpool.kvstore.errors import StoreError
from moonpool.runtime.failures import FailureClass


class NodeStopping(StoreError):
    code = "UNAVAILABLE"
    failure = FailureClass.NODE

    def __init__(self, node_id: str) -> None:
        super().__init__(f"store node {node_id} is draining and takes no new work")


class ObjectsOff(StoreError):
    code = "FAILED_PRECONDITION"

    def __init__(self, node_id: str) -> None:
        super().__init__(f"store node {node_id} keeps no objects: its store_node.object_nbytes is 0")


class StoreFull(StoreError):
    """There is no room and none can be made: all is pinned, or the object is larger than the node."""

    code = "RESOURCE_EXHAUSTED"

    def __init__(self, node_id: str, nbytes: int, capacity_nbytes: int) -> None:
        super().__init__(
            f"store node {node_id} has no room for an object of {nbytes} bytes: its capacity is "
            f"{capacity_nbytes} bytes, and objects being read or written now are not evicted; raise "
            "store_node.object_nbytes"
        )


class PinsFull(StoreError):
    """Too much is pinned on the node already."""

    code = "RESOURCE_EXHAUSTED"

    def __init__(self, node_id: str, nbytes: int, limit_nbytes: int) -> None:
        super().__init__(
            f"an object of {nbytes} bytes cannot be pinned on store node {node_id}: at most {limit_nbytes} "
            "bytes, half of its room, are pinned; put it without a pin, or raise store_node.object_nbytes"
        )


class OverQuota(StoreError):
    """A tenant's puts exceed its quota, even if all its objects were dropped."""

    code = "RESOURCE_EXHAUSTED"
    failure = FailureClass.REQUEST

    def __init__(self, nbytes: int, limit_nbytes: int) -> None:
        super().__init__(
            f"these objects take {nbytes} bytes, and a tenant may take at most {limit_nbytes} of a store "
            "node: put less at a time, or raise store_node.tenant_nbytes"
        )


class PutUnknown(StoreError):
    code = "NOT_FOUND"

    def __init__(self, put_id: int) -> None:
        super().__init__(f"no put has the id {put_id}: it ended or was not continued in time; put again")


class PutBroken(StoreError):
    """The put cannot be finished. Nothing of it is left."""

    code = "ABORTED"


class BadRequest(StoreError):
    """A field of a request is invalid; ``str(error)`` names it."""

    code = "INVALID_ARGUMENT"
    failure = FailureClass.REQUEST


class RecordsUnavailable(StoreError):
    """The records of objects cannot be read or changed now. Nothing has changed."""

    code = "UNAVAILABLE"
    failure = FailureClass.INDEX

    def __init__(self, reason: str) -> None:
        super().__init__(f"objects cannot be looked up or changed: {reason}")


class RecordsLost(RecordsUnavailable):
    """Redis lost its data; the nodes write what they know again."""

    def __init__(self, restoring_s: float) -> None:
        super().__init__(
            "Redis lost its data, and the records of objects are being restored: try again in "
            f"{restoring_s:g} s"
        )


class ChangeUnknown(StoreError):
    """Redis did not answer a change of records, or refused a part of it. It may have been made, or may still
    be."""

    code = "UNKNOWN"
    failure = FailureClass.INDEX

    def __init__(self, reason: str) -> None:
        super().__init__(f"it is not known whether the records of objects were changed: {reason}")


class LayoutRefused(StoreError):
    """A caller named a layout that would cost too much here. Nothing was made for it."""

    code = "RESOURCE_EXHAUSTED"


class OtherLayout(StoreError):
    code = "FAILED_PRECONDITION"

    def __init__(self, node_id: str, theirs: str, ours: str) -> None:
        super().__init__(
            f"store node {node_id} has KV blocks of layout {ours}, not {theirs}: "
            "restart it to use another model, dtype or block size"
        )
