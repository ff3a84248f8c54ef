"""Parts of ``moonpool bench engine``, with the shipped model."""

from __future__ import annotations

import pytest

from moonpool.bench.engine import masks
from moonpool.bench.engine.driver import DecodeSteps
from moonpool.bench.harness.goals import with_goals
from moonpool.runtime.config.options import EngineOptions, ModelOptions

OPTIONS = EngineOptions(pool_nbytes=64 << 20, threads=1)


async def test_masks_stand_beside_the_same_steps_without() -> None:
    found = masks.rows(ModelOptions().directory, OPTIONS, "cpu", (2,), 4, 1)
    rows = {row.metric: row for row in with_goals("engine", [row async for row in found])}
    step = rows["step with masks"]
    assert step.ratio is not None
    assert step.value == pytest.approx(step.ratio * (step.peer_value or 0.0))
    assert (step.limit, step.limit_value) == ("at most", 1.03)


def test_the_ratio_of_masks_is_of_the_turns_of_a_round() -> None:
    masked, plain = ([DecodeSteps(s, s, 64) for s in each] for each in ((0.2, 0.11, 0.4), (0.2, 0.1, 0.4)))
    assert masks.step_row("case", masked, plain).ratio == pytest.approx(1.0)
