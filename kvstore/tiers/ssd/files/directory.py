"""The directory of an SSD tier.

lock               locked by the process that uses the directory
tier.json          the format of the blocks (``TierFormat``), written first
index/             LMDB: the block in each slot
segment-00000.kv   slots of block bytes
set-aside-0/       files that could not be used, kept for inspection; never read again
"""

from __future__ import annotations

import fcntl
import json
import os
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from moonpool.kvstore.errors import SsdDirectoryInUse, SsdFormatMismatch, SsdUnusable

FORMAT_VERSION = 1
CHECKSUM = "xxh3-64"
# The alignment that O_DIRECT needs on every disk.
PAGE_NBYTES = 4096

_FORMAT_FILE = "tier.json"


@dataclass(frozen=True, slots=True)
class TierFormat:
    """What must be equal for the bytes here to be usable."""

    fingerprint: str  # of the layout, hex
    block_nbytes: int
    segment_nbytes: int  # wanted for new directories; an old one keeps its own
    checksum: str = CHECKSUM
    version: int = FORMAT_VERSION

    @property
    def slot_nbytes(self) -> int:
        """A block's bytes, padded to whole pages."""
        return -(-self.block_nbytes // PAGE_NBYTES) * PAGE_NBYTES

    @property
    def slots_per_segment(self) -> int:
        return max(self.segment_nbytes // self.slot_nbytes, 1)


class DirectoryLock:
    """An exclusive lock; the kernel releases it when the process ends."""

    def __init__(self, directory: Path) -> None:
        """Raises ``SsdDirectoryInUse``; ``SsdUnusable``: the directory cannot be created."""
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(directory / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise SsdUnusable(directory, str(error)) from error
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(self._fd, 32, 0).decode(errors="replace").strip()
            os.close(self._fd)
            raise SsdDirectoryInUse(directory, holder) from None
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, f"{os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        os.close(self._fd)


def settle_format(directory: Path, wanted: TierFormat) -> TierFormat:
    """Return the format of the directory; an empty one gets ``wanted``.

    Raises ``SsdFormatMismatch``: the directory has another format.
    """
    path = directory / _FORMAT_FILE
    if not path.exists():
        if (directory / "index").exists() or any(directory.glob("segment-*.kv")):
            raise SsdFormatMismatch(directory, "a format in", "no tier.json", _FORMAT_FILE)
        _write_durably(path, json.dumps(asdict(wanted), indent=1) + "\n")
        return wanted
    try:
        found: Any = json.loads(path.read_text())
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise SsdFormatMismatch(directory, _FORMAT_FILE, "damaged", "JSON")
    for field in ("version", "checksum", "fingerprint", "block_nbytes"):
        if found.get(field) != getattr(wanted, field):
            raise SsdFormatMismatch(directory, field, found.get(field), getattr(wanted, field))
    names = {field.name for field in fields(TierFormat)}
    segment_nbytes = found.get("segment_nbytes")
    if found.keys() != names or not isinstance(segment_nbytes, int) or segment_nbytes <= 0:
        raise SsdFormatMismatch(directory, "fields", sorted(found), sorted(names))
    return TierFormat(**found)


def set_aside(directory: Path, name: str) -> Path:
    """Move a file or folder into a new folder beside it. Returns the new folder."""
    number = 0
    while (aside := directory / f"set-aside-{number}").exists():
        number += 1
    aside.mkdir()
    (directory / name).rename(aside / name)
    sync_directory(directory)
    return aside


def _write_durably(path: Path, text: str) -> None:
    """Write the whole text, or no file."""
    draft = path.with_suffix(".new")
    with draft.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    draft.rename(path)
    sync_directory(path.parent)


def sync_directory(directory: Path) -> None:
    """Make new and changed names in the directory survive a power loss."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
