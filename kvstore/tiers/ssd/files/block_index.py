"""The index on disk: LMDB, from block key to record, and the number of segments.

One thread at a time. When a tier is opened it is read whole, in a child process (``scan``); after that it is
only written.
"""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import lmdb

from moonpool.kvstore.blocks.keys import KEY_NBYTES
from moonpool.kvstore.errors import StoreError
from moonpool.kvstore.tiers.ssd.files import index_scan
from moonpool.kvstore.tiers.ssd.files.record import BlockRecord, StaleRecord, encode, sequence_of

_SEGMENTS = b"segments"
# Per block, of address space and file: LMDB writes a changed page before it frees the old one.
_ENTRY_NBYTES = 512
_SLACK_NBYTES = 2 << 20
_MAP_SLACK_NBYTES = 64 << 20


class IndexWriteFailed(StoreError):
    """A change of the index is not on disk, or only possibly if the disk failed while syncing."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"the index {path} could not be written: {reason}")


class IndexDamaged(StoreError):
    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"the index {path} is damaged: {reason}")


class BlockIndex:
    def __init__(self, directory: Path, max_blocks: int) -> None:
        """Create or open ``directory``. Read an existing one by ``scan`` first."""
        self._directory = directory
        self._max_blocks = max_blocks
        self._env: lmdb.Environment | None = None
        self._reserve(self._opened())

    @property
    def path(self) -> Path:
        return self._directory / "data.mdb"

    def _opened(self) -> lmdb.Environment:
        if self._env is None:
            try:
                self._env = lmdb.open(
                    str(self._directory),
                    map_size=self._max_blocks * 2 * _ENTRY_NBYTES + _MAP_SLACK_NBYTES,
                    max_dbs=0,
                    lock=False,  # the tier has its own lock, and one thread writes
                    readahead=False,
                )
            except (lmdb.Error, OSError) as error:
                raise IndexWriteFailed(self._directory, str(error)) from error
        return self._env

    def _reserve(self, env: lmdb.Environment) -> None:
        """Allocate the file's space, so that blocks can be dropped when the disk is full."""
        nbytes = self._max_blocks * _ENTRY_NBYTES // 2 + _SLACK_NBYTES
        fd = os.open(self.path, os.O_RDWR)
        try:
            if os.fstat(fd).st_size < nbytes:
                os.posix_fallocate(fd, 0, nbytes)
        except OSError as error:
            self.close()
            raise IndexWriteFailed(self.path, f"{error}; it needs {nbytes} bytes") from error
        finally:
            os.close(fd)

    def apply(
        self,
        *,
        gone: Iterable[StaleRecord] = (),
        stored: Iterable[BlockRecord] = (),
        num_segments: int | None = None,
    ) -> None:
        """Make one durable transaction. ``gone``: a later record of the block is left.

        Raises ``IndexWriteFailed``: nothing is applied or, after a failed sync, possibly all.
        """
        with self._transaction() as transaction:
            for stale in gone:
                value = transaction.get(stale.key)
                if value is not None and sequence_of(bytes(value)) == stale.sequence:
                    transaction.delete(stale.key)
            for record in stored:
                transaction.put(record.key, encode(record))
            if num_segments is not None:
                transaction.put(_SEGMENTS, struct.pack("<Q", num_segments))

    def forget(self, keys: Iterable[bytes]) -> None:
        """Delete these keys durably. Raises ``IndexWriteFailed``."""
        with self._transaction() as transaction:
            for key in keys:
                transaction.delete(key)

    @contextmanager
    def _transaction(self) -> Iterator[lmdb.Transaction]:
        env = self._opened()
        try:
            with env.begin(write=True) as transaction:
                yield transaction
        except lmdb.Error as error:
            # After some errors LMDB refuses writes until it is opened again.
            self.close()
            raise IndexWriteFailed(self.path, str(error)) from error

    def close(self) -> None:
        if self._env is not None:
            self._env.close()
            self._env = None


def scan(directory: Path) -> tuple[int, list[tuple[bytes, bytes]]]:
    """Return (number of segments, [(key, encoded record), …]) of the index in ``directory``. Raises
    ``IndexDamaged``."""
    num_segments = 0
    entries = []
    for key, value in read_entries(directory):
        if key == _SEGMENTS and len(value) == 8:
            num_segments = struct.unpack("<Q", value)[0]
        else:
            entries.append((key, value))
    return num_segments, entries


def read_entries(directory: Path) -> Iterator[tuple[bytes, bytes]]:
    """Every key and value of the LMDB in ``directory``.

    LMDB maps its file, and a damaged one kills the process that reads it (SIGBUS, SIGSEGV, an assertion). So
    a child reads every page first. Raises ``IndexDamaged``: the child failed.
    """
    command = [sys.executable, "-P", str(Path(index_scan.__file__)), str(directory)]
    child = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    if child.returncode != 0:
        lines = child.stderr.decode(errors="replace").strip().splitlines() or ["no message"]
        raise IndexDamaged(directory, f"reading it ended with {child.returncode}: {lines[-1]}")
    return _split(child.stdout)


def _split(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    at = 0
    while at < len(data):
        key_nbytes, value_nbytes = index_scan.LENGTHS.unpack_from(data, at)
        at += index_scan.LENGTHS.size
        yield data[at : at + key_nbytes], data[at + key_nbytes : at + key_nbytes + value_nbytes]
        at += key_nbytes + value_nbytes


assert len(_SEGMENTS) != KEY_NBYTES
