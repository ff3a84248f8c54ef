"""Placement: who gets a request, and the reason it gives."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moonpool.conductor.observing.slo import Slo
from moonpool.conductor.placing.place import place
from moonpool.conductor.placing.placement import Reason, Rejection
from tests.conductor.views import REQUEST, cluster, node, placed


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


def test_a_node_that_stands_still_is_left() -> None:
    still, other = node("p0"), node("p1", queue_s=0.3)
    # It should have ended 0.1 s ago: that weighs less than what the other node has to do. Then more.
    for overdue_s, best in ((0.1, "p0"), (0.5, "p1")):
        still.queue.remove("late", 0.0)
        still.queue.add("late", order_s=-9.0, compute_s=1.0, now_s=-1.0 - overdue_s)
        assert placed(REQUEST, cluster([still, other], [node("d0")])).prefill.node_id == best
    # While its blocks are fetched, it stands still for nobody.
    still.queue.remove("late", 0.0)
    still.queue.add("late", order_s=-9.0, compute_s=1.0, now_s=-1.5, ready_s=1.0)
    assert placed(REQUEST, cluster([still, other], [node("d0")])).prefill.queue_s == 0.0


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
    outcome = place(replace(REQUEST, deadline_s=1.0), cluster([node("p", queue_s=2.0)], [node("d")]), Slo())
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


def test_blocks_in_slower_tiers_cost_their_loading() -> None:
    nodes = [node("p0"), node("p1")]
    view = cluster(nodes, [node("d")], {"p0": 60, "p1": 60})
    view = replace(view, slow_blocks={"p0": (0, 40)})
    placement = placed(REQUEST, view)
    assert placement.prefill.node_id == "p1"
    slow = next(c for c in placement.prefill_candidates if c.node_id == "p0")
    assert slow.load_s == pytest.approx(nodes[0].cost.load_s(0, 40 * view.block_nbytes))
    assert slow.ttft_s == pytest.approx(slow.queue_s + slow.fetch_s + slow.load_s + slow.compute_s)


def test_what_is_fetched_or_loaded_while_it_queues_costs_no_time() -> None:
    view = cluster([node("p0", queue_s=5.0)], [node("d")], {"d": 60, "p0": 10})
    placement = placed(REQUEST, replace(view, slow_blocks={"p0": (5, 5)}))
    assert placement.prefill.fetched_tokens == 50 * 16
    assert placement.prefill.transfer_s > 0
    assert placement.prefill.fetch_s == placement.prefill.load_s == 0.0


def test_the_less_busy_of_two_holders_is_the_source() -> None:
    view = cluster([node("p0")], [node("d0"), node("d1")], {"d0": 60, "d1": 60})
    view.links.begin("d1", "p9", 1 << 30, 0.0)
    assert placed(REQUEST, view).prefill.fetch_from == "d0"
    view.links.begin("d0", "p9", 2 << 30, 0.0)
    assert placed(REQUEST, view).prefill.fetch_from == "d1"


def test_a_shorter_prefix_on_an_idle_link_beats_a_longer_one_behind_a_gigabyte() -> None:
    view = cluster([node("p0")], [node("d0"), node("d1")], {"d0": 61, "d1": 60})
    assert placed(REQUEST, view).prefill.fetch_from == "d0"
    view.links.begin("d0", "p9", 1 << 30, 0.0)
    placement = placed(REQUEST, view)
    assert (placement.prefill.fetch_from, placement.prefill.fetched_tokens) == ("d1", 960)


def test_a_short_prefill_counts_only_what_it_cannot_pass() -> None:
    busy = node("p0")
    busy.queue.add("running", order_s=0.0, compute_s=1.0, now_s=0.0)
    busy.queue.add("long", order_s=30.0, compute_s=20.0, now_s=0.0)
    fleet = cluster([busy], [node("d")])
    assert placed(REQUEST, fleet).prefill.queue_s == pytest.approx(1.0)
    assert placed(REQUEST, fleet).prefill.num_delayed == 1
    assert placed(replace(REQUEST, fairness_delay_s=60.0), fleet).prefill.queue_s == pytest.approx(21.0)


def test_nodes_to_avoid_are_taken_only_when_there_is_no_other() -> None:
    view = cluster([node("p0"), node("p1", queue_s=9.0)], [node("d0"), node("d1", num_running=9)])
    placement = placed(REQUEST, replace(view, avoid={"p0", "d0"}))
    assert placement.decode is not None
    assert (placement.prefill.node_id, placement.decode.node_id) == ("p1", "d1")
    assert placed(REQUEST, replace(view, avoid={"p0", "p1"})).prefill.node_id == "p0"
