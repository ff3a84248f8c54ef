"""Parts of ``moonpool bench engine``, with the shipped model."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner
from safetensors import safe_open

from moonpool.bench.cli import bench
from moonpool.bench.engine import drafts, masks
from moonpool.bench.engine.driver import DecodeSteps
from moonpool.bench.harness.goals import with_goals
from moonpool.bench.harness.shapes import write_first_layers
from moonpool.engine.checkpoint.config import ModelConfig
from moonpool.engine.sharding.tensor_slices import expected_tensors
from moonpool.runtime.config.options import EngineOptions, ModelOptions
from moonpool.runtime.errors import ConfigError

OPTIONS = EngineOptions(pool_nbytes=64 << 20, threads=1)


async def test_masks_stand_beside_the_same_steps_without() -> None:
    found = await masks.rows(ModelOptions().directory, OPTIONS, "cpu", (2,), 4, 1)
    rows = {row.metric: row for row in with_goals("engine", found)}
    step = rows["step with masks"]
    assert step.ratio is not None
    assert step.value == pytest.approx(step.ratio * (step.peer_value or 0.0))
    assert (step.limit, step.limit_value) == ("at most", 1.03)


def test_a_device_that_cannot_be_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="must be auto, cpu, cuda or cuda:NUMBER, got 'gpu'"):
        CliRunner().invoke(bench, ["engine", "--device", "gpu"], catch_exceptions=False)


def test_the_ratio_of_masks_is_of_the_turns_of_a_round() -> None:
    masked, plain = ([DecodeSteps(s, s, 64) for s in each] for each in ((0.2, 0.11, 0.4), (0.2, 0.1, 0.4)))
    assert masks.step_row("case", masked, plain).ratio == pytest.approx(1.0)


@pytest.mark.slow
async def test_a_draft_model_that_is_always_right_gets_all_its_tokens_accepted() -> None:
    """The model as its own draft: two tokens a step with one proposed, five with four."""
    directory = ModelOptions().directory
    rows = {row.metric: row.value for row in await drafts.rows("same", directory, directory, OPTIONS, 1)}
    assert rows["accepted at position 1, after right ones"] == 1.0
    assert rows["tokens a step, 1 proposed"] == pytest.approx(2.0, abs=0.05)
    assert rows["tokens a step, 4 proposed"] == pytest.approx(5.0, abs=0.3)
    assert rows["tokens a step that pay for 4"] > 1.0


def test_the_first_layers_of_a_checkpoint_are_a_checkpoint(tmp_path: Path) -> None:
    directory = ModelOptions().directory
    write_first_layers(directory, tmp_path, 2)
    config = ModelConfig.from_checkpoint(tmp_path)
    assert config.num_layers == 2
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert set(file.keys()) == set(expected_tensors(config))
