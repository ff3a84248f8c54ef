"""The cost profile: it predicts what it measured, learns, and gives up in time on a slow model."""

from __future__ import annotations

import numpy as np
import pytest

from moonpool.conductor.costs.model import CostModel, Profile
from moonpool.engine.batching.sampling import Sampling
from moonpool.engine.batching.sequence import Sequence
from moonpool.engine.batching.step_plan import Chunk, Draft, StepPlan
from moonpool.engine.device.device import CpuDevice
from moonpool.engine.execution import cost_profile
from moonpool.engine.execution.cost_profile import StepCosts, measure
from moonpool.runtime.config.engine_options import CPU_LIMITS
from moonpool.runtime.config.options import EngineOptions
from moonpool.runtime.cost_profile import CostProfile
from tests.engine.short_profile import REPETITIONS


@pytest.fixture(autouse=True)
def as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost_profile, "_REPETITIONS", REPETITIONS)


class Machine:
    """A runner whose steps take exactly what the formula says, on a clock that only they move."""

    def __init__(self, slowness: float = 1.0, max_len: int = 4096) -> None:
        self.truth = StepCosts(CostProfile(2e-3, 1e-4, 3e-8, 1e-3, 2e-4, 5e-8))
        self.slowness = slowness
        self.now_s = 100.0
        self.num_steps = 0
        self.options = EngineOptions().within(CPU_LIMITS)
        self.device = CpuDevice()
        self.max_len = max_len
        self.num_blocks = 4096

    def clock(self) -> float:
        return self.now_s

    def execute(self, plan: StepPlan) -> None:
        assert all(s.num_tokens <= self.max_len for s in plan.sequences())
        self.num_steps += 1
        self.now_s += self.slowness * self.truth.predict_s(plan)


def decode_plan(n: int, context: int) -> StepPlan:
    sequence = Sequence("r", 0, [0] * context, context, sampling=Sampling(), root_key=b"")
    return StepPlan([sequence] * n, [], [], 0, [])


def prefill_plan(start: int, n: int) -> StepPlan:
    sequence = Sequence("r", 0, [0] * (start + n), start + n, sampling=Sampling(), root_key=b"")
    return StepPlan([], [Chunk(sequence, start, n, True)], [], 0, [])


def test_a_drafted_tokens_cost_is_learned_on_a_busy_machine() -> None:
    """Every fifth step, of either kind, takes three times as long: the mean of a token's cost is found."""
    costs = StepCosts(CostProfile(1e-3, 1e-4, 0, 1e-3, 1e-4, 0))
    rng, plain, drafted = np.random.default_rng(0), decode_plan(8, 100), decode_plan(8, 100)
    drafted.drafts += [Draft(sequence, 100, [1]) for sequence in drafted.decodes]
    found = []
    for _ in range(4000):
        for plan, true_s in ((plain, 1.8e-3), (drafted, 1.8e-3 + 8 * 0.5e-4)):
            disturbed = 3.0 if rng.random() < 0.2 else rng.uniform(0.8, 1.2)
            costs.correct(plan, costs.predict_s(plan), disturbed * true_s)
        found.append(costs.draft_row_cost(drafted.decodes))
    # As a part of what the step takes without.
    assert np.mean(found[500:]) == pytest.approx(8 * 0.5e-4 / 1.8e-3, rel=0.25)


@pytest.mark.parametrize("plan", [decode_plan(5, 700), prefill_plan(100, 300), prefill_plan(0, 7)])
def test_what_was_measured_is_predicted(plan: StepPlan) -> None:
    machine = Machine()
    profile = measure(machine, machine.clock)
    assert profile.predict_s(plan) == pytest.approx(machine.truth.predict_s(plan), rel=1e-3)


@pytest.mark.parametrize("slowness", [30.0, 10_000.0])
def test_a_slow_model_is_measured_in_bounded_steps(slowness: float) -> None:
    machine = Machine(slowness)
    profile = measure(machine, machine.clock)
    assert machine.num_steps >= 2
    longest_s = slowness * machine.truth.predict_s(prefill_plan(1024, 128))
    assert machine.now_s - 100 < 1.2 + 2 * longest_s
    if slowness > 1000:
        assert machine.num_steps == 2, "one prefill, one decode step"
    assert profile.predict_s(decode_plan(1, 64)) == pytest.approx(
        slowness * machine.truth.predict_s(decode_plan(1, 64)), rel=0.1
    )


def test_long_steps_are_repeated_less_so_that_each_coefficient_is_measured() -> None:
    machine = Machine(slowness=30.0)
    profile = measure(machine, machine.clock)
    plan = prefill_plan(100, 300)
    assert profile.predict_s(plan) == pytest.approx(30 * machine.truth.predict_s(plan), rel=1e-3)


def test_a_short_model_is_not_measured_beyond_its_length() -> None:
    machine = Machine(max_len=40)
    measure(machine, machine.clock)
    assert machine.num_steps > 10


def test_steps_correct_the_profile_and_a_single_odd_one_hardly_does() -> None:
    profile, plan = StepCosts(CostProfile(1e-3, 1e-4, 0, 1e-3, 1e-4, 0)), decode_plan(4, 100)
    profile.correct(plan, profile.predict_s(plan), 100 * profile.predict_s(plan))
    assert profile.decode_scale < 1.2
    for _ in range(300):
        profile.correct(plan, profile.predict_s(plan), 5e-3)
    assert profile.predict_s(plan) == pytest.approx(5e-3, rel=0.02)
    assert profile.coefficients()["prefill_base_s"] == 1e-3, "prefills were not seen"


def test_what_a_node_publishes_is_corrected_once_by_the_conductor() -> None:
    """A machine that becomes three times slower: both learn from every step, and no estimate overshoots."""
    truth = StepCosts(CostProfile(1e-3, 1e-4, 0, 1e-3, 1e-4, 0))
    node, plan, model = StepCosts(truth.profile), decode_plan(4, 100), CostModel()
    plain_s, now_s = truth.predict_s(plan), 0.0
    actual_s = 3 * plain_s
    seen = model.node(Profile.from_record(node.published()))
    predicted: list[float] = []
    for second in range(60):
        for _ in range(20):
            now_s = second + 0.5
            node.correct(plan, node.predict_s(plan), actual_s)
            model.observe_steps(seen, plain_s=seen.profile.step_s(4, 400), actual_s=actual_s, now_s=now_s)
            predicted.append(seen.step_s(4, 400, now_s))
        seen.profile = Profile.from_record(node.published())  # a heartbeat
    assert max(predicted) < 1.1 * actual_s
    assert predicted[-1] == pytest.approx(actual_s, rel=0.1)
    assert node.predict_s(plan) == pytest.approx(actual_s, rel=0.05), (
        "its own estimates are corrected by itself"
    )


@pytest.mark.parametrize("tbt_s", [0.005, 0.02, 0.2])
def test_a_step_with_a_part_of_a_prompt_ends_when_the_next_tokens_are_wanted(tbt_s: float) -> None:
    costs = StepCosts(CostProfile(1e-3, 1e-4, 3e-8, 1e-3, 2e-4, 5e-8))
    decodes = [sequence_of(200) for _ in range(4)]
    num_tokens = costs.timely_tokens(decodes, 500, tbt_s)
    longer, shorter = (
        costs.predict_s(StepPlan(decodes, [Chunk(sequence_of(8000), 500, n, False)], [], 1, []))
        for n in (num_tokens + 2, num_tokens)
    )
    assert shorter <= 0.9 * tbt_s < longer


def test_no_part_of_a_prompt_fits_where_decoding_takes_all_the_time() -> None:
    assert StepCosts(CostProfile(1e-3, 1e-4, 0, 1e-2, 0, 0)).timely_tokens([sequence_of(8)], 0, 0.01) == 0


def test_steps_of_both_kinds_correct_their_own_factor() -> None:
    costs = StepCosts(CostProfile(1e-2, 1e-4, 0, 1e-2, 1e-4, 0))
    plan = StepPlan([sequence_of(100)], [Chunk(sequence_of(64), 0, 64, True)], [], 1, [])
    predicted_s = costs.predict_s(plan)
    for _ in range(200):
        costs.correct(plan, costs.predict_s(plan), 0.6 * predicted_s)
    assert costs.predict_s(plan) == pytest.approx(0.6 * predicted_s, rel=0.01)
    assert (costs.prefill_scale, costs.decode_scale) == (1.0, 1.0)


def sequence_of(num_tokens: int) -> Sequence:
    return Sequence("s", 0, [0] * num_tokens, num_tokens, sampling=Sampling(), root_key=b"")
