"""Objects come back as they were put, to their tenant only."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
import torch

from moonpool.kvstore.client import putter
from moonpool.kvstore.client.errors import BadObject, NoRecords, ObjectMissing, PutFailed, UnknownNode
from moonpool.kvstore.remote.object_store import RemoteStore
from moonpool.protos import node_pb2, node_pb2_grpc, store_pb2
from moonpool.runtime.errors import RemoteError
from tests.store_node.conftest import StoreCluster

pytestmark = pytest.mark.asyncio(loop_scope="module")

rng = np.random.default_rng(7)


async def test_arrays_come_back_with_their_type(shared: StoreCluster) -> None:
    values = {
        "floats": rng.standard_normal((3, 5, 7)).astype(np.float32),
        "halves": rng.standard_normal(33).astype(np.float16),
        "flags": np.array([True, False, True]),
        "scalar": np.array(42, np.int64),
        "empty": np.empty((0, 4), np.int16),
        "big-endian": np.arange(9, dtype=">i4"),
        "complex": np.array([1 + 2j]),
        # One chunk less a byte, exactly one, one and a byte; then more than a window of them.
        **{f"{n} bytes": rng.integers(0, 256, n, np.uint8) for n in (1, 65535, 65536, 65537, 5_000_001)},
    }
    async with shared.client(tenant="arrays") as store:
        for name, value in values.items():
            await store.put(name, value)
        for name, value in values.items():
            found = await store.get(name)
            assert found is not None
            assert (found.dtype, found.shape) == (value.dtype, value.shape)
            np.testing.assert_array_equal(found, value)
        listed = await store.ls()
        assert [stat.name for stat in listed] == sorted(values)
        assert {node for stat in listed for node in stat.nodes} == {"a", "b"}


async def test_tensors_and_buffers_without_copies(shared: StoreCluster) -> None:
    async with shared.client() as store:
        weights = torch.randn(64, 300, dtype=torch.bfloat16)
        await store.put("weights", weights)
        out = torch.zeros(64, 300, dtype=torch.bfloat16)
        assert await store.get_into("weights", out)
        assert torch.equal(out, weights)
        with pytest.raises(BadObject, match=r"bfloat16.*get_into"):
            await store.get("weights")
        await store.put("text", b"and it came to pass")
        found = await store.get("text")
        assert found is not None
        assert bytes(found) == b"and it came to pass"
        into = bytearray(19)
        assert await store.get_into("text", into)
        assert into == b"and it came to pass"
        # Any dtype may be read as plain bytes.
        assert await store.get_into("weights", np.empty(weights.nbytes, np.uint8))


async def test_what_is_missing_is_none_or_an_error_never_empty(shared: StoreCluster) -> None:
    async with shared.client() as store:
        out = np.full(4, 7.0)
        assert await store.get("nothing") is None
        assert await store.get_into("nothing", out) is False
        assert (out == 7.0).all()
        assert await store.exists("nothing") is False
        assert await store.stat("nothing") is None
        assert await store.remove("nothing") is False
        assert await store.batch_get(["nothing", "more"]) == [None, None]
        with pytest.raises(ObjectMissing, match="'nothing'"):
            await store.get("nothing", required=True)
        with pytest.raises(ObjectMissing, match="'nothing'"):
            await store.get_into("nothing", out, required=True)


async def test_batches_keep_their_order(shared: StoreCluster) -> None:
    values = {f"n{i}": np.full(10 + 700 * i, i, np.int32) for i in range(40)}
    async with shared.client(tenant="batches") as store:
        await store.batch_put(values)
        names = [*values, "absent", "n3"]
        found = await store.batch_get(names)
        for name, array in zip(names, found, strict=True):
            if name == "absent":
                assert array is None
            else:
                np.testing.assert_array_equal(array, values[name])
        assert await store.batch_exists(["n0", "absent"]) == [True, False]
        outs = {"n5": np.empty_like(values["n5"]), "absent": np.empty(3), "n39": np.empty_like(values["n39"])}
        assert await store.batch_get_into(outs) == [True, False, True]
        np.testing.assert_array_equal(outs["n39"], values["n39"])
        assert await store.batch_remove([*values, "absent"]) == len(values)
        assert await store.ls() == []


async def test_more_objects_are_removed_than_one_message_names(shared: StoreCluster) -> None:
    async with shared.client(tenant="many") as store:
        names = [f"absent-{number}" for number in range((1 << 16) + 1)]
        assert await store.batch_remove(names) == 0
        await store.batch_put({"first": np.zeros(3), "last": np.zeros(3)})
        assert await store.batch_remove(["first", *names, "last", "first"]) == 2
        assert await store.ls() == []


async def test_a_put_without_records_raises_once_no_node_is_sent_bytes(
    shared: StoreCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its caller may change or free the values then."""
    begun, ended = asyncio.Event(), asyncio.Event()

    async def send(node: RemoteStore, *_: Any) -> list[str]:
        if node.node_id == "a":
            await begun.wait()
            raise RemoteError("a", "RecordsLost", "UNAVAILABLE", "records are being restored")
        begun.set()
        try:
            return await asyncio.get_running_loop().create_future()
        finally:
            ended.set()

    monkeypatch.setattr(putter, "send", send)
    async with shared.client(tenant="no records") as store:
        with pytest.raises(NoRecords, match="are being restored"):
            await store.batch_put({f"n{i}": np.zeros(4) for i in range(40)})
        assert ended.is_set()


async def test_the_last_put_counts_wherever_it_went(shared: StoreCluster) -> None:
    async with shared.client() as store, shared.client() as other:
        for node, value in (("a", 1), ("b", 2), ("a", 3)):
            await store.put("x", np.array(value), node=node)
            found = await other.get("x")
            assert found is not None
            assert found == value
            stat = await other.stat("x")
            assert stat is not None
            assert stat.nodes == (node,)
        reading = await store.get("x")
        await other.put("x", np.array(4))
        assert reading == 3  # what was read is the reader's own


async def test_a_tenant_neither_sees_nor_touches_anothers(shared: StoreCluster) -> None:
    async with (
        shared.client(tenant="one", salt="s3cret") as one,
        shared.client(tenant="one", salt="guess") as guesser,
        shared.client(tenant="two", salt="s3cret") as salted,
    ):
        await one.put("mine", np.arange(4))
        for other in (guesser, salted):
            assert await other.get("mine") is None
            assert await other.exists("mine") is False
            assert await other.ls() == []
            assert await other.remove("mine") is False
            # Even who came to know the key is not its owner.
            key = one.tenant.key("mine")
            assert await other._find([key]) == {}
        assert (await one.get("mine") == np.arange(4)).all()


async def test_a_node_serves_an_object_to_its_owner_only(shared: StoreCluster) -> None:
    async with shared.client(tenant="one", salt="s3cret") as one, shared.client(tenant="two") as two:
        value = np.arange(40_000)
        await one.put("mine", value, node="a")
        node = (await one.nodes())["a"]
        key, owner = one.tenant.key("mine"), two.tenant.owner
        (record,) = (await one._find([key])).values()
        storage = record.info.storage
        known = store_pb2.OpenObject(key=key, storage=storage)
        for wanted in (store_pb2.OpenObject(key=key), known):
            opened, _, _ = await node.open(owner, [wanted])
            assert opened[0].absent
            assert not opened[0].lease_id
        for method, request in (
            ("Find", store_pb2.FindRequest(owner=owner, keys=key)),
            ("Find", store_pb2.FindRequest(owner=owner, keys=key, last_known=True)),
            ("List", store_pb2.ListRequest(owner=owner)),
            ("List", store_pb2.ListRequest(owner=owner, last_known=True)),
            ("Remove", store_pb2.RemoveRequest(owner=owner, objects=[known])),
            ("Check", store_pb2.CheckRequest(owner=owner, objects=[known])),
            ("Reconcile", store_pb2.ReconcileRequest(owner=owner, keys=key)),
            ("Abort", store_pb2.AbortRequest(owner=owner, storage=[storage])),
        ):
            answer = await node.call(method, request)
            nothing = (
                store_pb2.RemoveReply(removed=[False], storage=[0]) if method == "Remove" else type(answer)()
            )
            assert answer == nothing, (method, answer)
        assert (await node.call("Usage", store_pb2.UsageRequest(owner=owner))).num_objects == 0
        # A put of another's bytes is refused; one under another's key is an object of its own.
        info = store_pb2.ObjectInfo(key=key, storage=storage, name="mine", nbytes=value.nbytes)
        put = await node.call("Begin", store_pb2.BeginRequest(owner=owner, objects=[info], ttl_s=5.0))
        assert "not its owner's" in put.steps[0].error
        info.storage += 1
        info.nbytes = 1
        await node.call("Begin", store_pb2.BeginRequest(owner=owner, objects=[info], ttl_s=5.0, data=[b"x"]))
        wanted_by = store_pb2.PublishObject(key=key, storage=info.storage, places=["a"], copies=1)
        await node.call("Publish", store_pb2.PublishRequest(owner=owner, objects=[wanted_by]))
        # Leases are ended by those who were told their names.
        (mine,), _, _ = await node.open(one.tenant.owner, [store_pb2.OpenObject(key=key)])
        guesses = [*range(64), *(each + 1 for each in mine.lease_id)]
        await node.call("Close", store_pb2.CloseRequest(lease_id=guesses))
        status = await node_pb2_grpc.NodeStub(node._channel).Status(node_pb2.StatusRequest())
        assert sum(tier.num_used_blocks for tier in status.tiers) >= 1
        node.release([mine])
        assert (await one.get("mine") == value).all()


async def test_what_cannot_be_stored_is_refused_in_a_sentence(shared: StoreCluster) -> None:
    async with shared.client() as store:
        for value, why in (
            (np.array([object()]), "cannot be stored"),
            (np.zeros((4, 4))[:, ::2], "ascontiguousarray"),
            ("text", "str cannot be stored"),
            (torch.zeros(3, requires_grad=True), "cannot be used"),
            (torch.zeros(4, 4).t()[:, :2], "cannot be used"),
        ):
            with pytest.raises(BadObject, match=why):
                await store.put("bad", value)
        assert await store.exists("bad") is False
        with pytest.raises(BadObject, match="1 to 4096 bytes"):
            await store.put("", np.zeros(1))
        with pytest.raises(UnknownNode, match="there are a, b"):
            await store.put("x", np.zeros(1), node="c")
        with pytest.raises(PutFailed, match="no room for an object of 40000000 bytes"):
            await store.put("too large", np.zeros(40_000_000, np.uint8))
        assert await store.exists("too large") is False
        await store.put("x", np.zeros(4))
        with pytest.raises(BadObject, match="32 bytes"):
            await store.get_into("x", np.zeros(5))
        with pytest.raises(BadObject, match="of float64"):
            await store.get_into("x", np.zeros(4, np.int64))
