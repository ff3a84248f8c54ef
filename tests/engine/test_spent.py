"""The seconds of steps are divided among their sequences, and none is left out."""

from __future__ import annotations

import pytest

from moonpool.engine.batching.sampling import Sampling
from moonpool.engine.batching.sequence import Sequence
from moonpool.engine.batching.step_plan import ENDS, Chunk, Draft, StepEvent, StepPlan
from moonpool.engine.execution import step_loop
from moonpool.engine.node.work_time import WorkTime
from moonpool.runtime.config.engine_options import SpeculativeOptions
from tests.engine.conftest import prompt


def sequence_of(name: str) -> Sequence:
    return Sequence(name, 0, prompt(30), 30, sampling=Sampling(), root_key=b"r" * 16)


def test_each_row_of_a_step_costs_the_same() -> None:
    decoding, drafted, prefilling = (sequence_of(name) for name in "abc")
    prefilling.num_lost_tokens = 10
    plan = StepPlan([decoding, drafted], [Chunk(prefilling, 8, 5, last=False)], [], 0, [])
    plan.drafts.append(Draft(drafted, 30, [1, 2, 3]))
    taken = [StepEvent(drafted, 31, token_id=1, accepted=True), StepEvent(drafted, 32, token_id=9)]
    plan.charge(1.0, 0.25, taken)
    assert decoding.spent.busy_s == pytest.approx(0.1)
    assert drafted.spent.busy_s == pytest.approx(0.4)
    assert drafted.spent.rejected_s == pytest.approx(0.2), "one of three was accepted"
    assert prefilling.spent.busy_s == pytest.approx(0.5)
    for sequence in (decoding, drafted):
        assert sequence.spent.prompts_s == pytest.approx(0.5), "half of the step was another's prompt"
        assert sequence.spent.exchange_s == pytest.approx(0.25)
    assert prefilling.spent.prompts_s == 0.0, "the prompt is its own"
    assert prefilling.spent.again_s == pytest.approx(0.2), "two of five tokens had been computed"


def test_a_row_that_computes_nothing_costs_nothing() -> None:
    going_on, ended = sequence_of("a"), sequence_of("b")
    StepPlan([going_on, ended], [], [], 0, [], after=[0, ENDS]).charge(1.0, 0.0, [])
    assert (going_on.spent.busy_s, ended.spent.busy_s) == (1.0, 0.0)


@pytest.mark.parametrize("method", ["off", "ngram"])
async def test_all_time_with_work_is_charged(
    checkpoint, serve, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """Also where blocks are short, so that sequences are preempted and computed again."""
    monkeypatch.setattr(step_loop, "INLINE_STEP_S", -1.0)
    async with serve(checkpoint.path, num_blocks=32, speculative=SpeculativeOptions(method=method)) as driver:
        sequences = [driver.sequence(prompt(20 + n), max_tokens=60) for n in range(6)]
        await driver.run(*sequences)
        stats = driver.engine.stats()
        assert stats.num_preemptions
        assert sum(s.spent.busy_s for s in sequences) == pytest.approx(stats.busy_s, rel=1e-6)
        assert 0 < sum(s.spent.again_s for s in sequences) < stats.busy_s
        await driver.run(driver.sequence(prompt(5), max_tokens=2))
        idle = driver.engine.stats().busy_s
        assert driver.engine.stats().busy_s == idle, "without work no time is charged"


async def test_what_is_told_is_told_once(checkpoint, serve) -> None:
    work = WorkTime(0.0)
    async with serve(checkpoint.path) as driver:
        (result,) = await driver.run(sequence := driver.sequence(prompt(9), max_tokens=5))
        charged_s = sequence.spent.busy_s
        told = [work.tell(event) for event in result.events]
    assert sum(message.busy_s for message in told) == pytest.approx(charged_s, rel=1e-6)
    assert work.facts(charged_s)["told_s"] == pytest.approx(charged_s, abs=1e-4)
