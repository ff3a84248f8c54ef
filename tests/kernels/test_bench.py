"""The benchmark of the kernels: its report, goals and tuning."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import product
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from moonpool.bench.cli import bench
from moonpool.bench.harness.goals import kind_of, with_goals
from moonpool.bench.kernels import tune
from moonpool.bench.kernels.attention import Decode, Heads, Prefill, decode_cases
from moonpool.bench.kernels.command import PARTS
from moonpool.bench.kernels.device_limits import BFLOAT16_MATMUL, CpuClock, Machine, Work
from moonpool.bench.kernels.matmuls import linear_rows
from moonpool.kernels.reference import FP8
from moonpool.kernels.triton import launch
from moonpool.runtime.reports import report
from moonpool.runtime.reports.conditions import LIMIT
from moonpool.runtime.reports.report import Row, versus


@pytest.mark.slow
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
    assert errors


def test_contestants_are_timed_in_turn() -> None:
    order: list[str] = []
    works = {"a": lambda: order.append("a"), "b": lambda: order.append("b")}
    found = CpuClock(wanted_s=0).seconds_of(works, rounds=3)
    assert set(found) == {"a", "b"}
    # Two calls to see how long each takes, then one a round.
    assert "".join(order) == "aabb" + "ab" * 3


class ToldClock:
    """Of a processor whose times are given, in seconds."""

    name = "told"

    def __init__(self, told: Mapping[str, float]) -> None:
        self._told = told

    def seconds_of(self, contestants: Mapping[str, Work], rounds: int) -> dict[str, float]:
        return {name: self._told[name] for name in contestants}


@pytest.mark.parametrize(("narrow_s", "limit"), [(6.0, 2**30), (0.5, 2**32)], ids=["without", "with"])
def test_products_in_bfloat16_are_limited_by_the_faster_of_two_formats(narrow_s: float, limit: int) -> None:
    """Without instructions for bfloat16, and with."""
    clock = ToldClock({"copy": 1.0, "read": 1.0, "matmul": 2.0, BFLOAT16_MATMUL: narrow_s})
    limits = Machine(torch.device("cpu"), clock, 1, torch.float32)._measured_limits()
    assert (limits["matmul"], limits[BFLOAT16_MATMUL]) == (2**30, limit)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_prefill_stands_beside_products_of_its_own_format(dtype: torch.dtype) -> None:
    limits = {"matmul": 2e9, BFLOAT16_MATMUL: 4e9}
    machine = Machine(torch.device("cpu"), CpuClock(wanted_s=0), 1, torch.float32, limits)
    rows = Prefill(Heads(8, 4, 32, 16), dtype, dtype, 16, 16).rows(machine, ())
    (rate,) = [row for row in rows if row.peer is not None]
    assert (rate.peer, rate.peer_value) == (
        ("large matmul", 2.0) if dtype == torch.float32 else ("large matmul in bfloat16", 4.0)
    )
    assert kind_of(rate.peer or "") == LIMIT


def test_a_linear_layer_in_bfloat16_stands_beside_torchs_faster_product() -> None:
    """On a processor without instructions for bfloat16."""
    clock = ToldClock({"ours": 1.0, "torch": 6.0, "torch in float32": 2.0})
    machine = Machine(torch.device("cpu"), clock, 1, torch.float32)
    rates = [row for row in linear_rows(machine, quick=True) if row.metric == "rate"]
    found = {row.case: (row.peer, row.ratio) for row in rates}
    assert found["linear 256x1408 bfloat16, 8 rows"] == ("torch in float32", 2.0)
    assert found["linear 256x1408 float32, weight bfloat16, 8 rows"] == ("torch", 6.0)


def test_the_goals_of_a_gpu() -> None:
    """Which cases have a goal, and which goal."""

    def goal(case: str, peer: str) -> float | None:
        row = versus(Row(case, "rate", 1.0, "GB/s"), peer, 1.0)
        return with_goals("kernels", [row])[0].limit_value

    heads, wide = Heads(32, 8, 128, 16), torch.bfloat16
    for at, bound in (((32, 4096), 0.85), ((256, 8192), 0.85), ((1, 128 << 10), 0.7), ((8, 4096), None)):
        assert goal(Decode(heads, wide, wide, *at).case, "large copy") == bound
    assert goal(Decode(heads, wide, FP8, 32, 4096).case, "large copy") is None
    assert goal(Decode(heads, wide, FP8, 32, 4096).case, "pages as wide as q") == 0.75
    for new, context, bound in ((8192, 8192, 0.7), (32768, 32768, 0.7), (2048, 8192, None)):
        assert goal(Prefill(heads, wide, wide, new, context).case, "SDPA cuDNN") == bound
    assert goal(Prefill(Heads(32, 8, 64, 16), wide, wide, 8192, 8192).case, "SDPA cuDNN") is None


def test_gpu_sweep_covers_required_cases() -> None:
    cases = decode_cases(cuda=True, quick=False)
    assert {case.pages for case in cases} == {torch.bfloat16, torch.float8_e4m3fn}
    assert len({case.case for case in cases}) == len(cases)
    centre = {(case.batch, case.context) for case in cases if case.heads == Heads(32, 8, 128, 16)}
    assert set(product((1, 256), (512, 128 << 10))) <= centre
    others = {(c.heads.num_heads // 8, c.heads.head_dim, c.heads.block_size) for c in cases}
    assert others == set(product((1, 4, 8), (64, 128), (16, 64, 256)))


def test_case_that_does_not_fit_gives_a_row() -> None:
    machine = Machine(torch.device("cpu"), CpuClock(), 1, torch.bfloat16, {})
    case = next(c for c in decode_cases(True, False) if (c.batch, c.context) == (256, 128 << 10))
    (row,) = case.rows(machine, ())
    assert row.metric.startswith("not measured: its pages do not fit")
    assert row.unit == "GiB"
    assert row.value > 2


def test_tuning_without_gpu_is_rejected(
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


def test_tuned_row_is_chosen_and_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
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
        tune.write(launch.TABLE_PATH)
        launch.table.cache_clear()
        launch.decode_choice.cache_clear()
        assert launch.decode_choice(*args, 90) == choice
    finally:
        launch.table.cache_clear()
        launch.decode_choice.cache_clear()
