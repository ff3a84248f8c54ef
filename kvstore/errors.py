"""Errors of the store and the index."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from moonpool.runtime.errors import MoonpoolError
from moonpool.runtime.failures import FailureClass


class StoreError(MoonpoolError):
    """Base of every error that ``kvstore`` raises."""

    failure = FailureClass.STORE


class LayoutError(StoreError):
    """A block layout is impossible, or differs from the store's."""


class BlockMissing(StoreError):
    """A requested block is in no tier, or could not be read in time. Those before ``first_missing`` were
    delivered."""

    code = "NOT_FOUND"

    def __init__(self, first_missing: int, num_asked: int) -> None:
        super().__init__(f"block {first_missing} of the {num_asked} requested is not held")
        self.first_missing = first_missing


class BlockCorrupt(StoreError):
    """A block's bytes did not match its checksum. That copy has been dropped; the blocks before
    ``first_missing`` were delivered."""

    code = "DATA_LOSS"

    def __init__(self, first_missing: int, num_asked: int, tier: str) -> None:
        super().__init__(
            f"block {first_missing} of the {num_asked} requested did not match its checksum ({tier})"
        )
        self.first_missing = first_missing


class KeyFormatError(StoreError):
    """Bytes are not packed block keys."""

    failure = FailureClass.REQUEST


class IndexUnavailable(StoreError):
    """Redis did not answer, or answered with an error. The call may have taken effect."""

    failure = FailureClass.INDEX

    def __init__(self, call: str, reason: str) -> None:
        super().__init__(
            f"the index in Redis did not answer {call}: {reason}; check that it runs and index.redis_url"
        )


def raise_one(outcomes: Iterable[object], first: type[BaseException]) -> None:
    """Raise one of the errors among the outcomes of calls, of the type ``first`` if there is one. The others
    are notes on it: a traceback shows them all."""
    errors = [each for each in outcomes if isinstance(each, BaseException)]
    errors.sort(key=lambda each: not isinstance(each, first))
    for error in errors:
        for other in errors[1:]:
            error.add_note(f"And another call: {other!r}")
        raise error


class NodeUnknown(StoreError):
    """The index does not know this node in this epoch, or has lost changes that it had. Register again."""

    failure = FailureClass.INDEX

    def __init__(self, node_id: str, epoch: int, *, has_lost: bool = False) -> None:
        super().__init__(
            f"Redis went back to an older history and has lost changes of node {node_id} of epoch {epoch}"
            if has_lost
            else f"node {node_id} of epoch {epoch} is not registered in the index"
        )


class EpochSuperseded(StoreError):
    """Another process registered this node with a newer epoch; the caller's entries are gone."""

    failure = FailureClass.INDEX

    def __init__(self, node_id: str, epoch: int, current: int) -> None:
        super().__init__(f"node {node_id} of epoch {epoch} was superseded by epoch {current}")
        self.current = current


class EntryCorrupt(StoreError):
    """An entry of the index cannot be used; it is skipped. ``reason`` is a word for metrics."""

    failure = FailureClass.INDEX

    reason: str = "unreadable"


class ChangesCorrupt(EntryCorrupt):
    """Bytes are not a batch of index changes."""


class EntryRefused(EntryCorrupt):
    """``reason``: "forged" (without the cluster's key, or written for another place), "replayed" (a newer one
    is known) or "expired" (not renewed since)."""

    def __init__(self, reason: str, sentence: str) -> None:
        super().__init__(sentence)
        self.reason = reason


class SsdDirectoryInUse(StoreError):
    """Another tier, in this or another process, uses the directory. Nothing has been touched."""

    code = "FAILED_PRECONDITION"

    def __init__(self, directory: Path, holder: str) -> None:
        super().__init__(
            f"{directory} is in use by process {holder or 'unknown'}: stop it, or use another directory"
        )


class SsdFormatMismatch(StoreError):
    """The directory was written for other blocks or by another version. It is unchanged."""

    code = "FAILED_PRECONDITION"

    def __init__(self, directory: Path, field: str, found: object, expected: object) -> None:
        super().__init__(
            f"the blocks in {directory} have {field} {found!r}, this node needs {expected!r}: use another "
            "directory, or delete this one"
        )
        self.found = found


class SsdUnusable(StoreError):
    """The directory cannot be created, opened or written."""

    def __init__(self, directory: Path, reason: str) -> None:
        super().__init__(f"{directory} cannot be used for blocks: {reason}")
