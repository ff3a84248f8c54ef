"""`make gpu`: every part runs whatever became of the others, and is stopped at its limit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from moonpool.bench.gpu.__main__ import Outcome, keep, run_part
from moonpool.bench.gpu.jobs import DEFAULT, PARTS, Part
from moonpool.errors import RedisMissing
from moonpool.runtime.reports.report import Environment, Row
from tests.bench.records import CONDITIONS

ROOT = Path(__file__).parents[2]


def part(tmp_path: Path, code: str, *, timeout_s: float = 30, report: bool = False) -> Part:
    """A part that runs this code as a module."""
    (tmp_path / "some_part.py").write_text(code)
    return Part("some-part", timeout_s, ("some_part",), report)


@pytest.fixture(autouse=True)
def _modules_of_the_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moonpool.bench.gpu.__main__.ROOT", tmp_path)


def test_a_part_that_fails_is_told_with_its_output(tmp_path: Path) -> None:
    outcome = run_part(part(tmp_path, "print('so far so good')\nraise SystemExit(3)"), 30, tmp_path)
    assert outcome.failed
    assert outcome.verdict == "failed (3)"
    assert outcome.log.read_text() == "so far so good\n"


def test_a_part_is_stopped_with_all_it_started(tmp_path: Path) -> None:
    code = "import subprocess, sys\nsubprocess.run(['sleep', '100'])"
    outcome = run_part(part(tmp_path, code), 1.0, tmp_path)
    assert outcome.verdict == "stopped"
    end_s = time.monotonic() + 60
    while left := _running_with(f"PYTHONPATH={tmp_path}"):
        assert time.monotonic() < end_s, left
        time.sleep(0.01)


def _running_with(variable: str) -> list[Path]:
    files = Path("/proc").glob("[0-9]*/environ")
    return [path for path in files if variable.encode() in _read(path).split(b"\0")]


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""  # it has ended meanwhile


def test_what_a_part_measured_is_taken_up_also_when_it_fails(tmp_path: Path) -> None:
    code = """
import json, sys
content = {
    "environment": {"machine": "m", "versions": {}, "commit": "", "date": "2026-11-21T03:00:00+00:00"},
    "rows": [{"case": "c", "metric": "m", "value": 1.5, "unit": "s"}],
}
open(sys.argv[sys.argv.index("--json") + 1], "w").write(json.dumps(content))
raise SystemExit(1)
"""
    outcome = run_part(part(tmp_path, code, report=True), 30, tmp_path)
    assert outcome.failed
    assert [row.value for row in outcome.rows] == [1.5]


@pytest.mark.slow
def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "moonpool.bench.gpu", "--logs", str(tmp_path)]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "torch sees no GPU" in done.stderr


def test_the_parts_that_run_by_themselves_end_in_time() -> None:
    names = [one.name for one in PARTS]
    assert len(set(names)) == len(names)
    assert set(DEFAULT) <= set(names)
    # On one GPU, in 25 minutes.
    assert sum(one.timeout_s for one in PARTS if one.name in DEFAULT and one.gpus == 1) <= 1500


def test_a_part_says_what_the_machine_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    serving = next(one for one in PARTS if one.redis)
    assert "there are 1" in Part("two", 9, ("x",), gpus=2).lacks(1)
    assert not Part("one", 9, ("x",)).lacks(1)

    def missing() -> None:
        raise RedisMissing

    monkeypatch.setattr("moonpool.bench.gpu.jobs.find_redis", missing)
    assert "redis-server" in serving.lacks(1)


def test_the_results_of_a_part_are_there_when_it_has_ended(tmp_path: Path) -> None:
    environment = Environment("m", {}, "", "2026-11-22T03:00:00+00:00", "make gpu", {})
    rows = [Row("c", "m", 1.5, "s")]
    measured = Outcome(Part("some", 9, ("x",)), 0, 1.0, tmp_path / "some.log", rows, CONDITIONS)
    keep(measured, environment, tmp_path / "results" / "h100")
    assert json.loads((tmp_path / "results/h100-some.json").read_text())["rows"][0]["value"] == 1.5
    (tmp_path / "tune.json").write_text("{}")
    tuned = Outcome(Part("tune", 9, ("x",), table=True), None, 1.0, tmp_path / "tune.log", [])
    keep(tuned, environment, tmp_path / "results" / "h100")
    assert (tmp_path / "results/h100-tune.json").read_text() == "{}"


@pytest.mark.slow
@pytest.mark.alone
def test_the_engine_is_measured_beside_its_floor(tmp_path: Path) -> None:
    path = tmp_path / "engine.json"
    command = [sys.executable, "-m", "moonpool.bench", "engine", "--model", "small", "--device", "cpu"]
    command += ["--part", "engine", "--weights", "auto", "--weights", "int8", "--quick", "--json", str(path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    rows = {(row["case"], row["metric"]): row for row in json.loads(path.read_text())["rows"]}
    step = rows["small, bfloat16, decode, batch 8, context 256", "step"]
    assert step["ratio"] == pytest.approx(step["value"] / step["peer_value"])
    assert 0 < step["value"] < 8 * rows["small, bfloat16, decode, batch 1, context 256", "step"]["value"]
    assert (
        rows["small, bfloat16, int8 weights, decode, batch 1, context 256", "rate"]["peer"] == "plain weights"
    )
