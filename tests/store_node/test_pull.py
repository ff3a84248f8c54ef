"""A node of this host reads the bytes of a put from the memory of its writer."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from moonpool.kvstore.remote.object_store import RemoteStore
from moonpool.protos import node_pb2, store_pb2
from moonpool.transfer import checksum
from tests.store_node.conftest import StoreCluster

pytestmark = pytest.mark.asyncio(loop_scope="module")

rng = np.random.default_rng(7)
SMALL, ONE, MANY = (rng.integers(0, 256, nbytes, np.uint8) for nbytes in (100, 70_000, 1_000_001))


def calls_of(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    methods: list[str] = []
    call = RemoteStore.call

    async def recorded(self: RemoteStore, method: str, request: Any) -> Any:
        methods.append(method)
        return await call(self, method, request)

    monkeypatch.setattr(RemoteStore, "call", recorded)
    return methods


async def test_a_put_is_two_calls(shared: StoreCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    async with shared.client() as store:
        await store.put("first", ONE, node="a")  # tells the size of chunks
        methods = calls_of(monkeypatch)
        await store.batch_put({"one": ONE, "small": SMALL, "many": MANY}, node="a")
        assert methods == ["Begin", "Publish"]
        for name, value in (("one", ONE), ("small", SMALL), ("many", MANY)):
            found = await store.get(name)
            assert found is not None
            np.testing.assert_array_equal(found, value)


async def test_an_object_of_several_windows_is_written(
    shared: StoreCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    value = rng.integers(0, 256, 6_000_000, np.uint8)
    async with shared.client() as store:
        await store.put("first", ONE, node="a")
        methods = calls_of(monkeypatch)
        await store.batch_put({"long": value, "one": ONE}, node="a")
        assert "Commit" in methods
        found = await store.get("long")
        assert found is not None
        np.testing.assert_array_equal(found, value)


async def test_bytes_that_do_not_match_are_not_stored(shared: StoreCluster) -> None:
    async with shared.client(tenant="mismatch") as store:
        await store.put("first", ONE, node="a")
        node = (await store.nodes())["a"]
        info = store_pb2.ObjectInfo(key=store.tenant.key("x"), storage=7, name="x", nbytes=ONE.nbytes)
        assert await node.reads_from_us()
        with node._agent.register(ONE) as region:
            sizes = [node.chunk_nbytes, ONE.nbytes - node.chunk_nbytes]
            offsets = [0, node.chunk_nbytes]
            sums = [checksum(ONE[at : at + size].data) for at, size in zip(offsets, sizes, strict=True)]
            wrong = node_pb2.BlockSpans(region=[region.id] * 2, offset=offsets, checksum=[sums[0], 1])
            reply, _ = await node.begin(store.tenant.owner, [info], [b""], [wrong])
            assert not reply.steps[0].done
            # Nothing is left of it but the reservation to write it.
            assert len(reply.steps[0].chunks.offset) == 2
            await node.call("Abort", store_pb2.AbortRequest(put_id=[reply.steps[0].put_id]))
            right = node_pb2.BlockSpans(region=[region.id] * 2, offset=offsets, checksum=sums)
            reply, _ = await node.begin(store.tenant.owner, [info], [b""], [right])
            assert reply.steps[0].done
        usage = (await store.usage())["a"]
        assert usage.num_objects == 2


async def test_memory_of_others_is_not_asked_for_again(
    shared: StoreCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with shared.client() as store:
        await store.put("first", ONE, node="a")
        node = (await store.nodes())["a"]
        monkeypatch.setattr(node._agent, "incarnation", bytes(16))
        methods = calls_of(monkeypatch)
        await store.put("x", ONE, node="a")
        assert methods == ["Begin", "Commit", "Publish"]
        assert not await node.reads_from_us()
        found = await store.get("x")
        assert found is not None
        np.testing.assert_array_equal(found, ONE)


async def test_a_put_that_fails_or_is_cancelled_leaves_nothing(shared: StoreCluster) -> None:
    async with shared.client(tenant="cancelled") as store:
        await store.put("first", ONE, node="b")
        node = (await store.nodes())["b"]
        nothing = node_pb2.BlockSpans(region=[1 << 20] * 16, offset=[0] * 16, checksum=[0] * 16)
        # All of them together would take more than the node's memory.
        for storage in range(20):
            info = store_pb2.ObjectInfo(key=bytes(16), storage=9 + storage, name="x", nbytes=MANY.nbytes)
            reply, _ = await node.begin(store.tenant.owner, [info], [b""], [nothing])
            await node.call("Abort", store_pb2.AbortRequest(put_id=[reply.steps[0].put_id]))
        for delay_s in (0.0, 0.001, 0.003):
            putting = asyncio.create_task(store.put("x", MANY, node="b"))
            await asyncio.sleep(delay_s)
            putting.cancel()
            await asyncio.gather(putting, return_exceptions=True)
        await store.put("x", MANY, node="b")
        assert (await store.stat_existing("x")).nodes == ("b",)
        found = await store.get("x")
        assert found is not None
        np.testing.assert_array_equal(found, MANY)
