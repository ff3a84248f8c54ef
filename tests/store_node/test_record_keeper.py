"""What a keeper of records does in the background."""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from moonpool.kvstore.client.errors import NoStoreNodes
from moonpool.kvstore.index.redis.client import connect
from moonpool.kvstore.index.redis.kv_index import KVIndex
from moonpool.kvstore.objects.records import Records
from moonpool.kvstore.store_node.reconciler import Reconciler
from moonpool.kvstore.store_node.record_keeper import RecordKeeper
from moonpool.protos import node_pb2, store_pb2
from tests.kvstore.redis_servers import Server
from tests.processes import stop
from tests.store_node.test_room import OWNER, put, shelf_of


async def test_work_that_comes_just_as_the_last_ends_is_done() -> None:
    nothing: Any = None
    shelf: Any = SimpleNamespace(inventory=SimpleNamespace())
    keeper, done = RecordKeeper("a", shelf, nothing, nothing), asyncio.Event()

    async def second() -> None:
        done.set()

    async def first() -> None:
        # Runs when the task has ended, before those that wait for it are told.
        asyncio.get_running_loop().call_soon(keeper._start, "lost", second)

    keeper._start("lost", first)
    async with asyncio.timeout(60):
        await done.wait()
    await keeper.close()


class NoPeers:
    async def current(self) -> Any:
        raise NoStoreNodes("test")


async def test_a_copy_lost_while_redis_does_not_answer_is_named_no_longer_when_it_does() -> None:
    peers: Any = NoPeers()
    # pytest's tmp_path is too long for a Unix socket's address.
    with tempfile.TemporaryDirectory(prefix="rk") as path:
        server = Server(Path(path))
        await server.start()
        assert server.process is not None
        redis = connect(server.url)
        async with shelf_of(8) as shelf:
            index = KVIndex(redis, timeout_s=60.0)
            records = Records(index, restoring_s=0.0)
            keeper = RecordKeeper("a", shelf, records, peers)
            reconciler = Reconciler("a", shelf, keeper, peers, node_pb2.KvAddress)
            await reconciler.turn()  # the first one looks for what a former life has left
            stored = await put(shelf, 1)
            name = (OWNER, stored.info.key)
            wanted = store_pb2.PublishObject(
                key=stored.info.key, storage=stored.info.storage, places=["a", "b"], copies=2
            )
            assert await keeper.publish(OWNER, [wanted]) == [""]
            stop(server.process.pid)
            index._timeout_s = 0.5
            shelf.inventory.lose(stored)
            await keeper.reported()
            index._timeout_s = 60.0
            os.kill(server.process.pid, signal.SIGCONT)
            async with asyncio.timeout(60):
                while True:
                    await reconciler.turn()
                    await keeper.reported()
                    (record,) = await records.read([name])
                    assert record is not None
                    if record.body.places == ["b"]:
                        break
            await keeper.close()
        await redis.aclose()
        await server.kill()


async def test_objects_published_together_or_at_once_pin_half_of_the_room_at_most() -> None:
    peers: Any = NoPeers()
    with tempfile.TemporaryDirectory(prefix="rk") as path:
        server = Server(Path(path))
        await server.start()
        redis = connect(server.url)
        async with shelf_of(16) as shelf:
            keeper = RecordKeeper("a", shelf, Records(KVIndex(redis), restoring_s=0.0), peers)
            wanted = [
                store_pb2.PublishObject(
                    key=stored.info.key,
                    storage=stored.info.storage,
                    places=["a"],
                    copies=1,
                    pin=store_pb2.HARD,
                )
                for stored in [await put(shelf, number) for number in range(4)]
            ]
            calls = (keeper.publish(OWNER, wanted[first : first + 2]) for first in (0, 2))
            errors = [error for found in await asyncio.gather(*calls) for error in found]
            assert [bool(error) for error in errors] == [False, False, True, True]
            assert "half of its room" in errors[-1]
            # Those that were refused can be published without a pin.
            for each in wanted[2:]:
                each.pin = store_pb2.NONE
            assert await keeper.publish(OWNER, wanted[2:]) == ["", ""]
            await keeper.close()
        await redis.aclose()
        await server.kill()
