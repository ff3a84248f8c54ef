"""Errors of the store and the index."""

from __future__ import annotations

from pathlib import Path

from moonpool.runtime.errors import MoonpoolError


class StoreError(MoonpoolError):
    """Base of everything ``kvstore`` raises on purpose."""


class LayoutError(StoreError):
    """A block layout is impossible, or not the one this store was made for."""


class BlockMissing(StoreError):
    """A block that was asked for is in no tier (any more), or could not be read in time. Those before
    ``first_missing`` were delivered; compute from there."""

    code = "NOT_FOUND"

    def __init__(self, first_missing: int, num_asked: int) -> None:
        super().__init__(f"block {first_missing} of the {num_asked} asked for is not held")
        self.first_missing = first_missing


class BlockCorrupt(StoreError):
    """A block's bytes are not what was put. That copy has been dropped; those before ``first_missing`` were
    delivered."""

    code = "DATA_LOSS"

    def __init__(self, first_missing: int, num_asked: int, tier: str) -> None:
        super().__init__(
            f"block {first_missing} of the {num_asked} asked for did not match its checksum ({tier})"
        )
        self.first_missing = first_missing
        self.tier = tier


class KeyFormatError(StoreError):
    """Bytes that should be packed block keys are not."""


class IndexUnavailable(StoreError):
    """Redis did not answer, or answered with an error. The call may have had its effect there."""

    def __init__(self, call: str, reason: str) -> None:
        super().__init__(
            f"the index in Redis did not answer {call}: {reason}; is it running, is index.redis_url right?"
        )
        self.call = call
        self.reason = reason


class NodeUnknown(StoreError):
    """The index does not know this node in this epoch: never registered, lapsed, or dropped. Register
    again."""

    def __init__(self, node_id: str, epoch: int) -> None:
        super().__init__(f"node {node_id} of epoch {epoch} is not registered in the index")
        self.node_id = node_id
        self.epoch = epoch


class EpochSuperseded(StoreError):
    """Another process has registered this node with a newer epoch; the caller's entries are gone for good."""

    def __init__(self, node_id: str, epoch: int, current: int) -> None:
        super().__init__(f"node {node_id} of epoch {epoch} was superseded by epoch {current}")
        self.node_id = node_id
        self.epoch = epoch
        self.current = current


class ChangesCorrupt(StoreError):
    """Bytes that should be a batch of index changes are not."""


class SsdDirectoryInUse(StoreError):
    """Another process, or another tier of this one, works on the directory. Nothing has been touched."""

    code = "FAILED_PRECONDITION"

    def __init__(self, directory: Path, holder: str) -> None:
        super().__init__(
            f"the blocks in {directory} belong to process {holder or 'unknown'}, which still runs: stop "
            "it, or give this one a directory of its own"
        )
        self.directory = directory
        self.holder = holder


class SsdFormatMismatch(StoreError):
    """What lies in the directory was written for other blocks, or by another version. It is as it was."""

    code = "FAILED_PRECONDITION"

    def __init__(self, directory: Path, field: str, found: object, expected: object) -> None:
        super().__init__(
            f"the blocks in {directory} have {field} {found!r}, this node needs {expected!r}: give it "
            "another directory, or delete this one"
        )
        self.directory = directory
        self.field = field
        self.found = found
        self.expected = expected


class SsdUnusable(StoreError):
    """The directory cannot be made, opened or written."""

    def __init__(self, directory: Path, reason: str) -> None:
        super().__init__(f"no blocks can be kept in {directory}: {reason}")
        self.directory = directory
        self.reason = reason
