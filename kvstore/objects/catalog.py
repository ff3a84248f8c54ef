"""The objects a node remembers over a restart: an LMDB file beside the SSD tier that holds their chunks."""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import lmdb
from google.protobuf.message import DecodeError

from moonpool.protos import store_pb2

log = logging.getLogger(__name__)

_MAP_NBYTES = 1 << 30  # address space, not disk: some 200 bytes an object


class Catalogue:
    """``remember`` and ``forget`` return at once; a thread writes many changes in one transaction.

    If the disk fails or stalls, the objects put since are lost after a restart.
    """

    def __init__(self, path: Path) -> None:
        """Open or create ``path``. One that cannot be read is set aside under another name."""
        path.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._env, self.objects = _open(path)
        self._pending: dict[bytes, bytes | None] = {}
        self._thread = ThreadPoolExecutor(1, "catalogue")
        self._writing: asyncio.Future[None] | None = None

    def remember(self, record: store_pb2.StoredObject) -> None:
        self._pending[record.info.key] = record.SerializeToString()
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
        self._env.close()

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
                except lmdb.Error as error:
                    log.error("%s: %d changes were not written: %s", self._path, len(batch), error)
        finally:
            self._writing = None

    def _write(self, batch: dict[bytes, bytes | None]) -> None:
        with self._env.begin(write=True) as transaction:
            for key, value in batch.items():
                if value is None:
                    transaction.delete(key)
                else:
                    transaction.put(key, value)


def _open(path: Path) -> tuple[lmdb.Environment, dict[bytes, store_pb2.StoredObject]]:
    try:
        environment = lmdb.open(str(path), map_size=_MAP_NBYTES, metasync=False)
        try:
            return environment, _load(environment)
        except BaseException:
            environment.close()
            raise
    except (lmdb.Error, DecodeError) as error:
        number = sum(1 for _ in path.glob("data.mdb.damaged-*")) + 1
        for file in ("data.mdb", "lock.mdb"):
            if (path / file).exists():
                (path / file).rename(path / f"{file}.damaged-{number}")
        log.error("%s cannot be read and was set aside (*.damaged-%d): %s", path, number, error)
        return lmdb.open(str(path), map_size=_MAP_NBYTES, metasync=False), {}


def _load(environment: lmdb.Environment) -> dict[bytes, store_pb2.StoredObject]:
    with environment.begin() as transaction:
        return {
            bytes(key): store_pb2.StoredObject.FromString(bytes(value)) for key, value in transaction.cursor()
        }
