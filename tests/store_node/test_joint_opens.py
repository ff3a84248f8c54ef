"""Reads that begin together are opened with one call, and each is its own nevertheless."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
import pytest

from moonpool.kvstore.grants.held import HeldGrant
from moonpool.kvstore.remote.joint_opens import JointOpens
from moonpool.protos import store_pb2
from moonpool.runtime.errors import NodeUnavailable
from tests.store_node.conftest import StoreCluster
from tests.store_node.test_pull import calls_of

pytestmark = pytest.mark.asyncio(loop_scope="module")

OWNER, OTHER = b"o" * 16, b"p" * 16
HELD = HeldGrant("node n", 0.0, 1.0)


class Node:
    """Opens what it is asked for when ``answers`` is set; each object has a lease of its own."""

    def __init__(self) -> None:
        self.calls: list[tuple[bytes, int]] = []
        self.called, self.answers = asyncio.Event(), asyncio.Event()
        self.broken = False
        self.leased: set[int] = set()
        self.opens = JointOpens(self._open, self._release)

    async def _open(
        self, owner: bytes, wanted: Sequence[store_pb2.OpenObject]
    ) -> tuple[list[store_pb2.OpenedObject], int, HeldGrant]:
        self.calls.append((owner, len(wanted)))
        self.called.set()
        await self.answers.wait()
        if self.broken:
            raise NodeUnavailable("n", "gone")
        self.leased |= {each.storage for each in wanted}
        return [store_pb2.OpenedObject(lease_id=[each.storage]) for each in wanted], 1, HELD

    def _release(self, opened: Sequence[store_pb2.OpenedObject]) -> None:
        self.leased -= {lease_id for each in opened for lease_id in each.lease_id}

    async def read(self, *storage: int, owner: bytes = OWNER) -> list[int]:
        wanted = [store_pb2.OpenObject(storage=each) for each in storage]
        opened, _, _ = await self.opens.open(owner, wanted)
        self._release(opened)
        return [each.lease_id[0] for each in opened]


async def test_gets_at_once_are_one_call(shared: StoreCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    async with shared.client(tenant="joint") as store:
        values = {f"n{i}": np.full(10 + 9000 * i, i) for i in range(6)}
        await store.batch_put(values, node="a")
        (name, value), *_ = values.items()
        methods = calls_of(monkeypatch)
        found = await asyncio.gather(*map(store.get, [*values, "absent"]))
        for array, expected in zip(found, values.values(), strict=False):
            np.testing.assert_array_equal(array, expected)
        assert found[-1] is None
        assert (
            methods.count("Open") <= 4
        )  # one to each of the two nodes, and again for what the other one has
        assert (await store.get(name) == value).all()


async def test_each_gets_its_own_and_owners_do_not_mix() -> None:
    node = Node()
    node.answers.set()
    reads = (node.read(1, 2), node.read(3), node.read(4, owner=OTHER), node.read(5, 6))
    assert await asyncio.gather(*reads) == [[1, 2], [3], [4], [5, 6]]
    assert sorted(node.calls) == [(OWNER, 5), (OTHER, 1)]
    many = [node.read(*range(first, first + 300)) for first in (0, 300, 600)]
    assert [len(each) for each in await asyncio.gather(*many)] == [300] * 3
    assert [count for _, count in node.calls[2:]] == [300] * 3
    assert not node.leased


@pytest.mark.parametrize("when", ["before the call", "during the call"])
@pytest.mark.parametrize("who", [0, 1])
async def test_a_cancelled_one_is_no_matter_to_the_others(when: str, who: int) -> None:
    node = Node()
    reads = [asyncio.ensure_future(node.read(storage)) for storage in range(3)]
    await asyncio.sleep(0)
    if when == "during the call":
        await asyncio.wait_for(node.called.wait(), 20)
    reads[who].cancel()
    await asyncio.wait(reads[who : who + 1])
    node.answers.set()
    assert await asyncio.gather(*(each for each in reads if not each.cancelled())) == [
        [storage] for storage in range(3) if storage != who
    ]
    await asyncio.sleep(0)
    assert node.calls == [(OWNER, 3)]
    assert not node.leased, "what the cancelled one had opened is pinned"


async def test_an_error_is_everybodys() -> None:
    node = Node()
    node.answers.set()
    node.broken = True
    found = await asyncio.gather(node.read(1), node.read(2), return_exceptions=True)
    assert [type(each) for each in found] == [NodeUnavailable, NodeUnavailable]
