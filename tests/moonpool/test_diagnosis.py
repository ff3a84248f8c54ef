"""The doctor's findings for evidence that a small cluster does not produce."""

from __future__ import annotations

from typing import Any

import pytest

from moonpool.doctor.agreement import check_clocks, check_options
from moonpool.doctor.evidence import Evidence, Page
from moonpool.doctor.hits import check_hits, check_requests
from moonpool.doctor.index_state import check_index
from moonpool.doctor.transfer_paths import check_paths


def node(name: str, **facts: Any) -> dict[str, Any]:
    tiers = [{"name": "pool", "num_blocks": 1000, "num_used_blocks": 0, "num_cached_blocks": 0}]
    agent = {"boot_id": name, "transports": ["shm", "tcp"]}
    return {
        "node_id": name, "role": "prefill", "state": "ready", "host": "h", "tiers": tiers, "load": {},
        "num_index_blocks": 0, "agent": agent, "version": "1", "options": {}, "clock_offset_s": 0.001,
    } | facts  # fmt: skip


def evidence(*nodes: dict[str, Any], outcomes: dict[str, int] | None = None, **more: Any) -> Evidence:
    cluster = {
        "nodes": list(nodes),
        "index": {"connected": True, "lag_s": 0.0, "num_blocks": 5},
        "prefixes": {"outcomes": outcomes or {}, "tenants": {}, "num_salts": 1, "num_salts_once": 0},
        "block_size": 16,
        "facts": {"policy": "goodput", "version": "1", "options": {}},
    }
    return Evidence(cluster | more.pop("cluster", {}), **more)


def route(source: str, target: str, rate: float, **facts: Any) -> dict[str, Any]:
    return {
        "source": source, "target": target, "transport": "tcp", "nbytes": 10**9, "seconds": 1e9 / rate,
        "transfers": 100, "failures": 0,
    } | facts  # fmt: skip


@pytest.mark.parametrize(
    ("outcome", "what", "advice"),
    [
        ("short", "short prompts", "engine.block_size"),
        ("headed", "prompts' heads", "put it at the end"),
        ("salted", "salts", "cache_salt"),
        ("pending", "bursts", "ahead of the others"),
        ("unused", "placement", "add prefill nodes"),
        ("dropped", "lost prefixes", "publishers"),
        ("layout", "layouts", "incompatible"),
    ],
)
def test_a_zero_hit_rate_has_its_cause_and_what_to_do(outcome: str, what: str, advice: str) -> None:
    whole, cause = check_hits(evidence(outcomes={outcome: 40, "new": 10}))
    assert (whole.what, whole.state) == ("cache hits", "wrong")
    assert "0 of 50 requests" in whole.fact
    assert cause.what == what
    assert cause.state in ("wrong", "slow")
    assert "40 of 50 requests (80%)" in cause.fact
    assert advice in cause.advice


def test_hits_are_well_and_little_proves_nothing() -> None:
    (few,) = check_hits(evidence(outcomes={"salted": 9}))
    (well,) = check_hits(evidence(outcomes={"hit": 60, "new": 40, "short": 5}))
    assert [few.state, well.state] == ["ok", "ok"]
    (new,) = check_hits(evidence(outcomes={"new": 50}))
    assert new.state == "slow"


@pytest.mark.parametrize(
    ("missed", "what"), [("dropped", "lost prefixes"), ("salted", "salts"), ("layout", "layouts")]
)
def test_what_hits_did_not_reach_counts_as_a_cause(missed: str, what: str) -> None:
    prefixes = {"outcomes": {"hit": 90, "new": 10}, "missed": {missed: 30, "unused": 40, "new": 20}}
    whole, cause = check_hits(evidence(cluster={"prefixes": prefixes}))
    assert whole.state == "ok"
    assert (cause.what, cause.state) == (what, "slow")
    assert "30 of 100 requests (30%)" in cause.fact


def test_eviction_is_told_with_its_figures() -> None:
    page = Page(
        "# TYPE moonpool_store_evicted_blocks counter\n"
        'moonpool_store_evicted_blocks_total{tier="host"} 777\n'
        "# TYPE moonpool_reuse_distance_blocks histogram\n"
        'moonpool_reuse_distance_blocks_bucket{le="64"} 1\n'
        'moonpool_reuse_distance_blocks_bucket{le="4096"} 10\n'
        'moonpool_reuse_distance_blocks_bucket{le="+Inf"} 10\n'
    )
    _, cause = check_hits(evidence(node("a"), outcomes={"dropped": 20}, pages={"a": page}))
    for figure in ("777 blocks were evicted", "room for 1,000", "64 blocks or more"):
        assert figure in cause.fact
    assert "store.ssd.path" in cause.advice


def test_a_policy_that_is_blind_to_blocks_is_named() -> None:
    blind = {"facts": {"policy": "round-robin"}}
    _, cause = check_hits(evidence(outcomes={"unused": 20}, cluster=blind))
    assert "conductor.policy is round-robin" in cause.fact


def test_an_index_that_is_late_or_lost_is_told() -> None:
    late = {"index": {"connected": True, "lag_s": 7.0, "num_blocks": 5}}
    lost = {"index": {"connected": False, "lag_s": 0.0, "num_blocks": 5}}
    assert "7.0 s behind" in next(check_index(evidence(cluster=late))).fact
    assert next(check_index(evidence(cluster=lost))).state == "wrong"


def test_a_node_that_publishes_nothing_is_told() -> None:
    pool = [{"name": "pool", "num_blocks": 1000, "num_used_blocks": 0, "num_cached_blocks": 500}]
    off = Page("# TYPE moonpool_index_publisher_connected gauge\nmoonpool_index_publisher_connected 0\n")
    found = list(check_index(evidence(node("a", tiers=pool), node("b", tiers=pool), pages={"b": off})))
    assert [finding.what for finding in found] == ["index", "a", "b"]
    assert "0 blocks of the 500" in found[1].fact
    assert "lost Redis" in found[2].fact


def test_a_pair_far_below_the_others_or_that_fails_is_told() -> None:
    names = ("a", "b", "c", "d")
    nodes = [node(name) for name in names]
    routes = [route("a", "b", 1e9), route("a", "c", 1.1e9), route("b", "c", 0.1e9)]
    (slow,) = check_paths(evidence(*nodes, live={"routes": routes}))
    assert slow.what == "b to c"
    assert "100 MB/s" in slow.fact
    (failing,) = check_paths(evidence(*nodes, live={"routes": [route("a", "d", 1e9, failures=30)]}))
    assert failing.state == "wrong"
    assert "security.cluster_key" in failing.advice
    (well,) = check_paths(evidence(*nodes, live={"routes": routes[:2]}))
    assert well.state == "ok"


@pytest.mark.parametrize(
    ("state", "events", "truth"),
    [
        (
            "ready",
            [("left", "a", "lapsed"), ("joined", "a", "prefill at h:1")],
            "a was gone: its lease lapsed",
        ),
        ("ready", [("left", "b", "restarted")], "b ended and was started again"),
        ("unreachable", [], "a cannot be reached"),
    ],
)
def test_reads_that_failed_because_a_node_ended_are_no_question_of_secrets(
    state: str, events: list[tuple[str, str, str]], truth: str
) -> None:
    live = {
        "routes": [route("a", "b", 1e9, failures=30)],
        "events": [{"kind": kind, "node": name, "text": text} for kind, name, text in events],
    }
    (failing,) = check_paths(evidence(node("a", state=state), node("b"), live=live))
    assert truth in failing.fact
    assert "cluster_key" not in failing.advice
    assert failing.state == "slow"


def test_clocks_and_options_that_differ_are_told() -> None:
    behind = node("b", clock_offset_s=-3.0, options={"security.cluster_key": True})
    found = [
        *check_clocks(evidence(node("a"), behind)),
        *check_options(evidence(node("a"), node("c"), behind)),
    ]
    assert [finding.what for finding in found] == ["b", "security.cluster_key"]
    assert "3.00 s behind" in found[0].fact
    assert "b: true" in found[1].fact
    assert "refuse each other" in found[1].fact


def test_the_latest_requests_are_listed_with_what_came_of_their_prefixes() -> None:
    one = {"id": "cmpl-1", "prompt_tokens": 2080, "cached_tokens": 1024, "prefix_outcome": "hit"}
    two = one | {"id": "cmpl-2", "cached_tokens": 0, "prefix_outcome": "dropped"}
    runs = one | {"id": "cmpl-3", "status": "running"}
    one |= {"prefix_missed": "dropped", "cached_from": {"pool": 512, "fetched": 512}}
    found = list(check_requests(evidence(live={"requests": [runs, two, one]})))
    assert [finding.what for finding in found] == ["cmpl-2", "cmpl-1"]
    assert found[0].fact.startswith(
        "2,080 prompt tokens: 0 from the cache, 2,080 computed; dropped: an equal"
    )
    assert "1,024 from the cache (pool 512, fetched 512), 1,056 computed; hit" in found[1].fact
    assert found[1].fact.endswith("dropped: more of it was computed before and is no longer on any node")
    assert not list(check_requests(evidence()))
