"""What a store node had on disk is there again when it is."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from moonpool.kvstore.client import StoreClient
from moonpool.runtime.machine.description import describe_machine
from tests.store_node.conftest import StoreCluster

rng = np.random.default_rng(13)


async def test_objects_are_back_after_a_restart(cluster: StoreCluster, tmp_path: Path) -> None:
    """After SIGTERM all of them; they were more than memory holds."""
    node = await cluster.start("a", store__ssd__path=tmp_path)
    values = {f"n{i}": rng.integers(0, 256, 1_500_000 + i, np.uint8) for i in range(20)}
    async with cluster.client() as store:
        for name, value in values.items():
            await store.put(name, value)
        await store.put("n3", values["n4"])
        await store.remove("n5")
        await read_all(store, values)
        await node.stop(20.0)
        await cluster.start("a")
        listed = [stat.name for stat in await store.ls()]
        assert sorted(listed) == sorted(set(values) - {"n5"})
        await read_all(store, values)


async def read_all(store: StoreClient, values: dict[str, np.ndarray]) -> None:
    for name, value in values.items():
        found = await store.get(name)
        if name == "n5":
            assert found is None
        else:
            assert found is not None
            np.testing.assert_array_equal(found, values["n4"] if name == "n3" else value)


async def test_an_object_larger_than_memory_comes_and_goes_through_it(
    cluster: StoreCluster, tmp_path: Path
) -> None:
    await cluster.start("a", store__ssd__path=tmp_path)
    value = rng.integers(0, 256, 40_000_000, np.uint8)  # memory is 16 MiB
    async with cluster.client() as store:
        await store.put("large", value)
        found = await store.get("large")
        assert found is not None
        np.testing.assert_array_equal(found, value)


@pytest.mark.slow
async def test_a_node_killed_in_puts_comes_back_with_whole_objects_only(
    cluster: StoreCluster, tmp_path: Path
) -> None:
    """kill -9 at moments spread over puts: what is there afterwards is byte-exact, and most is there."""
    await cluster.start("a", store__ssd__path=tmp_path)
    num_put = num_back = 0
    async with cluster.client(deadline_s=5.0) as store:
        for round_number in range(3):
            done: list[str] = []

            async def put_all(round_number: int = round_number, done: list[str] = done) -> None:
                for i in range(100):
                    name = f"{round_number}-{i}"
                    await store.put(name, object_of(name))
                    done.append(name)

            putting = asyncio.create_task(put_all())
            while len(done) < 85 + 5 * round_number and not putting.done():  # noqa: ASYNC110
                await asyncio.sleep(0.001)
            await cluster.kill("a")
            await asyncio.gather(putting, return_exceptions=True)
            await cluster.start("a")
            back = {stat.name for stat in await store.ls()}
            for name in back:
                found = await store.get(name)
                assert found is not None
                np.testing.assert_array_equal(found, object_of(name))
            num_put += len(done)
            num_back += len(back & set(done))
            await store.batch_remove(sorted(back))
    # What was put last was still on its way to the disk: of each round half of memory at most, 40 objects.
    assert num_back >= 0.5 * num_put, f"{num_back} of {num_put}"


def object_of(name: str) -> np.ndarray:
    seed = abs(hash(name)) % 1000
    return np.full(200_000 + 10 * seed, seed % 251, np.uint8)


async def test_a_node_says_on_which_machine_it_is(cluster: StoreCluster) -> None:
    await cluster.start("a")
    async with cluster.index() as index:
        assert (await index.nodes())["a"].extra["machine"] == describe_machine()
