"""Hot prefixes between clusters: one conductor offers them, another one has its nodes read them."""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from moonpool.conductor.admission.tenants import Tenant
from moonpool.conductor.replication.offers import Offer
from moonpool.kvstore.blocks.keys import BlockKey, chain
from moonpool.kvstore.errors import EntryRefused
from tests.conductor.core_nodes import MODEL, Cluster, RedisProcess, running

DIGESTS = (11, 12, 13)


@asynccontextmanager
async def two(redis: RedisProcess, **options: Any) -> AsyncIterator[tuple[Cluster, Cluster]]:
    """Clusters with a prefill node each, which computes so slowly that reading pays. ``options``: of the
    second one's conductor."""
    async with (
        running(redis.url, "p0", "d0", namespace="one") as one,
        running(redis.url, "p1", "d1", namespace="two", **options) as two,
    ):
        for cluster in (one, two):
            for node in cluster.nodes.values():
                node.profile = {"prefill_token_s": 1.0, "decode_base_s": 1e-3}
                node.region, node.prefetches = "eu", True
                await node.announce()
            registry = cluster.conductor._deps.registry
            await cluster.until(
                lambda registry=registry: (
                    all(view.cost.profile.prefill_token_s == 1.0 for view in registry.fleet("prefill", EU))
                    and len(registry.fleet("prefill", EU)) == 1
                )
            )
        yield one, two


EU = frozenset({"eu"})


async def hot(cluster: Cluster, first: int, *, num_uses: int, client: Tenant | None = None) -> list[BlockKey]:
    """A prefix of 40 blocks that p0 has and that was used as often."""
    deps = cluster.conductor._deps
    root_key = deps.registry.root_key("")
    assert root_key is not None
    keys = chain(root_key, [first, *range(1, 640)], MODEL.block_size)
    cluster.nodes["p0"].hold(keys)
    await cluster.until(lambda: deps.registry.holders(keys).get("p0") == len(keys))
    for number in range(num_uses):
        digests = (*DIGESTS, 100 + number)
        deps.replicator.note(keys, {"p0": len(keys)}, 1.0, client or Tenant(), digests)
    return keys


async def test_what_is_hot_in_one_cluster_is_read_by_another(redis: RedisProcess) -> None:
    async with two(redis) as (one, other):
        keys, once = await hot(one, 7, num_uses=3), await hot(one, 8, num_uses=1)
        [offer] = one.conductor.offers.made(moves=False)
        assert tuple(offer["digests"]) == DIGESTS, "what all its requests have in common"
        assert offer["id"] == keys[-1].hex() and offer["regions"] == []
        assert await other.conductor.offers.take([offer["sealed"]]) == {"held": [0], "copied": 1}
        assert other.nodes["p1"].copied == [("p0", len(keys))]
        registry = other.conductor._deps.registry
        await other.until(lambda: registry.holders(keys) == {"p1": len(keys)})
        assert await other.conductor.offers.take([offer["sealed"]]) == {"held": [0], "copied": 0}
        assert len(other.nodes["p1"].copied) == 1, "what it has is not read again"
        everything = [offer["id"] for offer in one.conductor.offers.made(moves=True)]
        assert everything == [keys[-1].hex(), once[-1].hex()]


async def test_a_copy_from_another_region_is_expected_to_take_as_long_as_the_link_between_them(
    redis: RedisProcess,
) -> None:
    async with two(redis, region_links=("eu:us rtt_ms=100000",)) as (one, other):
        await hot(one, 7, num_uses=3)
        [made] = one.conductor.offers.made(moves=False)
        offers, links = other.conductor.offers, other.conductor._deps.cost_model.links
        now_unix_s = offers._unix_clock()
        far = replace(Offer.opened(made["sealed"], offers._seals, now_unix_s), region="us")
        began_s = offers._clock()
        assert (await offers.take([far.sealed(offers._seals, now_unix_s)]))["copied"] == 1
        [source] = links.busy(began_s + 30.0)
        assert links.region_of(source) == "", "it is no node of this cluster"


async def test_what_costs_less_to_compute_is_not_read(redis: RedisProcess) -> None:
    async with two(redis) as (one, other):
        await hot(one, 7, num_uses=3)
        [offer] = one.conductor.offers.made(moves=False)
        other.nodes["p1"].profile = {"prefill_token_s": 1e-9, "decode_base_s": 1e-3}
        await other.nodes["p1"].announce()
        registry = other.conductor._deps.registry
        await other.until(
            lambda: [one.cost.profile.prefill_token_s for one in registry.fleet("prefill")] == [1e-9]
        )
        assert await other.conductor.offers.take([offer["sealed"]]) == {"held": [], "copied": 0}


async def test_what_is_confined_is_read_within_its_regions_only(redis: RedisProcess) -> None:
    async with two(redis) as (one, other):
        await hot(one, 7, num_uses=3, client=Tenant("acme", regions=EU))
        [offer] = one.conductor.offers.made(moves=False)
        assert offer["regions"] == ["eu"]
        node, registry = other.nodes["p1"], other.conductor._deps.registry
        node.region = "us"
        await node.leave()
        await other.until(lambda: not len(registry.fleet("prefill")))
        away = await other.add("p2")
        away.region, away.prefetches = "us", True
        await away.announce()
        await other.until(lambda: len(registry.fleet("prefill", frozenset({"us"}))) == 1)
        assert await other.conductor.offers.take([offer["sealed"]]) == {"held": [], "copied": 0}
        assert away.copied == []


async def test_only_a_conductor_with_the_key_makes_offers_and_they_age(redis: RedisProcess) -> None:
    async with two(redis) as (one, other):
        await hot(one, 7, num_uses=3)
        [offer] = one.conductor.offers.made(moves=False)
        raw = bytearray(b64decode(offer["sealed"]))
        raw[-2] ^= 1
        with pytest.raises(EntryRefused, match="cluster_key"):
            await other.conductor.offers.take([b64encode(raw).decode()])
        seals, now_s = other.conductor.offers._seals, 1e9
        old = Offer.opened(offer["sealed"], seals, one.conductor.offers._unix_clock()).sealed(seals, now_s)
        assert Offer.opened(old, seals, now_s + 30.0).keys
        with pytest.raises(EntryRefused, match="ago"):
            Offer.opened(old, seals, now_s + 90.0)
        with pytest.raises(ValueError, match="base64"):
            await other.conductor.offers.take(["not one!"])
        assert other.nodes["p1"].copied == []
