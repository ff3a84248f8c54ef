"""One node or two for a request: by what either costs all requests together."""

from __future__ import annotations

import pytest

from moonpool.conductor.observing.slo import Slo
from moonpool.conductor.placing.cluster_view import ClusterView
from moonpool.conductor.placing.node_view import NodeView
from moonpool.conductor.placing.place import place
from moonpool.conductor.placing.placement import Path, Placement, Reason
from tests.conductor.views import REQUEST, cluster, node, placed

# Seconds that computing all of REQUEST takes.
COMPUTE_S = 0.101


def with_link(view: ClusterView, nbytes_per_s: float) -> ClusterView:
    nodes = {one.node_id for table in (view.prefill, view.decode) for one in table}
    for source in nodes:
        for target in nodes - {source}:
            view.links.observe(source, target, 1 << 20, 1.0)  # connects the two
            for _ in range(100):
                view.links.observe(source, target, 4 << 20, (4 << 20) / nbytes_per_s)
    return view


def busy(name: str, num_running: int) -> NodeView:
    return node(name, num_running=num_running, num_context_tokens=500 * num_running)


def test_an_idle_node_of_both_roles_takes_the_whole_request() -> None:
    nodes = [node("b0"), node("b1")]
    placement = placed(REQUEST, cluster(nodes, nodes))
    assert placement.decode is not None
    assert placement.prefill.node_id == placement.decode.node_id
    assert (placement.path, placement.decode.transfer_s) == (Path.WHOLE, 0.0)
    assert placement.to_dict()["path"] == "whole"


def test_a_prompt_stays_away_from_a_node_with_many_decoding_requests() -> None:
    """It would delay each of them by all its time; a prefill node delays nobody."""
    both = busy("b0", 20)
    placement = placed(REQUEST, cluster([node("p0"), both], [both]))
    assert placement.decode is not None
    assert (placement.prefill.node_id, placement.decode.node_id) == ("p0", "b0")
    assert placement.path is Path.SPLIT
    assert "on b0 alone" in placement.detail


def test_a_slow_link_makes_one_node_the_cheaper_one() -> None:
    """Between two rates the choice changes once: that rate is the break-even."""
    paths = []
    for nbytes_per_s in (1e9, 1e8, 3e7, 1e7, 3e6):
        both = busy("b0", 3)
        paths.append(placed(REQUEST, with_link(cluster([node("p0"), both], [both]), nbytes_per_s)).path)
    assert paths[0] is Path.SPLIT
    assert paths[-1] is Path.WHOLE
    assert paths == sorted(paths), paths  # "split" before "whole"


@pytest.mark.parametrize(
    ("nbytes_per_s", "chunk_tokens", "left_s"),
    [
        (1e8, 0, 63 * 65536 / 1e8),  # whether it sends chunks is not known
        (1e8, 256, 16 * 65536 / 1e8),  # the last chunk
        (1e7, 256, 63 * 65536 / 1e7 - COMPUTE_S),  # what the link did not carry until then
        (1e8, 4096, 63 * 65536 / 1e8),  # a single chunk
    ],
)
def test_a_hand_over_costs_what_the_prefill_does_not_hide(
    nbytes_per_s: float, chunk_tokens: int, left_s: float
) -> None:
    view = cluster([node("p0", chunk_tokens=chunk_tokens)], [node("d0")])
    decode = placed(REQUEST, with_link(view, nbytes_per_s)).decode
    assert decode is not None
    assert decode.transfer_s == pytest.approx(left_s, rel=0.1)


def test_the_reason_names_both_costs() -> None:
    both = busy("b0", 3)
    placement = placed(REQUEST, with_link(cluster([node("p0"), both], [both]), 1e6))
    assert placement.reason is Reason.WHOLE
    assert "ms in all on b0 alone" in placement.detail
    assert "on p0 and b0" in placement.detail


def rest_view(num_local_blocks: int, *, queue_s: float = 0.05, num_running: int = 0) -> ClusterView:
    decode = busy("d0", num_running)
    decode.computes_rest = True
    return cluster([node("p0", queue_s=queue_s)], [decode], {"d0": num_local_blocks})


def test_a_short_rest_is_computed_on_the_decode_node() -> None:
    placement = placed(REQUEST, rest_view(62))
    assert placement.path is Path.REST
    assert placement.reason is Reason.REST
    assert placement.prefill.node_id == "d0"
    assert placement.prefill.local_tokens == 62 * 16
    assert "ms in all on d0 alone" in placement.detail


@pytest.mark.parametrize(
    "view",
    [
        rest_view(0),  # a long rest
        rest_view(62, queue_s=0.0, num_running=30),  # 30 requests would wait for it
    ],
    ids=["long", "disturbs"],
)
def test_otherwise_the_prompt_stays_away_from_the_decode_node(view: ClusterView) -> None:
    assert placed(REQUEST, view).path is Path.SPLIT


def test_a_decode_node_that_computes_no_prompts_gets_none() -> None:
    assert placed(REQUEST, cluster([node("p0", queue_s=0.05)], [node("d0")], {"d0": 62})).path is Path.SPLIT


@pytest.mark.parametrize("policy", ["random", "round-robin", "least-loaded", "local-cache", "kv-aware"])
def test_policies_that_weigh_nothing_keep_a_request_where_it_was_prefilled(policy: str) -> None:
    nodes = [node("b0"), busy("b1", 3)]
    for turn in range(3):
        view = cluster(nodes, nodes)
        object.__setattr__(view, "turn", turn)
        placement = placed(REQUEST, view, policy)
        assert placement.decode is not None
        assert placement.prefill.node_id == placement.decode.node_id
        assert placement.path is Path.WHOLE


def test_decode_steps_between_its_chunks_prolong_a_prompt() -> None:
    """With a target for the time between tokens there are more chunks, and more steps between them."""
    both = busy("b0", 2)
    view = cluster([both], [both])
    estimates = []
    for tbt_s in (1e9, 0.02, 0.005):
        outcome = place(REQUEST, view, Slo(tbt_s=tbt_s))
        assert isinstance(outcome, Placement)
        estimates.append(outcome.prefill)
    assert COMPUTE_S < estimates[0].compute_s < estimates[1].compute_s < estimates[2].compute_s
    assert {round(one.delay_s, 6) for one in estimates} == {round(2 * COMPUTE_S, 6)}
