"""A small disk of our own that can be filled and stalled: ext4 in a file, mounted as a loop device."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
from pathlib import Path

from moonpool.runtime.errors import MoonpoolError
from moonpool.runtime.failures import FailureClass


class DiskUnavailable(MoonpoolError):
    """A loop device cannot be mounted here: it needs root, a loop device and mkfs.ext4."""

    failure = FailureClass.WORKER


class LoopDisk:
    """``with LoopDisk(directory, nbytes) as disk``: mounted at ``disk.path`` inside the block."""

    def __init__(self, directory: Path, nbytes: int) -> None:
        self.path = directory / "disk"
        self._file = directory / "disk.img"
        self._nbytes = nbytes
        self._filler = self.path / "filler"

    def __enter__(self) -> LoopDisk:
        """Raises ``DiskUnavailable``; nothing is left mounted then."""
        self.path.mkdir()
        with self._file.open("wb") as file:
            file.truncate(self._nbytes)
        try:
            _run("mkfs.ext4", "-q", "-F", "-m", "0", str(self._file))
            _run("mount", "-o", "loop", str(self._file), str(self.path))
        except (OSError, subprocess.CalledProcessError) as error:
            detail = getattr(error, "stderr", "") or str(error)
            raise DiskUnavailable(f"no disk to fill and to stall: {detail.strip()}") from error
        return self

    def __exit__(self, *_: object) -> None:
        # Lazily: a process that was killed may still be releasing its files.
        _run("umount", "--lazy", str(self.path))
        self._file.unlink()

    def fill(self) -> int:
        """Leave no free byte; returns how many there were."""
        free = shutil.disk_usage(self.path).free
        with self._filler.open("wb") as file:
            while free >= 1 << 16:
                try:
                    os.posix_fallocate(file.fileno(), 0, free)
                    break
                except OSError:
                    free -= free >> 4  # others write too, and the file system needs blocks of its own
        return free

    def empty(self) -> None:
        self._filler.unlink(missing_ok=True)

    async def stall(self, seconds: float) -> None:
        """Let no write through for ``seconds``. The disk goes on by itself, also if this process dies."""
        script = 'fsfreeze --freeze "$1" && { sleep "$2"; fsfreeze --unfreeze "$1"; }'
        process = await asyncio.create_subprocess_exec(
            "sh", "-c", script, "stall", str(self.path), str(seconds), start_new_session=True
        )
        if code := await process.wait():
            raise DiskUnavailable(f"fsfreeze of {self.path} ended with code {code}")


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)
