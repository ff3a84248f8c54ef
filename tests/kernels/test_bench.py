"""The benchmark of the kernels measures something, in the one shape of all benchmarks."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from moonpool.bench.cli import bench
from moonpool.bench.kernels import goals, tune
from moonpool.bench.kernels import readme_table as readme
from moonpool.bench.kernels.cases import decode_cases
from moonpool.bench.kernels.clock import CpuClock
from moonpool.bench.kernels.command import LIMITS_CASE, PARTS
from moonpool.bench.kernels.device_limits import Machine
from moonpool.bench.kernels.model_step import ModelShape, llama_rows
from moonpool.kernels.triton import launch
from moonpool.runtime.reports import report


@pytest.mark.parametrize("part", [part for part in PARTS if part != "linear"])
def test_bench_kernels(tmp_path: Path, part: str) -> None:
    path = tmp_path / "report.json"
    arguments = ["kernels", "--quick", "--part", part, "--rounds", "1", "--json", str(path)]
    done = CliRunner().invoke(bench, arguments, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    content = json.loads(path.read_text())
    report.validate(content)
    assert content["rows"]
    assert all(row["value"] > 0 for row in content["rows"] if row["metric"] != "error")
    errors = [row for row in content["rows"] if row["metric"] == "error"]
    assert all(row["value"] <= row["limit_value"] for row in errors)
    assert part == "step" or errors


def test_contestants_are_timed_in_turn() -> None:
    order: list[str] = []
    works = {"a": lambda: order.append("a"), "b": lambda: order.append("b")}
    found = CpuClock(wanted_s=0).seconds_of(works, rounds=3)
    assert set(found) == {"a", "b"}
    # Two calls to see how long each takes, then one a round.
    assert "".join(order) == "aabb" + "ab" * 3


def test_the_goals_of_a_gpu() -> None:
    """As the table of goals says them: which cases have one, and which."""
    assert goals.of_decode(True, 32, 4096, True) == goals.of_decode(True, 256, 8192, True) == 0.85
    assert goals.of_decode(True, 1, 128 << 10, True) == 0.7
    assert goals.of_decode(True, 8, 4096, True) is None
    assert goals.of_decode(True, 32, 4096, False) is None
    assert goals.of_prefill(True, 128, 8192, 8192) == goals.of_prefill(True, 128, 32768, 32768) == 0.7
    assert goals.of_prefill(True, 64, 8192, 8192) is None
    assert goals.of_prefill(True, 128, 2048, 8192) is None


def test_the_sweep_of_a_gpu_covers_what_it_must() -> None:
    every = decode_cases(cuda=True, quick=False, full=True)
    found = {
        (c.batch, c.context, c.heads.num_heads // 8, c.heads.head_dim, c.heads.block_size) for c in every
    }
    wanted = product((1, 256), (512, 128 << 10), (1, 4, 8), (64, 128), (16, 64, 256))
    assert set(wanted) <= found
    usual = decode_cases(cuda=True, quick=False, full=False)
    assert {case.pages for case in usual} == {torch.bfloat16, torch.float8_e4m3fn}
    assert len({case.case for case in usual}) == len(usual) < len(every)


def test_what_does_not_fit_is_said_in_a_row() -> None:
    machine = Machine(torch.device("cpu"), CpuClock(), 1, torch.bfloat16, {})
    case = next(c for c in decode_cases(True, False, True) if (c.batch, c.context) == (256, 128 << 10))
    (row,) = case.rows(machine, ())
    assert row.metric.startswith("not measured: its pages do not fit")
    assert row.unit == "GiB"
    assert row.value > 2


def test_a_model_that_does_not_fit_is_said_in_a_row() -> None:
    machine = Machine(torch.device("cpu"), CpuClock(), 1, torch.bfloat16, {})
    assert [row.unit for row in llama_rows(machine)] == ["GiB", "GiB"]


def test_a_whole_step_against_its_floor() -> None:
    """The rows of a served model, of a shape that a CPU can do."""
    machine = Machine(torch.device("cpu"), CpuClock(0), 1, torch.float32, {"copy": 1e10, "matmul": 1e11})
    small = ModelShape("a small shape", 64, 96, 2, 4, 2, 16, 128)
    decode, prompt = llama_rows(machine, small)
    assert decode.peer == prompt.peer == "floor"
    assert decode.peer_value is not None
    assert decode.peer_value * 1e7 == small.weights_nbytes(torch.float32) + small.kv_nbytes(
        64 * 2048, torch.float32
    )
    assert decode.limit_value == 1.3
    assert prompt.limit_value == 1.5


def test_tuning_needs_a_gpu_and_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    monkeypatch.setattr("sys.argv", ["tune"])
    assert tune.main() == 2
    assert "no CUDA device" in capsys.readouterr().err
    monkeypatch.setattr("sys.argv", ["tune", "--list"])
    assert tune.main() == 0
    assert len(capsys.readouterr().out.splitlines()) == len(list(tune.slots())) == 18


def test_a_row_that_is_put_is_chosen_and_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    text = launch.TABLE_PATH.read_text()
    monkeypatch.setattr(launch, "TABLE_PATH", tmp_path / "launch.json")
    (tmp_path / "launch.json").write_text(text)
    launch.table.cache_clear()
    try:
        slot = next(tune.slots())
        choice = launch.DecodeChoice(32, 8, 5, 2)
        tune.put(slot, 90, choice)
        args = (slot.head_dim, 16, torch.bfloat16, slot.pages)
        assert launch.decode_choice(*args, 90) == choice
        assert launch.decode_choice(*args, 80) != choice
        tune.write()
        launch.table.cache_clear()
        launch.decode_choice.cache_clear()
        assert launch.decode_choice(*args, 90) == choice
    finally:
        launch.table.cache_clear()
        launch.decode_choice.cache_clear()


def test_the_readme_says_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["readme", "--check"])
    assert readme.main() == 0, "run python -m moonpool.bench.kernels.readme_table"


def test_the_readmes_table_of_a_gpu(tmp_path: Path) -> None:
    rows = [
        {"case": LIMITS_CASE, "metric": "large copy", "value": 4300.0, "unit": "GB/s"},
        {
            **{"case": "decode", "metric": "rate", "value": 3400.0, "unit": "GB/s", "peer": "large copy"},
            **{"peer_value": 4300.0, "ratio": 0.79, "limit": "at least", "limit_value": 0.85},
        },
        {
            "case": "decode",
            "metric": "error",
            "value": 0.1,
            "unit": "",
            "limit": "at most",
            "limit_value": 1.0,
        },
    ]
    facts = {"machine": "H200, CUDA 13.0", "versions": {"torch": "2.13.0"}, "commit": "abc", "date": ""}
    (tmp_path / "h200.json").write_text(json.dumps({"environment": facts, "rows": rows}))
    (tmp_path / "other.json").write_text(json.dumps({"rows": [{"case": "another bench"}]}))
    text = readme.section(tmp_path)
    assert "| decode | 3,400 GB/s | large copy 4,300 | 0.79 | ≥ 0.85, **missed** |" in text
    assert "1 of 1" in text
    assert readme.NO_GPU not in text
    assert readme.NO_GPU in readme.section(tmp_path / "empty")
