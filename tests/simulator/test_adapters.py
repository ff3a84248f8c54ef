"""LoRA adapters in the simulated cluster."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moonpool.conductor.costs.model import Profile
from moonpool.runtime.errors import ConfigError
from moonpool.simulator.inputs.hardware import Hardware
from moonpool.simulator.inputs.scenario import Scenario
from moonpool.simulator.inputs.trace import TraceRequest
from moonpool.simulator.simulation import Simulation

_BLOCK = 16
# A pool of 100 blocks; an adapter takes 10, and 0.16 s to load.
NODE = Hardware(
    name="small",
    profile=Profile(0.01, 1e-4, 0.0, 0.02, 0.0, 0.0),
    kv_token_nbytes=1000,
    pool_tokens=100 * _BLOCK,
    host_load_nbytes_per_s=1e6,
    network_nbytes_per_s=1e12,
    network_latency_s=0.0,
    adapter_nbytes=10 * _BLOCK * 1000,
    adapter_step_s=1e-3,
)


def request(at_s: float, adapter: str, prompt: int = 160, output: int = 2, first_id: int = 0) -> TraceRequest:
    ids = tuple(range(first_id, first_id - (-prompt // _BLOCK)))
    return TraceRequest(at_s, prompt, output, ids, adapter=adapter)


def run(requests: list[TraceRequest], nodes: tuple[int, int, int] = (0, 0, 1)) -> Simulation:
    simulation = Simulation(Scenario(NODE, *nodes, policy="kv-aware", block_tokens=_BLOCK), requests)
    assert not simulation.run().rejections
    for node in simulation.nodes.values():
        resident = len(node.view.resident_adapters)
        assert node.memory.num_available == 100 - 10 * resident
        assert node.adapters.num_idle_blocks == 10 * resident, "a request that has ended still needs one"
    return simulation


def test_a_request_waits_for_its_adapter_and_the_next_one_finds_it() -> None:
    simulation = run([request(0.0, "a"), request(5.0, "a", first_id=100), request(10.0, "", first_id=200)])
    first_s, again_s, without_s = (job.first_token_s - job.request.arrival_s for job in simulation.jobs)
    assert again_s == pytest.approx(without_s)
    assert first_s == pytest.approx(again_s + 0.16)
    assert simulation.nodes["both-0"].adapters.num_loads == 1


def test_each_adapter_of_a_batch_makes_its_steps_longer() -> None:
    def last_s(*adapters: str) -> float:
        requests = [request(0.0, one, 16, 100, 100 * i) for i, one in enumerate(adapters)]
        return max(job.done_s - job.first_token_s for job in run(requests).jobs)

    assert last_s("a", "b") - last_s("a", "a") == pytest.approx(0.1, rel=0.2), "a millisecond a step"


def test_adapters_without_users_give_way_to_prompts() -> None:
    many = [request(float(i), f"adapter-{i}", first_id=100 * i) for i in range(8)]
    long = request(20.0, "", prompt=80 * _BLOCK, first_id=5000)
    oldest, newest = request(30.0, "adapter-0", first_id=6000), request(31.0, "adapter-7", first_id=7000)
    node = run([*many, long, oldest, newest]).nodes["both-0"]
    assert node.adapters.num_loads == 8 + 1, "the one used last is still there"


def test_both_nodes_of_a_request_load_its_adapter() -> None:
    simulation = run([request(0.0, "a")], (1, 1, 0))
    assert [node.adapters.num_loads for node in simulation.nodes.values()] == [1, 1]


def test_moves_of_requests_with_adapters_are_refused() -> None:
    scenario = replace(Scenario(NODE, 1, 1, block_tokens=_BLOCK), migrate=("hot-spot",))
    with pytest.raises(ConfigError, match="adapters"):
        Simulation(scenario, [request(0.0, "a")])
