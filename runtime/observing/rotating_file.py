"""A file of lines that begins anew at a size; its own thread writes it, so a full disk blocks no caller."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import orjson
from prometheus_client import Counter

log = logging.getLogger(__name__)

_LOST = Counter(
    "moonpool_audit_lost_lines", "Audit and usage lines that no disk took while the queue was full."
)
# Most lines that wait for a disk; later ones are lost, and counted.
QUEUED_LINES = 10_000
_WRITE_NBYTES = 64 << 10
_PAUSE_S = 0.25
# How long ``close`` waits for a disk that does not answer.
_CLOSE_S = 2.0


class RotatingFile:
    """``FILE``, then ``FILE.1`` … ``FILE.N``, the oldest last. One thread of one process writes them.

    The standard library's handler is not used: one failed rotation ends it, and on a stalled disk it would
    keep the process from ending.
    """

    def __init__(self, file: Path, file_nbytes: int, files: int) -> None:
        self.file = file
        self._file_nbytes = file_nbytes
        self._files = files
        self._fd = -1
        self._nbytes = 0

    def append(self, lines: bytes) -> None:
        """Raises ``OSError``: none of ``lines`` is in the file."""
        if self._fd >= 0 and (
            not os.fstat(self._fd).st_nlink or self._nbytes + len(lines) > self._file_nbytes
        ):
            self.close()
        if self._fd < 0:
            self._open(len(lines))
        written = os.write(self._fd, lines)
        if written < len(lines):
            os.ftruncate(self._fd, self._nbytes)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._nbytes += written

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _open(self, nbytes: int) -> None:
        try:
            # Also what an earlier process wrote.
            if self.file.stat().st_size + nbytes > self._file_nbytes:
                self._rotate()
        except FileNotFoundError:
            pass
        self._fd = os.open(self.file, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._nbytes = os.fstat(self._fd).st_size

    def _rotate(self) -> None:
        for number in range(self._files - 1, 0, -1):
            older = self.file.with_name(f"{self.file.name}.{number}")
            newer = self.file.with_name(f"{self.file.name}.{number - 1}") if number > 1 else self.file
            if newer.exists():
                os.replace(newer, older)
        if self._files == 1:
            self.file.unlink()


class LineWriter:
    """Writes lines to a ``RotatingFile`` from a thread, four times a second.

    more: further lines, asked for before each time; ``True``: for the last time. Lines that the disk does not
    take are kept and tried again, at most ``QUEUED_LINES``; the file tells how many were lost.
    """

    def __init__(self, file: RotatingFile, more: Callable[[bool], Iterator[dict[str, Any]]]) -> None:
        self._file = file
        self._more = more
        self._waiting: deque[dict[str, Any]] = deque()
        self._lost = 0
        self._failing = False
        self._end = threading.Event()
        # A daemon: a stalled disk must not keep the process from ending.
        self._thread = threading.Thread(target=self._run, name=file.file.name, daemon=True)
        self._thread.start()

    def write(self, line: dict[str, Any]) -> None:
        """Queue a line of JSON types. Never waits."""
        if len(self._waiting) < QUEUED_LINES:
            self._waiting.append(line)
        else:
            self._lost += 1
            _LOST.inc()

    def close(self) -> None:
        """Write what waits, if the disk takes it in time. Idempotent."""
        self._end.set()
        self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        ended = False
        while not ended:
            ended = self._end.wait(_PAUSE_S)
            for line in self._more(ended):
                self.write(line)
            try:
                self._write_waiting()
                self._failing = False
            except OSError as error:
                if not self._failing:
                    log.warning("lines for %s wait: %s", self._file.file, error.strerror)
                self._failing = True
                self._file.close()
        self._file.close()

    def _write_waiting(self) -> None:
        while self._waiting:
            count, nbytes, lines = 0, 0, []
            for line in list(self._waiting):
                lines.append(orjson.dumps(line, default=str, option=orjson.OPT_APPEND_NEWLINE))
                count += 1
                nbytes += len(lines[-1])
                if nbytes >= _WRITE_NBYTES:
                    break
            self._file.append(b"".join(lines))
            for _ in range(count):
                self._waiting.popleft()
        lost, self._lost = self._lost, 0
        if lost:
            self.write({"event": "lost", "lines": lost})
            self._write_waiting()


def claim(directory: Path, name: str) -> tuple[str, int]:
    """``name``, or with a number where another process writes under it; the second value keeps the claim.

    Raises ``OSError``.
    """
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    number = 1
    while True:
        chosen = name if number == 1 else f"{name}-{number}"
        fd = os.open(directory / f".{chosen}.lock", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            number += 1
        else:
            return chosen, fd
