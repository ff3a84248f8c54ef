"""The objects a node remembers over a restart: an LMDB file beside the SSD tier that holds their chunks."""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import lmdb
from google.protobuf.message import DecodeError

from moonpool.kvstore.tiers.ssd.files.block_index import IndexDamaged, read_entries
from moonpool.kvstore.tiers.ssd.files.directory import set_aside
from moonpool.protos import store_pb2

log = logging.getLogger(__name__)

_MAP_NBYTES = 64 << 30  # address space, not disk: some 200 bytes an object, and the bytes of small ones
# What is known of the records in Redis lies beside the objects, under keys that no object has.
_GENERATION = b"generation-"


class Catalogue:
    """``remember`` and ``forget`` return at once; a thread writes many changes in one transaction.

    If the disk fails or stalls, the objects put since are lost after a restart.
    """

    def __init__(self, path: Path) -> None:
        """Open or create ``path``, which no other process uses: the SSD tier's lock sees to that. A file that
        cannot be read is set aside in a folder of ``path``."""
        path.mkdir(parents=True, exist_ok=True)
        self._path = path
        self.objects = _read(path)
        # Of the buckets of records, as they were when it was opened.
        self.generations = {
            key[-1]: self.objects.pop(key).owner for key in list(self.objects) if key.startswith(_GENERATION)
        }
        self._env: lmdb.Environment | None = None
        self._pending: dict[bytes, bytes | None] = {}
        self._thread = ThreadPoolExecutor(1, "catalogue")
        self._writing: asyncio.Future[None] | None = None

    def remember(self, record: store_pb2.StoredObject) -> None:
        self._pending[self.key_of(record)] = record.SerializeToString()
        self._write_soon()

    @staticmethod
    def key_of(record: store_pb2.StoredObject) -> bytes:
        return record.info.key + record.info.storage.to_bytes(8, "big")

    def remember_generation(self, bucket: int, generation: bytes) -> None:
        """The generation of a bucket of records, as ``Records`` knows it."""
        self._pending[_GENERATION + bytes([bucket])] = store_pb2.StoredObject(
            owner=generation
        ).SerializeToString()
        self._write_soon()

    def forget(self, key: bytes) -> None:
        self._pending[key] = None
        self._write_soon()

    async def flush(self) -> None:
        """Wait until all changes so far are on disk or have failed."""
        while self._writing is not None:
            await asyncio.shield(self._writing)

    async def close(self) -> None:
        await self.flush()
        self._thread.shutdown()
        self._close()

    def _write_soon(self) -> None:
        if self._writing is None:
            self._writing = asyncio.ensure_future(self._write_all())

    async def _write_all(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while self._pending:
                batch, self._pending = self._pending, {}
                try:
                    await loop.run_in_executor(self._thread, self._write, batch)
                except (lmdb.Error, OSError) as error:
                    log.error("%s: %d changes were not written: %s", self._path, len(batch), error)
        finally:
            self._writing = None

    def _write(self, batch: dict[bytes, bytes | None]) -> None:
        if self._env is None:
            self._env = lmdb.open(str(self._path), map_size=_MAP_NBYTES, max_dbs=0, lock=False)
        try:
            with self._env.begin(write=True) as transaction:
                for key, value in batch.items():
                    if value is None:
                        transaction.delete(key)
                    else:
                        transaction.put(key, value)
        except lmdb.Error:
            # After some errors LMDB refuses writes until it is opened again.
            self._close()
            raise

    def _close(self) -> None:
        if self._env is not None:
            self._env.close()
            self._env = None


def _read(path: Path) -> dict[bytes, store_pb2.StoredObject]:
    """The objects in ``path``. A record that cannot be read is left out, a damaged file is set aside."""
    if not (path / "data.mdb").exists():
        return {}
    found: dict[bytes, store_pb2.StoredObject] = {}
    try:
        for key, value in read_entries(path):
            try:
                found[key] = store_pb2.StoredObject.FromString(value)
            except DecodeError as error:
                log.error("%s: the object %s was skipped: %s", path, key.hex(), error)
    except IndexDamaged as error:
        aside = set_aside(path, "data.mdb")
        log.error("%s; it was set aside in %s, and its objects are lost on this node", error, aside)
    return found
