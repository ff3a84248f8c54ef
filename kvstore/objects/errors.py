"""What a store node refuses, as its callers see it."""

from __future__ import annotations

from moonpool.kvstore.errors import StoreError


class NodeStopping(StoreError):
    """The node finishes what it has and takes nothing new."""

    code = "UNAVAILABLE"

    def __init__(self, node_id: str) -> None:
        super().__init__(f"store node {node_id} is draining and takes nothing new")


class ObjectsOff(StoreError):
    """This node lends no memory for objects."""

    code = "FAILED_PRECONDITION"

    def __init__(self, node_id: str) -> None:
        super().__init__(f"store node {node_id} keeps no objects: its store_node.object_nbytes is 0")


class StoreFull(StoreError):
    """There is no room and none can be made: all is pinned, or the object is larger than the node."""

    code = "RESOURCE_EXHAUSTED"

    def __init__(self, node_id: str, nbytes: int, capacity_nbytes: int) -> None:
        super().__init__(
            f"store node {node_id} has no room for an object of {nbytes} bytes: it keeps at most "
            f"{capacity_nbytes} bytes of objects, and what is being read or written now cannot make room; "
            "raise store_node.object_nbytes"
        )


class OverQuota(StoreError):
    """A tenant's puts would take more than one tenant may have here, even in place of all it has."""

    code = "RESOURCE_EXHAUSTED"

    def __init__(self, nbytes: int, limit_nbytes: int) -> None:
        super().__init__(
            f"these objects take {nbytes} bytes of the store node, and one tenant's may take {limit_nbytes} "
            "at most: put less at a time, or raise store_node.tenant_nbytes"
        )


class PutUnknown(StoreError):
    """No put of this id is under way: it was finished, aborted, or not continued in time."""

    code = "NOT_FOUND"

    def __init__(self, put_id: int) -> None:
        super().__init__(f"put {put_id} is not under way: it was not continued in time; put again")


class PutBroken(StoreError):
    """The put cannot be finished. Nothing of it is left."""

    code = "ABORTED"


class BadRequest(StoreError):
    """A field of a request makes no sense; ``str(error)`` says which."""

    code = "INVALID_ARGUMENT"


class OtherLayout(StoreError):
    """The KV blocks offered have another shape than those this node keeps."""

    code = "FAILED_PRECONDITION"

    def __init__(self, node_id: str, theirs: str, ours: str) -> None:
        super().__init__(
            f"store node {node_id} keeps KV blocks of layout {ours}, not {theirs}: "
            "restart it to keep those of another model, dtype or block size"
        )
