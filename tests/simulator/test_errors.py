"""Simulated clusters whose scheduler is wrong about nodes, links and the index."""

from __future__ import annotations

import math
from dataclasses import replace
from statistics import fmean

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from moonpool.bench.simulation.command import simulate
from moonpool.conductor.observing.slo import Slo
from moonpool.runtime.errors import ConfigError
from moonpool.simulator.cluster.reality import Reality
from moonpool.simulator.inputs.errors import Errors
from moonpool.simulator.inputs.scenario import Scenario
from moonpool.simulator.inputs.trace import TraceRequest
from moonpool.simulator.simulation import Simulation
from tests.simulator.test_simulation import SMALL, chat, run

TWO = Scenario(hardware=SMALL, num_prefill=2, num_decode=2, slo=Slo(30.0, 1.0))


def apart(count: int, input_tokens: int = 1000, output_tokens: int = 40) -> list[TraceRequest]:
    """Requests that never meet."""
    return [TraceRequest(5.0 * i, input_tokens, output_tokens, (2 * i, 2 * i + 1)) for i in range(count)]


@given(
    st.builds(Errors, *[st.floats(0, 1)] * 4, st.floats(0, 20)),
    st.integers(0, 1 << 16),
    st.sampled_from(["goodput", "kv-aware", "random"]),
)
@settings(max_examples=15, deadline=None)
def test_whatever_is_wrong_no_request_and_no_block_is_lost(errors: Errors, seed: int, policy: str) -> None:
    scenario = replace(TWO, errors=errors, seed=seed, policy=policy, replicate_nbytes_per_s=1e6)
    _, outcome = run(scenario, chat(seed % 7, sessions=8))
    _, again = run(scenario, chat(seed % 7, sessions=8))
    assert outcome.served == again.served, "equal seeds give equal outcomes"


def test_the_scheduler_learns_what_a_node_really_takes() -> None:
    simulation = Simulation(replace(TWO, errors=Errors(node=0.5), policy="round-robin"), apart(60))
    simulation.run()
    exact = Simulation(replace(TWO, policy="round-robin"), apart(60))
    exact.run()
    for name, busy in (("prefill-0", "prefill_busy_s"), ("decode-0", "decode_busy_s")):
        cost = simulation.nodes[name].view.cost
        true_s, believed_s = (getattr(one.nodes[name].engine, busy) for one in (simulation, exact))
        learned = cost.prefill_correction if name.startswith("prefill") else cost.decode_correction
        assert not math.isclose(true_s, believed_s, rel_tol=0.02), "the truth differs"
        assert learned.factor(simulation.clock.now_s) == pytest.approx(true_s / believed_s, rel=0.1)


@given(st.floats(0, 1.5), st.integers(1, 40), st.integers(0, 1 << 16))
def test_errors_of_nodes_leave_what_a_cluster_can_do(spread: float, count: int, seed: int) -> None:
    reality = Reality(Errors(node=spread), seed, {"prefill": count, "decode": 1})
    factors = [reality.node_factor("prefill") for _ in range(count)]
    assert math.fsum(1 / factor for factor in factors) == pytest.approx(count)
    assert spread < 0.01 or count == 1 or max(factors) > min(factors)


@given(st.floats(0.05, 1), st.integers(0, 1 << 16), st.integers(1, 20), st.integers(1, 1 << 22))
def test_errors_of_sizes_begin_where_nodes_stop_measuring(
    spread: float, seed: int, num_sequences: int, num_tokens: int
) -> None:
    nodes = {"prefill": 1, "decode": 1}
    reality, again = (Reality(Errors(size=spread), seed, nodes) for _ in range(2))
    batch = "decode", num_sequences, num_tokens
    assert reality.work_factor(*batch) == again.work_factor(*batch), "nothing but the sizes counts"
    assert reality.work_factor("decode", min(num_sequences, 8), min(num_tokens, 8192)) == 1.0
    grown = reality.work_factor("decode", 128, 1 << 23)
    assert grown != 1.0 and Reality(Errors(), seed, nodes).work_factor("decode", 128, 1 << 23) == 1.0


def test_without_errors_nothing_is_learned() -> None:
    simulation, _ = run(TWO, chat(3))
    for node in simulation.nodes.values():
        assert node.view.cost.prefill_correction.factor(simulation.clock.now_s) == 1
    assert not simulation.cluster.costs.errors["prefill"].count


def test_a_slow_link_takes_as_much_longer() -> None:
    plain = replace(TWO, num_prefill=1, num_decode=1)
    wrong = Simulation(replace(plain, errors=Errors(link=1.0), seed=5), apart(10, 4000, 2))
    right = Simulation(plain, apart(10, 4000, 2))
    slowest = min(wrong.cluster.network.factors.values())
    gaps = [fmean(each.tpot_s for each in one.run().served) for one in (wrong, right)]
    latency_s = SMALL.network_latency_s + SMALL.profile.step_s(1, 4001)
    assert (gaps[0] - latency_s) / (gaps[1] - latency_s) == pytest.approx(1 / slowest, rel=0.05)


def test_blocks_that_the_index_does_not_show_yet_are_not_fetched() -> None:
    prompts = [TraceRequest(60.0 * i, 2048, 2, (1, 2, 3, 4)) for i in range(6)]
    scenario = replace(TWO, policy="kv-aware")
    _, seen = run(scenario, prompts)
    simulation = Simulation(replace(scenario, errors=Errors(index_s=1e9)), prompts)
    views = []
    look = simulation.cluster.view

    def view(job):  # type: ignore[no-untyped-def]
        views.append(look(job).prefix_blocks)
        return look(job)

    simulation.cluster.view = view  # type: ignore[method-assign]
    late = simulation.run()
    assert seen.hit_ratio > 0.5
    assert not any(views), "nothing is seen before the end"
    assert late.hit_ratio <= seen.hit_ratio


def test_robustness_compares_policies_at_several_scales() -> None:
    command = (
        "--workload sessions=6,rate=4 --prefill 1 --decode 1 --robustness --policy goodput --policy random"
    )
    result = CliRunner().invoke(simulate, [*command.split(), "--slo-ttft", "30"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    for scale in range(4):
        assert f"errors × {scale}" in result.output
    assert result.output.count("random: goodput") == 4


def test_robustness_needs_an_slo() -> None:
    command = "--workload sessions=6,rate=4 --robustness"
    with pytest.raises(ConfigError, match="slo-ttft"):
        CliRunner().invoke(simulate, command.split(), catch_exceptions=False)
