"""Several simulated conductors, which share their bookings by the live conductors' own objects."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moonpool.conductor.admission.tenants import Tenant
from moonpool.conductor.observing.slo import Slo
from moonpool.runtime.errors import ConfigError
from moonpool.simulator.inputs.hardware import SHIPPED, tensor_parallel
from moonpool.simulator.inputs.scenario import Scenario
from moonpool.simulator.inputs.trace import TraceRequest
from moonpool.simulator.inputs.workload import Workload
from moonpool.simulator.outcome import Outcome
from moonpool.simulator.simulation import Simulation

NODE = tensor_parallel(*SHIPPED["8xa800-llama3-70b"])
ONE = Scenario(NODE, 3, 2, rejection="early", slo=Slo(8.0, 0.1))


def chat(seed: int, sessions: int = 60) -> list[TraceRequest]:
    work = Workload(
        sessions=sessions, rate=3.0, prompt_tokens=6000, output_tokens=150, think_s=2.0, seed=seed
    )
    return work.requests()


def run(scenario: Scenario, requests: list[TraceRequest], *, only_first: bool = False) -> Outcome:
    """Run, and check that no conductor counts load at the end. ``only_first``: gets all requests."""
    simulation = Simulation(scenario, requests)
    if only_first:
        for job in simulation.jobs:
            job.conductor = 0
    outcome = simulation.run()
    for conductor in simulation.cluster.conductors:
        assert not conductor.loads()
        for name, member in conductor.members.items():
            view = simulation.nodes[name].refresh(member.conductor)
            assert view.num_running == view.num_context_tokens == 0
    return outcome


@pytest.mark.slow
@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 1000), policy=st.sampled_from(("goodput", "kv-aware")))
def test_idle_conductors_change_nothing(seed: int, policy: str) -> None:
    one, requests = replace(ONE, policy=policy), chat(seed, sessions=25)
    alone = run(one, requests)
    for share_s in (0.0, 0.05):
        beside = run(replace(one, num_conductors=3, share_s=share_s), requests, only_first=True)
        assert beside.served == alone.served


@pytest.mark.slow
def test_without_delay_several_conductors_serve_nearly_what_one_does() -> None:
    """Not exactly: foreign prefills are seconds of work without an order, and each view begins with its own
    request where the node may run another conductor's."""
    within = {1: 0, 4: 0}
    for seed in range(4):
        requests = chat(seed)
        for count in within:
            within[count] += run(replace(ONE, num_conductors=count, share_s=0.0), requests).num_within
    assert within[4] == pytest.approx(within[1], rel=0.05)


@pytest.mark.slow
def test_conductors_that_do_not_share_their_load_serve_less() -> None:
    shared = blind = 0
    for seed in range(3):
        requests = chat(seed)
        shared += run(replace(ONE, num_conductors=4), requests).num_within
        blind += run(replace(ONE, num_conductors=4, share_s=1e6), requests).num_within
    assert shared > blind


def test_limits_of_a_tenant_hold_through_all_conductors() -> None:
    client = Tenant("few", max_requests=3)
    at_once = [
        TraceRequest(float(i), 60_000, 400, tuple(range(1000 * i, 1000 * i + 118)), client=client)
        for i in range(8)
    ]
    for count in (1, 2, 4):
        outcome = run(replace(ONE, rejection="none", num_conductors=count), at_once)
        assert outcome.rejections == {"limit": 5}, count


def test_what_is_not_simulated_is_refused() -> None:
    with pytest.raises(ConfigError, match="conductors"):
        replace(ONE, num_conductors=2, replicate_nbytes_per_s=1e9)
    with pytest.raises(ConfigError, match="conductors"):
        replace(ONE, num_conductors=0)
