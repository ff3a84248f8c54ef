"""Tenants in the simulator: the conductor's own objects decide who enters and who goes when."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from moonpool.bench.simulation.rows import rows
from moonpool.conductor.admission.adapter_shares import AdapterShares
from moonpool.conductor.admission.entrance import Admission
from moonpool.conductor.admission.fair_share import FairShare
from moonpool.conductor.admission.tenants import Tenant
from moonpool.conductor.admission.turn import Turn
from moonpool.conductor.admission.usage import Usage
from moonpool.conductor.costs.model import Profile
from moonpool.conductor.errors import RequestRejected
from moonpool.conductor.observing.slo import Slo
from moonpool.conductor.placing.placement import Placement, PrefillEstimate, Reason
from moonpool.conductor.request import GenerateRequest, SamplingParams
from moonpool.simulator.inputs.hardware import SHIPPED, Hardware, tensor_parallel
from moonpool.simulator.inputs.scenario import Scenario
from moonpool.simulator.inputs.trace import TraceRequest, beside
from moonpool.simulator.inputs.workload import Workload
from moonpool.simulator.simulation import Simulation

PROMPT = 1024
# A prompt is a step, so that the node computes one after the other.
NODE = Hardware(
    name="one prompt a step",
    profile=Profile(0.01, 1e-4, 0.0, 0.02, 1e-4, 1e-7),
    kv_token_nbytes=1,
    pool_tokens=1 << 20,
    chunk_tokens=PROMPT,
)
COMPUTE_S = NODE.profile.prefill_s(PROMPT, 0)
TENANTS = (
    Tenant("heavy", weight=3.0),
    Tenant("light"),
    Tenant("few", max_requests=2),
    Tenant("slow", tokens_per_minute=6 * PROMPT),
)
Arrival = tuple[float, Tenant]
Times = list[float]  # of each request's first token; infinite: rejected


def simulated(arrivals: Sequence[Arrival]) -> Times:
    requests = [
        TraceRequest(at_s, PROMPT, 1, (2 * i, 2 * i + 1), client=client)
        for i, (at_s, client) in enumerate(arrivals)
    ]
    simulation = Simulation(Scenario(NODE, 1, 1, policy="kv-aware"), requests)
    outcome = simulation.run()
    assert {each.rejected for each in outcome.served} <= {"", "limit"}
    return [math.inf if job.rejected else job.first_token_s for job in simulation.jobs]


async def live(arrivals: Sequence[Arrival]) -> Times:
    """The same by the live ``Admission`` and one queue, with a clock that stands at each event."""
    now_s = 0.0
    admission, fair_share, adapter_shares = Admission(1000, lambda: now_s), FairShare(), AdapterShares()
    usage = Usage(admission, fair_share, lambda: now_s)
    times, turns, queue = [math.inf] * len(arrivals), dict[int, Turn](), list[tuple[float, int]]()
    requests = [
        GenerateRequest(str(i), np.zeros(PROMPT, np.int32), SamplingParams(1), client=client)
        for i, (_, client) in enumerate(arrivals)
    ]
    estimate = PrefillEstimate("prefill-0", 0.0, 0.0, COMPUTE_S, COMPUTE_S, 0)
    placement = Placement(estimate, None, Reason.LOAD, "", (), ())
    coming, running, ends_s = list(range(len(arrivals))), -1, math.inf
    while coming or running >= 0:
        if coming and arrivals[coming[0]][0] < ends_s:
            number = coming.pop(0)
            now_s, client = arrivals[number]
            try:
                never = asyncio.get_running_loop().create_future()
                await admission.admit(requests[number], lambda _: None, unless=never)
            except RequestRejected:
                continue
            turn = turns[number] = Turn(client, "", fair_share, adapter_shares, usage)
            queue.append((now_s + turn.delay_s(now_s), number))
            turn.charge(placement, 0, num_prefill=1, num_decode=1, now_s=now_s)
        else:
            now_s = times[running] = ends_s
            turns[running].settle(1, now_s, pays=True)
            admission.end(requests[running], 1)
            running, ends_s = -1, math.inf
        if running < 0 and queue:
            queue.sort()
            running, ends_s = queue.pop(0)[1], now_s + COMPUTE_S
    return times


# Milliseconds between arrivals; a prompt takes 112.
ARRIVALS = st.lists(st.tuples(st.integers(0, 300), st.sampled_from(TENANTS)), min_size=2, max_size=25)


@settings(max_examples=60, deadline=None)
@given(gaps=ARRIVALS)
@example(gaps=[(0, TENANTS[1])] * 8 + [(5, TENANTS[0])])
@example(gaps=[(1, TENANTS[2])] * 4 + [(1, TENANTS[3])] * 8)
def test_the_simulator_admits_and_orders_requests_as_the_conductor_does(
    gaps: list[tuple[int, Tenant]],
) -> None:
    at_s, arrivals = 0.0, list[Arrival]()
    for gap_ms, client in gaps:
        at_s += gap_ms / 1e3 + 1.37e-5  # never at the end of another's prompt
        arrivals.append((at_s, client))
    assert simulated(arrivals) == pytest.approx(asyncio.run(live(arrivals)))


def test_a_tenant_within_its_share_does_not_wait_for_one_that_floods() -> None:
    flood = Workload(sessions=150, rate=30.0, turns=1.0, prompt_tokens=3000, output_tokens=4, tenant="flood")
    calm = replace(flood, sessions=10, rate=2.0, tenant="calm", seed=2)
    requests = beside(flood.requests(), calm.requests())
    node = tensor_parallel(*SHIPPED["8xa800-llama3-70b"])
    outcome = Simulation(Scenario(node, 1, 1, policy="kv-aware", slo=Slo(2.0)), requests).run()
    found = {row.metric: row.value for row in rows("kv-aware", outcome)}
    assert found["tenant calm TTFT"] < found["tenant flood TTFT"] / 4
    assert found["tenant calm within the SLOs"] > found["tenant flood within the SLOs"]
