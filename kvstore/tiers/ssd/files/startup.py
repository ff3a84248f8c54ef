"""Opening a directory: lock, format, index, segments, and the blocks that can be used again."""

from __future__ import annotations

import gc
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from moonpool.kvstore.errors import LayoutError, SsdUnusable
from moonpool.kvstore.tiers.ssd.files.block_index import BlockIndex, IndexDamaged, IndexWriteFailed, scan
from moonpool.kvstore.tiers.ssd.files.directory import DirectoryLock, TierFormat, set_aside, settle_format
from moonpool.kvstore.tiers.ssd.files.record import RecoveredIndex, recover
from moonpool.kvstore.tiers.ssd.files.segments import Segments

log = logging.getLogger(__name__)

_lock = threading.Lock()
_num_inside = 0
_was_enabled = False


@contextmanager
def gc_paused() -> Iterator[None]:
    """Pause Python's garbage collector: it costs two fifths of the time to make a hundred thousand records.
    Its former state returns when the last block inside ends."""
    global _num_inside, _was_enabled
    with _lock:
        if _num_inside == 0:
            _was_enabled = gc.isenabled()
            gc.disable()
        _num_inside += 1
    try:
        yield
    finally:
        with _lock:
            _num_inside -= 1
            if _num_inside == 0 and _was_enabled:
                gc.enable()


@dataclass(slots=True)
class OpenDirectory:
    lock: DirectoryLock
    segments: Segments
    index: BlockIndex
    found: RecoveredIndex

    def close(self) -> None:
        self.index.close()
        self.segments.close()
        self.lock.release()


def open_directory(directory: Path, wanted: TierFormat, capacity_nbytes: int) -> OpenDirectory:
    """Open or create a tier's directory. Blocks the thread while the disk works.

    Raises ``SsdDirectoryInUse``, ``SsdFormatMismatch``, ``SsdUnusable``, ``LayoutError``: nothing is open.
    """
    max_slots = capacity_nbytes // wanted.slot_nbytes
    if max_slots == 0:
        raise LayoutError(f"{capacity_nbytes} bytes of disk hold no block of {wanted.slot_nbytes} bytes")
    lock = DirectoryLock(directory)
    try:
        shape = settle_format(directory, wanted)
        return _open(directory, lock, Segments(directory, shape, max_slots))
    except (OSError, IndexWriteFailed) as error:
        lock.release()
        raise SsdUnusable(directory, str(error)) from error
    except BaseException:
        lock.release()
        raise


def _open(directory: Path, lock: DirectoryLock, segments: Segments) -> OpenDirectory:
    num_segments, entries = _read_index(directory)
    index: BlockIndex | None = None
    try:
        whole_slots = segments.adopt(num_segments)
        found = recover(entries, whole_slots, segments.shape.slots_per_segment, segments.max_slots)
        for segment, whole in enumerate(whole_slots):
            _warn_if_short(segments, segment, whole, entries_found=bool(entries))
        index = BlockIndex(directory / "index", segments.max_slots)
        # Before anything is written to the slots of these.
        if found.dropped:
            index.forget(found.dropped)
        if num_segments > segments.num_segments:
            index.apply(num_segments=segments.num_segments)
    except BaseException:
        segments.close()
        if index is not None:
            index.close()
        raise
    if found.dropped:
        message = "%s: dropped %d blocks without a valid record or slot, and %d without predecessors"
        log.warning(message, directory, found.num_lost, found.num_orphans)
    return OpenDirectory(lock, segments, index, found)


def _read_index(directory: Path) -> tuple[int, list[tuple[bytes, bytes]]]:
    """Number of segments and entries; none without a readable index."""
    path = directory / "index"
    if not (path / "data.mdb").exists():
        if any(directory.glob("segment-*.kv")):
            log.error("%s is missing: the blocks in %s are lost, it starts empty", path, directory)
        path.mkdir(exist_ok=True)
        return 0, []
    try:
        return scan(path)
    except IndexDamaged as error:
        aside = set_aside(directory, "index")
        log.error("%s; it is set aside in %s, and %s starts empty", error, aside, directory)
        path.mkdir()
        return 0, []


def _warn_if_short(segments: Segments, segment: int, whole: int, *, entries_found: bool) -> None:
    expected = min(
        segments.shape.slots_per_segment, segments.max_slots - segment * segments.shape.slots_per_segment
    )
    if entries_found and whole < expected:
        message = "%s ended at %d bytes: blocks after that are lost, unless the tier was made larger"
        log.warning(message, segments.path_of(segment), whole * segments.shape.slot_nbytes)
