"""Evictions in bulk are told, once; what goes by ones and twos is not."""

from __future__ import annotations

from typing import Any

import pytest

from moonpool.conductor.observing.bulk_evictions import EvictionWatch
from moonpool.kvstore.index.redis.node_record import NodeLoad, NodeRecord, TierFill


def heartbeat(evicted: Any, epoch: int = 1, room: int = 1000) -> NodeRecord:
    load, tiers = NodeLoad(num_blocks=room), {"host": TierFill(room, room)}
    return NodeRecord("a", epoch, "prefill", load=load, tiers=tiers, extra={"evicted": evicted})


def test_a_tenth_of_a_tier_within_a_second_is_told_with_its_reasons() -> None:
    watch = EvictionWatch()
    assert watch.on_heartbeat(heartbeat({"host": {"below": 50_000}}), 0.0) == []  # what was before we looked
    assert watch.on_heartbeat(heartbeat({"host": {"below": 50_099}}), 1.0) == []
    (told,) = watch.on_heartbeat(heartbeat({"host": {"below": 50_190, "removed": 9}}), 2.0)
    assert told == "100 of 1,000 blocks were evicted from host within 1.0 s (below 91, removed 9)"


def test_heartbeats_that_come_quickly_are_taken_together() -> None:
    watch = EvictionWatch()
    told = [watch.on_heartbeat(heartbeat({"pool": {"dropped": 30 * n}}), n / 5) for n in range(5)]
    assert [bool(one) for one in told] == [False, False, False, False, True]


def test_as_much_in_a_longer_time_is_not_in_bulk() -> None:
    watch = EvictionWatch()
    watch.on_heartbeat(heartbeat({"pool": {"dropped": 0}}), 0.0)
    assert watch.on_heartbeat(heartbeat({"pool": {"dropped": 150}}), 2.0) == []


def test_what_goes_on_is_told_again_after_a_while_with_what_went_meanwhile() -> None:
    watch = EvictionWatch()
    told = [watch.on_heartbeat(heartbeat({"host": {"dropped": 500 * n}}), float(n)) for n in range(33)]
    spoken = [n for n, one in enumerate(told) if one]
    assert spoken == [1, 31]
    assert told[31][0].endswith("; 15,000 since the last such event")


def test_few_blocks_of_a_small_tier_are_no_news() -> None:
    watch = EvictionWatch()
    watch.on_heartbeat(heartbeat({"pool": {"dropped": 0}}, room=40), 0.0)
    assert watch.on_heartbeat(heartbeat({"pool": {"dropped": 30}}, room=40), 1.0) == []


def test_a_new_life_begins_anew_and_those_who_left_are_forgotten() -> None:
    watch = EvictionWatch()
    watch.on_heartbeat(heartbeat({"pool": {"dropped": 0}}), 0.0)
    assert watch.on_heartbeat(heartbeat({"pool": {"dropped": 900}}, epoch=2), 1.0) == []
    watch.left("a")
    assert watch._seen == {}


@pytest.mark.parametrize("evicted", [None, 3, "x", {"pool": 3}, {"pool": {"dropped": "many"}}, []])
def test_nonsense_is_no_eviction(evicted: Any) -> None:
    watch = EvictionWatch()
    for now_s in range(3):
        assert watch.on_heartbeat(heartbeat(evicted), float(now_s)) == []
