"""Nodes and clients that die, and bytes that rot."""

from __future__ import annotations

import asyncio
import signal

import numpy as np
import psutil
import pytest

from moonpool.kvstore.client import StoreClient
from moonpool.kvstore.client.connections import preference_order
from moonpool.kvstore.client.errors import (
    BadObject,
    NoNodeAnswered,
    NoStoreNodes,
    ObjectUnreachable,
    PutFailed,
    StoreClientError,
)
from moonpool.protos import node_pb2, node_pb2_grpc, store_pb2
from moonpool.runtime.config.options import TransferOptions
from moonpool.transfer import GrantLapsed, Span
from tests.cluster.conftest import eventually
from tests.forked_command import forked_command
from tests.processes import stop
from tests.store_node.conftest import StoreCluster

rng = np.random.default_rng(11)


async def read(store: StoreClient, name: str) -> np.ndarray | None:
    """Of a node that grants its memory for a second or two: less than a busy machine may need for a read."""
    async with asyncio.timeout(60):
        while True:
            try:
                return await store.get(name)
            except ObjectUnreachable:
                await asyncio.sleep(0.1)


async def test_copies_survive_a_node(cluster: StoreCluster) -> None:
    value = rng.standard_normal(300_000)
    await asyncio.gather(cluster.start("a"), cluster.start("b"))
    async with cluster.client() as store:
        await store.put("kept", value, copies=2, node="b")
        await store.put("single", value, node="a")
        stat = await store.stat("kept")
        assert stat is not None
        assert stat.nodes == ("a", "b")
        with pytest.raises(PutFailed, match="3 were requested"):
            await store.put("three", value, copies=3)
        assert await store.replicate("single", 2) == ("a", "b")
        await cluster.kill("b")
        for name in ("kept", "single"):
            np.testing.assert_array_equal(await store.get(name), value)


async def test_two_clients_may_replicate_an_object_at_once(cluster: StoreCluster) -> None:
    await asyncio.gather(cluster.start("a"), cluster.start("b"))
    async with cluster.client() as store, cluster.client() as other:
        value = rng.integers(0, 255, 12 << 20, np.uint8)
        await store.put("hot", value, node="a")
        calls = [each.replicate("hot", 2) for each in (store, other)]
        assert {tuple(sorted(found)) for found in await asyncio.gather(*calls)} == {("a", "b")}
        await cluster.kill("a")
        assert (await other.get("hot") == value).all()


async def test_an_unhealthy_node_is_given_objects_only_where_there_is_no_other(cluster: StoreCluster) -> None:
    """It wants more memory than any host has."""
    ill = {"health__host_memory_free": 0.999, "health__bad_readings": 1}
    await asyncio.gather(cluster.start("a", **ill), cluster.start("b"))
    names = [str(number) for number in range(8)]
    async with cluster.client() as store:
        await store.put("before", np.ones(8), node="a")
        for name in names:
            await store.put(name, np.ones(8))
        stats = [await store.stat(name) for name in names]
        assert {stat.nodes for stat in stats if stat is not None} == {("b",)}
        assert await store.get("before") is not None
        await cluster.kill("b")
        await store.put("after", np.ones(8))
        stat = await store.stat("after")
        assert stat is not None
        assert stat.nodes == ("a",)


async def test_a_cluster_without_store_nodes_says_so(cluster: StoreCluster) -> None:
    async with cluster.client() as store:
        with pytest.raises(NoStoreNodes, match="moonpool store-node"):
            await store.get("x")
        # One that comes is found.
        await cluster.start("a")
        assert await store.get("x") is None


async def test_a_client_killed_in_a_put_leaves_nothing_behind(cluster: StoreCluster) -> None:
    # A reservation lives for twice the node's longest transfer.
    node = await cluster.start("a", transfer__deadline_s=1.0)
    command = [*forked_command("tests.store_node.putter"), node.ready["rpc_address"], str(12 << 20)]
    putter = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    assert putter.stdout is not None
    assert await putter.stdout.readline() == b"written\n"
    putter.kill()
    await putter.wait()
    async with cluster.client() as store:
        assert await store.get("half") is None
        assert await store.ls() == []
        # All of the node's memory is free again: what needs it all gets it.
        whole = np.ones(16 << 20, np.uint8)
        async with asyncio.timeout(60):
            while True:
                try:
                    await store.put("whole", whole)
                    break
                except PutFailed:
                    await asyncio.sleep(0.1)
        found = await read(store, "whole")
        assert found is not None
        assert (found == whole).all()
        assert await store.get("half") is None


async def test_a_write_that_comes_late_does_not_land_in_another_tenants_object(cluster: StoreCluster) -> None:
    """A client is stopped in a put, its reservation lapses, another tenant gets the memory, it goes on."""
    node = await cluster.start("a", transfer__deadline_s=0.5, transfer__checksum="false")
    command = [*forked_command("tests.store_node.putter"), node.ready["rpc_address"], str(12 << 20), "late"]
    putter = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    assert putter.stdout is not None
    assert await putter.stdout.readline() == b"written\n"
    async with cluster.client(tenant="another") as store:
        whole = np.ones(16 << 20, np.uint8)
        async with asyncio.timeout(60):
            while True:
                try:
                    await store.put("whole", whole)
                    break
                except PutFailed:
                    await asyncio.sleep(0.1)
        putter.send_signal(signal.SIGCONT)
        assert [await putter.stdout.readline() for _ in range(2)] == [b"GrantLapsed\n"] * 2
        putter.kill()
        await putter.wait()
        usage = next(iter((await store.usage()).values()))
        assert usage.num_objects == 1
        found = await read(store, "whole")
        assert found is not None
        assert (found == 1).all()


async def test_a_reader_with_more_time_than_its_lease_reads_no_reused_memory(cluster: StoreCluster) -> None:
    await cluster.start("a", transfer__deadline_s=0.5, transfer__checksum="false")
    unchecked = TransferOptions(checksum=False)
    async with cluster.client(tenant="one", transfer=unchecked) as one, cluster.client(tenant="two") as two:
        await one.put("mine", np.ones(2 << 20, np.uint8))
        node = (await one.nodes())["a"]
        wanted = store_pb2.OpenObject(key=one.tenant.key("mine"))
        opened, nbytes, held = await node.open(one.tenant.owner, [wanted])
        assert held.seconds_left < 1.0, "the client would have liked twice its 30 s"
        async with asyncio.timeout(60):
            while True:
                try:
                    await two.put("whole", np.full(16 << 20, 2, np.uint8))
                    break
                except PutFailed:
                    await asyncio.sleep(0.1)
        with node._agent.allocate(2 << 20, "copy") as copy:
            spans = [Span(copy.id, at, nbytes) for at in range(0, 2 << 20, nbytes)]
            with pytest.raises(GrantLapsed, match="store node a granted its memory for 1 s"):
                await node.fetch(spans, opened, held)


@pytest.mark.slow
async def test_a_node_killed_in_puts_shows_only_whole_objects(cluster: StoreCluster) -> None:
    """kill -9 of one of two nodes at moments spread over a put: what can be got is one of what was put."""
    await asyncio.gather(cluster.start("a"), cluster.start("b"))
    async with cluster.client(deadline_s=5.0) as store:
        old = np.zeros(6 << 20, np.uint8)
        await store.put("x", old, copies=2)
        for round_number in range(1, 5):
            new = np.full(6 << 20, round_number, np.uint8)
            put = asyncio.create_task(store.put("x", new, node="a"))
            await asyncio.sleep(0.002 * round_number)
            await cluster.kill("a")
            try:
                await put
                # It was complete on "a", and is gone with it, or went to "b" in its stead.
                expected = {None, round_number}
            except StoreClientError:
                expected = {round_number - 1, round_number}
            found = await store.get("x")
            assert found is None or (found == found[0]).all()
            assert (None if found is None else int(found[0])) in expected
            await cluster.start("a")
            await store.put("x", new, node="b")


async def test_a_stopped_node_is_no_hang(cluster: StoreCluster) -> None:
    await asyncio.gather(cluster.start("a"), cluster.start("b"))
    async with cluster.client() as patient, cluster.client(deadline_s=2.0) as store:
        await patient.put("on a", np.arange(9), node="a")
        await patient.put("on b", np.arange(9), node="b")
        process = psutil.Process(cluster.nodes["a"].pid)
        stop(process.pid)
        try:
            async with asyncio.timeout(60):
                assert (await store.get("on b") == np.arange(9)).all()
                with pytest.raises(ObjectUnreachable, match="on a, and none"):
                    await store.get("on a", required=True)
                await store.put("new", np.arange(3), node="a")  # goes to b
        finally:
            process.resume()
        assert (await patient.get("new") == np.arange(3)).all()


async def test_memory_is_the_callers_again_when_a_read_fails(cluster: StoreCluster) -> None:
    """One of two objects does not fit, while the node of the other one is stopped."""
    await asyncio.gather(cluster.start("a"), cluster.start("b"))
    async with cluster.client() as store:
        # Each is asked for at its own node.
        key = store.tenant.key
        names = {preference_order(key(name), ("a", "b"))[0]: name for name in map(str, range(99))}
        for node, name in names.items():
            await store.put(name, np.ones(1 << 20, np.uint8), node=node)
        out = np.zeros(1 << 20, np.uint8)
        before = asyncio.all_tasks()
        process = psutil.Process(cluster.nodes["b"].pid)
        stop(process.pid)
        try:
            async with asyncio.timeout(20):
                with pytest.raises(BadObject, match="read it into has 8"):
                    await store.batch_get_into({names["a"]: np.zeros(1), names["b"]: out})
        finally:
            process.resume()
        while not asyncio.all_tasks() <= before:  # noqa: ASYNC110 (a read that goes on has no name)
            await asyncio.sleep(0.01)
        assert not out.any()


async def test_no_answer_is_not_a_missing_object(cluster: StoreCluster) -> None:
    await cluster.start("a", index__lease_ttl_s=60.0)
    async with cluster.client() as patient, cluster.client(deadline_s=2.0) as store:
        await patient.put("x", np.arange(3))
        await cluster.kill("a")  # the index names it until its lease lapses
        for ask in (store.get("x"), store.stat("x"), store.exists("x"), store.ls(), store.remove("x")):
            with pytest.raises(NoNodeAnswered, match=r"\(a\)"):
                await ask


async def test_a_damaged_copy_is_dropped_and_the_other_one_read(cluster: StoreCluster) -> None:
    await asyncio.gather(cluster.start("a"), cluster.start("b"))
    value = rng.integers(0, 256, 1 << 20, np.uint8)
    marker = value[70_000:70_032].tobytes()
    async with cluster.client() as store:
        await store.put("x", value, copies=2)
        assert flip(cluster.nodes["a"].pid, marker), "the object is not where it should be"
        for _ in range(2):  # whichever copy is asked for first
            np.testing.assert_array_equal(await store.get("x"), value)
        assert flip(cluster.nodes["b"].pid, marker)
        out = np.zeros_like(value)
        async with asyncio.timeout(60):
            while await store.get_into("x", out):
                # "a" had repaired its copy from the one on "b" before that was damaged.
                np.testing.assert_array_equal(out, value)
                for name in "ab":
                    flip(cluster.nodes[name].pid, marker)
        assert await store.stat("x") is None
        assert "damaged" in cluster.log("a") + cluster.log("b")


def flip(pid: int, marker: bytes) -> int:
    """Change a byte of each copy of ``marker`` in another process's memory; returns how many there are."""
    found = 0
    with open(f"/proc/{pid}/maps") as maps, open(f"/proc/{pid}/mem", "r+b", buffering=0) as memory:
        for line in maps:
            span, flags, *rest = line.split()
            begin, end = (int(part, 16) for part in span.split("-"))
            # Anonymous memory, or a memfd that others on this host can map.
            is_pool = not rest[3:] or rest[3].startswith("/memfd:")
            if not flags.startswith("rw-") or not is_pool or end - begin < 1 << 20:
                continue
            memory.seek(begin)
            data = memory.read(end - begin)
            at = data.find(marker)
            while at >= 0:
                memory.seek(begin + at)
                memory.write(bytes([marker[0] ^ 1]))
                found += 1
                at = data.find(marker, at + 1)
    return found


async def test_a_node_tells_its_status_while_a_reader_holds_what_was_removed(cluster: StoreCluster) -> None:
    await cluster.start("a")
    async with cluster.client() as store:
        await store.put("read", np.arange(40_000), node="a")
        node = (await store.nodes())["a"]
        (opened,), _, _ = await node.open(
            store.tenant.owner, [store_pb2.OpenObject(key=store.tenant.key("read"))]
        )
        assert opened.lease_id
        assert await store.remove("read")
        stub = node_pb2_grpc.NodeStub(node._channel)

        async def host() -> node_pb2.TierStatus:
            tiers = (await stub.Status(node_pb2.StatusRequest())).tiers
            return next(tier for tier in tiers if tier.name == "objects host")

        async def only_read() -> bool:
            tier = await host()
            return tier.num_used_blocks > tier.num_cached_blocks

        # Its slots stay the reader's, although no block is in them any more.
        await eventually(only_read)
        node.release([opened])
