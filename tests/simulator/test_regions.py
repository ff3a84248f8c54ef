"""Regions of the simulated cluster."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from moonpool.conductor.costs.regions import RegionLink
from moonpool.runtime.errors import ConfigError
from moonpool.simulator.cluster.clock import Clock
from moonpool.simulator.cluster.network import Network
from moonpool.simulator.inputs.scenario import ClusterEvent, Scenario
from moonpool.simulator.inputs.trace import TraceRequest
from moonpool.simulator.simulation import Simulation
from tests.simulator.test_simulation import SMALL, chat, run

EU = frozenset({"eu"})
LINKS = ("eu:us rtt_ms=300 gbit_s=0.1 price_gb=1",)


@pytest.mark.slow
@settings(max_examples=20)
@example(147, False)  # a conversation that outgrows every pool
@example(159, True)  # a prompt is placed again while it is computed
@example(248, False)
@given(st.integers(0, 1000), st.booleans())
def test_blocks_of_confined_requests_are_in_their_region(seed: int, fails: bool) -> None:
    """Half of the sessions are confined; a node in their region is lost, and another one is not."""
    # A few conversations outgrow every pool, in rare seeds: their next turns would be rejected.
    free, others = ([one for one in chat(seed + n) if one.input_tokens < SMALL.pool_tokens] for n in (0, 1))
    # Block ids of the two workloads differ: tenants have no blocks in common.
    confined = [
        replace(one, block_ids=tuple(10**9 + each for each in one.block_ids), regions=EU) for one in others
    ]
    scenario = Scenario(
        SMALL,
        num_prefill=4,
        num_decode=4,
        regions=("eu", "us"),
        region_links=LINKS,
        migrate=("drain", "defragment", "hot-spot", "priority", "queue"),
        events=[ClusterEvent(3.0, "fail", "prefill", 0)] if fails else (),
    )
    simulation, outcome = run(scenario, sorted([*free, *confined], key=lambda one: one.arrival_s))
    assert not outcome.rejections
    own = {key for job in simulation.jobs if job.request.regions for key in job.keys}
    for node in simulation.nodes.values():
        assert node.view.region == "eu" or not any(map(node.memory.holds, own)), node.node_id


def test_the_way_to_the_user_is_part_of_ttft() -> None:
    scenario = Scenario(SMALL, num_prefill=0, num_decode=0, num_both=1, regions=("eu",), region_links=LINKS)
    request = TraceRequest(0.0, 600, 4, (1, 2), origin="eu")
    near, far = (
        Simulation(scenario, [replace(request, origin=origin)]).run().served[0] for origin in ("eu", "us")
    )
    assert far.ttft_s == pytest.approx(near.ttft_s + 0.3)
    assert far.e2e_s == pytest.approx(near.e2e_s + 0.3)
    assert far.tpot_s == near.tpot_s


def test_bytes_between_regions_take_their_time_and_cost_money() -> None:
    clock, ended = Clock(), list[float]()
    link = RegionLink(rtt_s=0.5, nbytes_per_s=1e6, price=1e-6)
    network = Network(clock, nbytes_per_s=1e8, latency_s=0.0, between=lambda source, target: link)
    network.start("a", "b", 2e6, lambda: ended.append(clock.now_s))
    clock.run()
    assert ended == [pytest.approx(2.5)]
    assert (network.moved_nbytes, network.egress) == (2e6, pytest.approx(2.0))


def test_copies_of_confined_prefixes_are_refused() -> None:
    scenario = Scenario(SMALL, regions=("eu",), replicate_nbytes_per_s=1e9)
    with pytest.raises(ConfigError, match="not simulated"):
        Simulation(scenario, [TraceRequest(0.0, 600, 4, (1, 2), regions=EU)])
