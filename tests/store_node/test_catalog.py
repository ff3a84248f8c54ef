"""The catalogue of objects on disk: damaged files are set aside, and what is flushed is durable."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import lmdb
import pytest

from moonpool.kvstore.objects.catalog import Catalogue
from moonpool.protos import store_pb2

NUM_OBJECTS = 3000
# A process of its own, because a damaged file kills it: opens, counts, puts one more and counts again.
OPEN = """
import asyncio, sys
from pathlib import Path
from moonpool.kvstore.objects.catalog import Catalogue
from moonpool.protos import store_pb2

async def main():
    catalogue = Catalogue(Path(sys.argv[1]))
    before = len(catalogue.objects)
    catalogue.remember(store_pb2.StoredObject(info=store_pb2.ObjectInfo(key=b"new key of 16 by")))
    await catalogue.close()
    again = Catalogue(Path(sys.argv[1]))
    print(before, len(again.objects), any(key.startswith(b"new key of 16 by") for key in again.objects))
    await again.close()

asyncio.run(main())
"""


def opened(path: Path) -> tuple[int, str]:
    child = subprocess.run([sys.executable, "-c", OPEN, path], capture_output=True, text=True, check=False)
    return child.returncode, child.stdout


async def written(path: Path) -> None:
    catalogue = Catalogue(path)
    for number in range(NUM_OBJECTS):
        info = store_pb2.ObjectInfo(key=number.to_bytes(16, "big"), name=f"object {number}", storage=1)
        catalogue.remember(store_pb2.StoredObject(info=info, owner=bytes(16)))
    await catalogue.close()


def garbled(data: bytes) -> bytes:
    rng = random.Random(1)
    pages = bytearray(data)
    for at in range(8192, len(pages) - 4096, 8192):
        pages[at : at + 4096] = rng.randbytes(4096)
    return bytes(pages)


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "cut off": lambda data: data[: len(data) // 2],
    "only its first pages": lambda data: data[:8192],
    "random pages": garbled,
    "text": lambda data: b"not a database " * 1000,
    "empty": lambda data: b"",
}


@pytest.mark.slow
@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
async def test_a_damaged_file_is_set_aside(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    await written(tmp_path)
    file = tmp_path / "data.mdb"
    file.write_bytes(damaged := damage(file.read_bytes()))
    assert opened(tmp_path) == (0, "0 1 True\n")
    if damaged:
        assert (tmp_path / "set-aside-0" / "data.mdb").read_bytes() == damaged


KEY_OF_7 = (7).to_bytes(16, "big") + (1).to_bytes(8, "big")


async def test_a_record_that_cannot_be_read_costs_that_object_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    await written(tmp_path)
    with lmdb.open(str(tmp_path), lock=False) as environment, environment.begin(write=True) as transaction:
        transaction.put(KEY_OF_7, b"\xff\xff\xff")
    catalogue = Catalogue(tmp_path)
    assert len(catalogue.objects) == NUM_OBJECTS - 1
    assert KEY_OF_7.hex() in caplog.text
    await catalogue.close()


async def test_what_is_flushed_is_synced(tmp_path: Path) -> None:
    """Each transaction syncs its pages and its meta page, or a power loss undoes it."""
    catalogue = Catalogue(tmp_path)
    info = store_pb2.ObjectInfo(key=bytes(16))
    catalogue.remember(store_pb2.StoredObject(info=info))
    await catalogue.flush()
    assert catalogue._env is not None
    assert catalogue._env.flags()["metasync"]
    assert catalogue._env.flags()["sync"]
    assert os.listdir(tmp_path) == ["data.mdb"]
    await catalogue.close()
