"""Placement where nodes are in several regions: prefix, distance, price and free capacity are weighed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonpool.conductor.costs.links import LinkModel
from moonpool.conductor.costs.regions import RegionLinks
from moonpool.conductor.placing.cluster_view import ClusterView
from moonpool.conductor.placing.node_table import NodeTable
from moonpool.conductor.placing.node_view import NodeView
from moonpool.runtime.errors import ConfigError
from tests.conductor.core_nodes import PROMPT, RedisProcess, continuation, request, running
from tests.conductor.views import REQUEST, node, placed

EU = replace(REQUEST, origin="eu")
# 62 blocks of the request are 4 MB: 33 ms at 1 Gbit/s, where computing them takes 100 ms.
LINK = "eu:us rtt_ms=40 gbit_s=1"


def view_of(
    *prefill: NodeView,
    links: str = LINK,
    prefix_blocks: dict[str, int] | None = None,
    node_price: float = 1.0,
) -> ClusterView:
    """Prefill nodes, and a decode node in each region."""
    decode = [node("d-eu", region="eu"), node("d-us", region="us")]
    model = LinkModel(connect_s=0.0, regions=RegionLinks.parse([links], node_price=node_price))
    for one in (*prefill, *decode):
        model.place(one.node_id, one.region)
    return ClusterView(
        prefill=NodeTable(prefill),
        decode=NodeTable(decode),
        prefix_blocks=prefix_blocks or {},
        links=model,
        block_size=16,
        block_nbytes=65536,
        now_s=0.0,
    )


def eu(**facts: Any) -> NodeView:
    return node("p-eu", region="eu", **facts)


def us(**facts: Any) -> NodeView:
    return node("p-us", region="us", **facts)


def test_an_idle_node_near_the_user_is_chosen_and_distance_is_in_its_ttft() -> None:
    for origin, chosen, other in (("eu", "p-eu", "p-us"), ("us", "p-us", "p-eu")):
        placement = placed(replace(REQUEST, origin=origin), view_of(eu(), us()))
        assert placement.prefill.node_id == chosen
        assert placement.decode is not None and placement.decode.node_id == f"d-{origin}"
        far = next(one for one in placement.prefill_candidates if one.node_id == other)
        assert (placement.prefill.rtt_s, far.rtt_s) == (0.0, 0.04)
        parts_s = far.queue_s + far.fetch_s + far.load_s + far.compute_s + far.rtt_s
        assert far.ttft_s == pytest.approx(parts_s)


def test_a_queue_longer_than_the_way_sends_requests_elsewhere() -> None:
    assert placed(EU, view_of(eu(queue_s=0.02), us())).prefill.node_id == "p-eu"
    assert placed(EU, view_of(eu(queue_s=0.06), us())).prefill.node_id == "p-us"


def test_a_prefix_elsewhere_is_used_there_or_fetched_by_what_bytes_cost() -> None:
    held = {"p-us": 62}
    # On its holder it takes the round trip and little else; the fetch takes 33 ms more than that.
    assert placed(EU, view_of(eu(), us(), prefix_blocks=held)).prefill.node_id == "p-us"
    # The holder is busy.
    fetched = placed(EU, view_of(eu(), us(queue_s=1.0), prefix_blocks=held)).prefill
    assert (fetched.node_id, fetched.fetch_from, fetched.egress_s) == ("p-eu", "p-us", 0.0)
    # 4 MB at 20 a GB are 0.08: of a node at 10 a second 8 ms, of one at 1 a second 80 ms.
    priced = f"{LINK} price_gb=20"
    for node_price, source in ((10.0, "p-us"), (1.0, "")):
        view = view_of(eu(), us(queue_s=1.0), links=priced, prefix_blocks=held, node_price=node_price)
        prefill = placed(EU, view).prefill
        assert (prefill.node_id, prefill.fetch_from) == ("p-eu", source)
        assert prefill.egress_s == pytest.approx(62 * 65536 * 20e-9 / node_price if source else 0.0)


def test_a_prefix_is_fetched_from_the_region_where_it_is_cheapest() -> None:
    view = view_of(eu(), links=f"{LINK} price_gb=1", prefix_blocks={"p-us": 62, "s-eu": 62})
    view.links.place("s-eu", "eu")
    view.links.place("p-us", "us")
    assert placed(EU, view).prefill.fetch_from == "s-eu"


@given(st.integers(1, 60), st.integers(0, 62), st.integers(0, 62), st.floats(0, 200))
def test_without_links_or_origin_regions_change_nothing(
    queue_ms: int, held_eu: int, held_us: int, price: float
) -> None:
    held = {"p-eu": held_eu, "p-us": held_us}
    nodes = [node("p-eu", queue_s=queue_ms / 1e3), node("p-us")]
    plain = view_of(*nodes, links="x:y rtt_ms=1", prefix_blocks=held)
    given_links = view_of(
        *(replace(one, region=one.node_id[2:]) for one in nodes),
        links=f"eu:apac rtt_ms=500 price_gb={price}",
        prefix_blocks=held,
    )
    assert placed(EU, plain).prefill == placed(EU, given_links).prefill


def test_a_large_fleet_weighs_distance_too() -> None:
    near = [node(f"p{i}", region="eu", queue_s=0.5) for i in range(30)]
    far = [node(f"q{i}", region="us") for i in range(30)]
    closest = node("p-near", region="eu", queue_s=0.01)
    assert placed(EU, view_of(*near, *far, closest)).prefill.node_id == "p-near"
    assert placed(EU, view_of(*near, *far)).prefill.node_id[0] == "q"


def test_what_is_learned_of_a_pair_counts_more_than_the_configuration() -> None:
    links = LinkModel(connect_s=0.0, regions=RegionLinks.parse(["eu:us rtt_ms=80 gbit_s=1"]))
    for node_id in ("e0", "e1", "u0"):
        links.place(node_id, "us" if node_id == "u0" else "eu")
    near_s = links.seconds("e0", "e1", 10**8, 0.0)
    assert near_s == pytest.approx(10**8 / 2e9, rel=0.1)
    assert links.seconds("u0", "e0", 10**8, 0.0) == pytest.approx(0.08 + 0.8, rel=0.01)
    for _ in range(32):
        links.observe("u0", "e0", 10**8, 0.2)
    assert links.seconds("u0", "e0", 10**8, 0.0) == pytest.approx(0.2, rel=0.1)
    assert links.seconds("u0", "e1", 10**8, 0.0) == pytest.approx(0.88, rel=0.01), "another pair"
    assert links.seconds("e0", "e1", 10**8, 0.0) == near_s, "the average is of pairs within a region"
    links.measured("u0", "e1", 1e9)  # by the node itself
    assert links.seconds("u0", "e1", 10**8, 0.0) == pytest.approx(0.08 + 0.1, rel=0.01)


@pytest.mark.parametrize(
    "text", ["", "eu", "eu:", "eu:eu", "eu:us rtt=3", "eu:us rtt_ms=x", "eu:us gbit_s=0", "eu:us price_gb=-1"]
)
def test_links_that_cannot_be_read_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"conductor\.region_links"):
        RegionLinks.parse([text])


def test_a_pair_is_given_once() -> None:
    with pytest.raises(ConfigError):
        RegionLinks.parse(["eu:us rtt_ms=1", "us:eu rtt_ms=2"])


async def test_requests_go_to_nodes_near_where_they_come_from(redis: RedisProcess) -> None:
    async with running(
        redis.url, namespace="near", region="eu", region_links=("eu:us rtt_ms=500",), policy="goodput"
    ) as cluster:
        for name in ("p0", "p1", "d0", "d1"):
            await cluster.add(name, region="eu" if name.endswith("0") else "us")
        for number, origin in enumerate(("", "us", "eu", "us")):
            given = request(f"r{number}", [*PROMPT, number], origin=origin)
            assert await cluster.generate(given) == continuation([*PROMPT, number], 8)
            timeline = cluster.conductor.timeline(f"r{number}")
            assert timeline is not None
            here = "1" if origin == "us" else "0"
            assert (timeline.summary.prefill_node, timeline.summary.decode_node) == (f"p{here}", f"d{here}")
