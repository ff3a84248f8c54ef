"""Placement: who gets a request, and the reason it gives."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conductor.cluster_view import ClusterView, NodeView, PlaceRequest, Slo
from conductor.cost_model import NodeCost, Profile
from conductor.link import LinkModel
from conductor.place import place
from conductor.placement import Placement, Reason, Rejection
from conductor.policies import POLICIES

PROFILE = Profile(
    prefill_base_s=1e-3,
    prefill_token_s=1e-4,
    prefill_attention_s=0.0,
    decode_base_s=1e-3,
    decode_sequence_s=1e-4,
    decode_context_s=1e-8,
)
REQUEST = PlaceRequest(num_tokens=1000, remaining_tokens=100, expected_tokens=50, deadline_s=60.0)


def node(node_id: str, **facts: float) -> NodeView:
    view = NodeView(node_id, NodeCost(PROFILE), num_free_blocks=1000)
    for name, value in facts.items():
        setattr(view, name, value)
    return view


def cluster(
    prefill: list[NodeView], decode: list[NodeView], prefix_blocks: dict[str, int] | None = None
) -> ClusterView:
    return ClusterView(
        prefill=prefill,
        decode=decode,
        prefix_blocks=prefix_blocks or {},
        links=LinkModel(),
        block_size=16,
        block_nbytes=65536,
        now_s=0.0,
    )


def placed(request: PlaceRequest, view: ClusterView, policy: str = "least-ttft") -> Placement:
    outcome = place(request, view, Slo(), POLICIES[policy])
    assert isinstance(outcome, Placement)
    return outcome


def test_a_cached_prefix_decides_between_equal_nodes() -> None:
    placement = placed(REQUEST, cluster([node("p0"), node("p1")], [node("d0")], {"p1": 10}))
    assert placement.prefill.node_id == "p1"
    assert placement.prefill.local_tokens == 160
    assert placement.reason is Reason.LOCALITY
    assert "160 tokens" in placement.detail


def test_a_long_queue_outweighs_a_cached_prefix() -> None:
    # 16 cached blocks save 25.6 ms of compute; fetching them would not pay over this slow link.
    view = cluster([node("p0"), node("p1", queue_s=0.05)], [node("d0")], {"p1": 16})
    for _ in range(30):
        view.links.observe("p1", "p0", 1 << 20, 1.0)
    placement = placed(REQUEST, view)
    assert placement.prefill.node_id == "p0"
    assert placement.prefill.fetched_tokens == 0
    assert placement.reason is Reason.LOAD


def test_a_prefix_is_fetched_when_that_beats_computing_it() -> None:
    view = cluster([node("p0"), node("p1", queue_s=1.0)], [node("d0")], {"p0": 2, "p1": 50, "d0": 40})
    placement = placed(REQUEST, view)
    assert placement.prefill.node_id == "p0"
    assert placement.reason is Reason.TRANSFER
    assert (placement.prefill.fetch_from, placement.prefill.fetched_tokens) == ("p1", 48 * 16)
    assert placement.prefill.fetch_s + placement.prefill.compute_s < placement.prefill.recompute_s
    assert "from p1" in placement.detail


def test_a_decode_node_can_be_the_source_of_a_prefix() -> None:
    placement = placed(REQUEST, cluster([node("p0")], [node("d0")], {"d0": 60}))
    assert placement.prefill.fetch_from == "d0"


def test_the_last_prompt_token_is_always_computed() -> None:
    request = replace(REQUEST, num_tokens=64)
    placement = placed(request, cluster([node("p0")], [node("d0")], {"p0": 4, "d0": 4}))
    assert placement.prefill.local_tokens == 48
    assert placement.decode is not None
    assert placement.decode.local_tokens == 64


def test_a_request_that_reads_no_cache_gets_no_prefix() -> None:
    request = replace(REQUEST, reads_cache=False)
    placement = placed(request, cluster([node("p0"), node("p1")], [node("d0")], {"p1": 50}))
    assert placement.prefill.prefix_tokens == 0


def test_decode_goes_where_the_conversation_is_unless_there_is_no_room() -> None:
    prefix = {"d1": 60}
    assert placed(REQUEST, cluster([node("p")], [node("d0"), node("d1")], prefix)).decode.node_id == "d1"  # type: ignore[union-attr]
    full = node("d1", num_free_blocks=1)
    placement = placed(REQUEST, cluster([node("p")], [node("d0"), full], prefix))
    assert placement.decode is not None
    assert placement.decode.node_id == "d0"


def test_the_smaller_batch_decodes() -> None:
    busy = node("d0", num_running=8, num_context_tokens=8000)
    placement = placed(REQUEST, cluster([node("p")], [busy, node("d1")]))
    assert placement.decode is not None
    assert placement.decode.node_id == "d1"


def test_one_last_token_needs_no_decode_node() -> None:
    placement = placed(replace(REQUEST, remaining_tokens=1), cluster([node("p")], []))
    assert placement.decode is None


def test_equal_nodes_share_requests() -> None:
    nodes = [node("p0"), node("p1"), node("p2")]
    for _ in range(30):
        chosen = placed(REQUEST, cluster(nodes, [node("d")])).prefill.node_id
        next(n for n in nodes if n.node_id == chosen).num_placed += 1
    assert [n.num_placed for n in nodes] == [10, 10, 10]


def test_a_missing_role_is_named() -> None:
    assert place(REQUEST, cluster([], [node("d")]), Slo()) == Rejection("no prefill node is up", "prefill")
    assert place(REQUEST, cluster([node("p")], []), Slo()) == Rejection("no decode node is up", "decode")


def test_what_cannot_be_in_time_is_rejected_with_the_time_to_come_back() -> None:
    outcome = place(REQUEST, cluster([node("p", queue_s=2.0)], [node("d")]), Slo(ttft_s=1.0))
    assert isinstance(outcome, Rejection)
    assert outcome.retry_after_s == pytest.approx(1.101, abs=1e-3)


def test_a_policy_that_would_miss_the_deadline_is_overruled() -> None:
    view = cluster([node("p0", queue_s=100.0), node("p1")], [node("d")])
    placement = placed(REQUEST, view, "round-robin")
    assert placement.prefill.node_id == "p1"
    assert placement.reason is Reason.DEADLINE


def test_round_robin_pairs_every_prefill_node_with_every_decode_node() -> None:
    view = cluster([node("p0"), node("p1")], [node("d0"), node("d1")])
    pairs = set()
    for turn in range(4):
        placement = placed(REQUEST, replace(view, turn=turn), "round-robin")
        assert placement.decode is not None
        pairs.add((placement.prefill.node_id, placement.decode.node_id))
    assert len(pairs) == 4


@given(
    policy=st.sampled_from(sorted(POLICIES)),
    queues=st.lists(st.floats(0, 10), min_size=1, max_size=6),
    batches=st.lists(st.integers(0, 64), min_size=1, max_size=6),
    prefixes=st.lists(st.integers(0, 80), min_size=12, max_size=12),
    num_tokens=st.integers(1, 2000),
    turn=st.integers(0, 1000),
    draw=st.floats(0, 1, exclude_max=True),
)
def test_every_policy_places_purely_and_explains_itself(
    policy: str,
    queues: list[float],
    batches: list[int],
    prefixes: list[int],
    num_tokens: int,
    turn: int,
    draw: float,
) -> None:
    prefill = [node(f"p{i}", queue_s=q) for i, q in enumerate(queues)]
    decode = [node(f"d{i}", num_running=n, num_context_tokens=100 * n) for i, n in enumerate(batches)]
    names = [n.node_id for n in prefill + decode]
    prefix_blocks = dict(zip(names, prefixes, strict=False))
    view = replace(cluster(prefill, decode, prefix_blocks), turn=turn, draw=draw)
    request = replace(REQUEST, num_tokens=num_tokens, deadline_s=float("inf"))
    placement = placed(request, view, policy)
    assert placement == placed(request, view, policy)
    chosen = placement.prefill
    assert chosen.ttft_s == pytest.approx(chosen.queue_s + chosen.fetch_s + chosen.compute_s)
    assert chosen.prefix_tokens < num_tokens
    assert chosen in placement.prefill_candidates or len(queues) > 8
    assert placement.decode in placement.decode_candidates
    if chosen.fetched_tokens:
        assert chosen.fetch_from != chosen.node_id
        assert prefix_blocks[chosen.fetch_from] * 16 >= chosen.prefix_tokens
    if policy == "least-ttft":
        best_s = min(candidate.ttft_s for candidate in placement.prefill_candidates)
        assert chosen.ttft_s <= 1.05 * best_s + 1e-4
    assert placement.to_dict()["reason"] == placement.reason.value
