"""``moonpool plan``: candidates, verdicts, refused options."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from moonpool.conductor.observing.slo import Slo
from moonpool.runtime.errors import ConfigError
from moonpool.runtime.reports.report import validate
from moonpool.simulator.capacity import EFFECTIVE, candidates, highest_speed, judge
from moonpool.simulator.inputs.hardware import A800, H200, LLAMA3_8B, LLAMA3_70B
from moonpool.simulator.inputs.workload import Workload
from moonpool.simulator.plan_command import plan

WORK = Workload(sessions=60, rate=3.0, prompt_tokens=3000, output_tokens=100, think_s=5.0)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    with path.open("w") as lines:
        for request in WORK.requests():
            line = {
                "timestamp": 1e3 * request.arrival_s,
                "input_length": request.input_tokens,
                "output_length": request.output_tokens,
                "hash_ids": list(request.block_ids),
            }
            lines.write(json.dumps(line) + "\n")
    return path


def run(trace: Path, *options: str) -> Result:
    given = {"--slo-ttft": "5", "--slo-tbt": "0.05", "--gpus": "4", "--gpu": "h200", "--model": "llama3-8b"}
    given |= dict(zip(options[::2], options[1::2], strict=True))
    return CliRunner().invoke(
        plan, ["--trace", str(trace), *(text for item in given.items() for text in item)]
    )


def test_every_cluster_uses_the_gpus_there_are_and_fits_the_weights() -> None:
    found = candidates(A800, LLAMA3_70B, 16, [1, 2, 4, 8], WORK.requests(), Slo())
    # Two A800 have 160 GB for 141 GB of weights, of which a tenth is not to be had.
    assert {cluster.hardware.num_gpus for cluster in found} == {2, 4, 8}
    assert all(cluster.num_gpus == 16 for cluster in found)
    assert {bool(cluster.num_both) for cluster in found} == {True, False}


def test_a_verdict_serves_at_its_speed() -> None:
    (cluster, *_) = candidates(H200, LLAMA3_8B, 2, [1], WORK.requests(), Slo(5.0, 0.05))
    verdict = judge(cluster, WORK.requests(), lambda line: None)
    assert verdict.speed > 0
    assert verdict.outcome.effective_ratio >= EFFECTIVE


@pytest.mark.parametrize("limit", [1e-3, 0.0175, 0.02, 0.7, 1.0, 30.0, 1e3])
def test_the_highest_speed_is_that_of_all_that_were_tried(limit: float) -> None:
    tried: list[float] = []
    found = highest_speed(lambda speed: tried.append(speed) or speed <= limit)  # type: ignore[func-returns-value]
    assert found == max((speed for speed in tried if speed <= limit), default=0.0)


@pytest.mark.slow
def test_the_command_ranks_clusters_and_says_what_pays(trace: Path, tmp_path: Path) -> None:
    out = tmp_path / "report.json"
    result = run(trace, "--gpus", "2", "--json", str(out))
    assert result.exit_code == 0, result.output
    assert "replicas" in result.output
    assert "isaggregation" in result.output
    content = json.loads(out.read_text())
    validate(content)
    per_gpu = [row["value"] for row in content["rows"] if row["metric"] == "goodput a GPU"]
    assert per_gpu == sorted(per_gpu, reverse=True)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (["--slo-ttft", "0"], "--slo-ttft"),
        (["--slo-ttft", "0.0001"], "--slo-ttft 0.0001 is impossible"),
        (["--slo-tbt", "0.0001"], "--slo-tbt 0.0001 is impossible"),
        (["--gpus", "0"], "--gpus"),
        (["--gpus", "1", "--gpu", "a800", "--model", "llama3-70b"], "too few"),
        (["--parallel", "1", "--gpu", "a800", "--model", "llama3-70b"], "does not fit a node of 1 × A800"),
        (["--gpu", "abacus"], "abacus"),
        (["--model", "eliza"], "eliza"),
        (["--parallel", "two"], "--parallel"),
        (["--limit", "-1"], "--limit"),
    ],
)
def test_what_cannot_be_is_refused_by_name(trace: Path, options: list[str], word: str) -> None:
    result = run(trace, *options)
    assert isinstance(result.exception, ConfigError) or result.exit_code == 2, result.output
    assert word in f"{result.exception} {result.output}"
