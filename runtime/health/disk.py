"""Probe of a disk: durable writes of a page, with their duration."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

from moonpool.runtime.health.readings import DiskReading

_NAME = ".health"
_PAGE = bytes(4096)


class DiskWatch:
    """Writes a page to a file in ``directory``, on a thread because writes to a failing disk may hang.

    ``read`` returns at once, with the last write that ended or the one that hangs, and starts the next.
    ``directory`` is created if necessary; ``close`` removes the file.
    """

    def __init__(self, directory: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._directory = directory
        self._file = directory / f"{_NAME}-{os.getpid()}"
        self._clock = clock
        self._began_s = 0.0
        self._write_s = 0.0
        self._error = ""
        self._free_nbytes: int | None = None
        self._thread: threading.Thread | None = None

    def read(self) -> DiskReading:
        writing_s = 0.0
        if self._thread is not None and self._thread.is_alive():
            writing_s = self._clock() - self._began_s
        else:
            self._began_s = self._clock()
            self._thread = threading.Thread(target=self._write, name="disk health", daemon=True)
            self._thread.start()
            # A healthy disk has answered within this time.
            self._thread.join(0.05)
        error = "" if writing_s else self._error
        return DiskReading(str(self._directory), self._free_nbytes, max(self._write_s, writing_s), error)

    def close(self) -> None:
        """Remove the file. A write that hangs is abandoned."""
        if self._thread is not None:
            self._thread.join(0.5)
        if self._thread is None or not self._thread.is_alive():
            self._file.unlink(missing_ok=True)

    def _write(self) -> None:
        error, began_s = "", self._clock()
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            self._free_nbytes = shutil.disk_usage(self._directory).free
            fd = os.open(self._file, os.O_RDWR | os.O_CREAT, 0o600)
            try:
                os.pwrite(fd, _PAGE, 0)
                os.fdatasync(fd)
            finally:
                os.close(fd)
        except OSError as failed:
            error = failed.strerror or str(failed)
        self._error, self._write_s = error, self._clock() - began_s
