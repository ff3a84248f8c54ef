"""Segment files: slots of whole pages, read and written around the page cache (O_DIRECT)."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Iterable
from pathlib import Path

from moonpool.kvstore.tiers.ssd.files.directory import TierFormat, sync_directory

log = logging.getLogger(__name__)

# Size of one call to the disk: small neighbouring blocks share one, large blocks take several. Larger calls
# are not faster, spread a batch less evenly over threads, and exceed the CPU cache.
CALL_NBYTES = 2 << 20


class Segments:
    """Slot ``i`` is ``slot_nbytes`` at some offset of file ``i // slots_per_segment``.

    ``read``, ``write`` and ``sync`` may be called from any thread and raise the disk's ``OSError``.
    """

    def __init__(self, directory: Path, shape: TierFormat, max_slots: int) -> None:
        self.directory = directory
        self.shape = shape
        self.max_slots = max_slots
        self.direct = True
        self._fds: list[int] = []

    @property
    def num_segments(self) -> int:
        return len(self._fds)

    @property
    def max_segments(self) -> int:
        return -(-self.max_slots // self.shape.slots_per_segment)

    @property
    def num_slots(self) -> int:
        """Slots in the existing segments."""
        return min(self.num_segments * self.shape.slots_per_segment, self.max_slots)

    def path_of(self, segment: int) -> Path:
        return self.directory / f"segment-{segment:05}.kv"

    def where(self, slot: int) -> tuple[Path, int]:
        """File and offset of a slot, for messages."""
        segment, at = divmod(slot, self.shape.slots_per_segment)
        return self.path_of(segment), at * self.shape.slot_nbytes

    def adopt(self, num_segments: int) -> list[int]:
        """Open existing segments. Returns the number of whole slots in each file.

        Raises ``OSError``: one cannot be opened or extended; those open stay open.
        """
        whole = []
        for segment in range(min(num_segments, self.max_segments)):
            path = self.path_of(segment)
            whole.append(path.stat().st_size // self.shape.slot_nbytes if path.exists() else 0)
            self._fds.append(self._open(segment))
        for segment in range(self.max_segments, num_segments):
            # The tier may hold less now than it did.
            self.path_of(segment).unlink(missing_ok=True)
        return whole

    def grow(self) -> None:
        """Make the next segment and allocate its space. ``OSError`` (often ENOSPC): nothing has changed."""
        path = self.path_of(self.num_segments)
        existed = path.exists()
        try:
            fd = self._open(self.num_segments)
        except OSError:
            if not existed:
                path.unlink(missing_ok=True)
            raise
        sync_directory(self.directory)
        self._fds.append(fd)

    def undo_grow(self) -> None:
        """Close the last segment, which is empty and not recorded."""
        os.close(self._fds.pop())

    def _open(self, segment: int) -> int:
        flags = os.O_RDWR | os.O_CREAT | (os.O_DIRECT if self.direct else 0)
        path = self.path_of(segment)
        try:
            fd = os.open(path, flags, 0o600)
        except OSError as error:
            if error.errno != errno.EINVAL or not self.direct:
                raise
            log.warning("%s: this filesystem has no O_DIRECT; blocks go through the page cache", path)
            self.direct = False
            return self._open(segment)
        slots = min(self.shape.slots_per_segment, self.max_slots - segment * self.shape.slots_per_segment)
        try:
            os.posix_fallocate(fd, 0, slots * self.shape.slot_nbytes)
        except OSError:
            os.close(fd)
            raise
        return fd

    def close(self) -> None:
        while self._fds:
            os.close(self._fds.pop())

    def read(self, slot: int, buffer: memoryview, at: int = 0) -> None:
        """Fill ``buffer`` (whole pages, page-aligned) from byte ``at`` of ``slot``, and the slots after it.

        ``OSError``: the disk's, or ENODATA where the file ends before the slot.
        """
        fd, offset = self._place(slot)
        done = 0
        while done < len(buffer):
            got = os.preadv(fd, [buffer[done:]], offset + at + done)
            if got == 0:
                raise OSError(errno.ENODATA, "the file ends here")
            done += got

    def write(self, slot: int, buffer: memoryview, at: int = 0) -> None:
        """Write ``buffer`` (whole pages, page-aligned) to byte ``at`` of ``slot`` and the slots after it."""
        fd, offset = self._place(slot)
        done = 0
        while done < len(buffer):
            done += os.pwritev(fd, [buffer[done:]], offset + at + done)

    def sync(self, slots: Iterable[int]) -> None:
        """Make writes to these slots survive a power loss."""
        per_segment = self.shape.slots_per_segment
        for segment in {slot // per_segment for slot in slots}:
            os.fdatasync(self._fds[segment])

    def _place(self, slot: int) -> tuple[int, int]:
        segment, at = divmod(slot, self.shape.slots_per_segment)
        return self._fds[segment], at * self.shape.slot_nbytes
