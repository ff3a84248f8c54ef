"""A tenant's objects stay within its share of a node, by giving up its own."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonpool.kvstore.client.errors import PutFailed
from moonpool.kvstore.objects.errors import OverQuota
from moonpool.kvstore.objects.owner_quota import ObjectQuotas
from moonpool.protos import store_pb2
from tests.store_node.conftest import StoreCluster

CHUNK = 64 << 10


def value(number: int, num_chunks: int = 4) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return np.full(num_chunks * CHUNK, number, np.uint8)


async def test_a_tenant_over_quota_loses_its_least_used_objects_and_others_lose_none(
    cluster: StoreCluster,
) -> None:
    await cluster.start("a", store_node__tenant_nbytes=16 * CHUNK)
    async with cluster.client(tenant="greedy") as greedy, cluster.client(tenant="other") as other:
        await other.put("theirs", value(99))
        for number in range(4):
            await greedy.put(f"{number}", value(number))
        assert (await greedy.get("0") == value(0)).all()
        await greedy.put("4", value(4))
        assert [each.name for each in await greedy.ls()] == ["0", "2", "3", "4"]
        # In place of an older version, nothing else has to go.
        await greedy.put("4", value(5))
        assert len(await greedy.ls()) == 4
        # Many at once count together, and what could never fit is refused with the numbers.
        with pytest.raises(PutFailed, match=r"store_node\.tenant_nbytes"):
            await greedy.batch_put({f"many{number}": value(number, 6) for number in range(3)})
        with pytest.raises(PutFailed, match=str(16 * CHUNK)):
            await greedy.put("huge", value(0, 17))
        usage = (await greedy.usage())["a"]
        assert 0 < usage.objects_nbytes <= 16 * CHUNK
        assert (await other.get("theirs") == value(99)).all()


STEPS = st.lists(st.tuples(st.sampled_from(b"xy"), st.integers(0, 5), st.integers(1, 9)), max_size=40)


@given(STEPS, st.integers(1, 12))
def test_within_the_bound_after_every_put_and_never_at_anothers_cost(
    steps: list[tuple[int, int, int]], limit: int
) -> None:
    quotas = ObjectQuotas(limit)
    held: dict[tuple[bytes, bytes], tuple[store_pb2.StoredObject, int]] = {}
    numbers = itertools.count(1)
    for who, number, nbytes in steps:
        owner, key = bytes([who]), bytes([number])
        try:
            victims = quotas.victims(owner, key, nbytes, 0)
        except OverQuota:
            assert nbytes > limit
            continue
        for victim in victims:
            quotas.gone(victim)
            assert victim.info.key != key
            assert held.pop((owner, victim.info.key))[0] is victim
        if (owner, key) in held:
            quotas.gone(held.pop((owner, key))[0])
        info = store_pb2.ObjectInfo(key=key, storage=next(numbers), nbytes=nbytes)
        held[owner, key] = (store_pb2.StoredObject(info=info, owner=owner), nbytes)
        quotas.shown(*held[owner, key])
        for each in (b"x", b"y"):
            mine = sum(size for (name, _), (_, size) in held.items() if name == each)
            assert quotas.nbytes(each) == mine <= limit
