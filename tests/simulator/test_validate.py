"""``--validate``: the prompts' blocks, and simulated clusters beside real ones."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moonpool.bench.serve.client.answer import Answer
from moonpool.bench.simulation.cluster_replay import Replayed, prompt_of
from moonpool.bench.simulation.validation import SLO, Settings, Shape, compared
from moonpool.runtime.errors import ConfigError
from moonpool.runtime.reports.report import validate as validate_report
from moonpool.simulator.cluster.job import Job
from moonpool.simulator.inputs.scenario import Scenario
from moonpool.simulator.inputs.trace import TraceRequest
from moonpool.simulator.inputs.workload import Workload
from moonpool.simulator.simulation import Simulation
from tests.simulator.test_simulation import SMALL


def test_equal_blocks_have_equal_tokens_and_others_not() -> None:
    first, again = TraceRequest(0.0, 40, 1, (1, 2, 3)), TraceRequest(0.0, 48, 1, (1, 2, 4))
    assert prompt_of(first, 16, 7)[:32] == prompt_of(again, 16, 7)[:32]
    assert prompt_of(first, 16, 7)[32:] != prompt_of(again, 16, 7)[32:40]
    assert len(prompt_of(first, 16, 7)) == 40
    assert prompt_of(first, 16, 7)[:16] != prompt_of(first, 16, 8)[:16]


def test_a_run_that_is_as_simulated_is_within_all_limits() -> None:
    requests = Settings(2, 1, seconds=5.0).workloads(Shape(2, 2, 0), 16)["near saturation"].requests()
    hardware = replace(SMALL, chunk_tokens=512)
    simulation = Simulation(Scenario(hardware, 2, 2, slo=SLO, block_tokens=16), requests)
    outcome = simulation.run()
    assert not outcome.rejections
    answers = [_answer(job) for job in simulation.jobs]
    rows = compared("the same", Replayed(requests, answers), outcome)
    assert {row.metric for row in rows} >= {"TTFT, mean", "TPOT, p99", "within the SLOs"}
    for row in rows:
        assert row.ratio == pytest.approx(1.0), row.metric
    slower = [replace(one, token_s=tuple(2 * at_s for at_s in one.token_s)) for one in answers]
    rows = compared("twice as slow", Replayed(requests, slower), outcome)
    ttft = next(row for row in rows if row.metric == "TTFT, mean")
    assert ttft.ratio == pytest.approx(0.5)


def test_answers_of_a_single_token_are_compared_without_gaps() -> None:
    requests = [TraceRequest(0.1 * i, 40, 1, (1, 2, 3)) for i in range(3)]
    simulation = Simulation(Scenario(SMALL, 1, 1, slo=SLO, block_tokens=16), requests)
    outcome = simulation.run()
    rows = compared("short", Replayed(requests, [_answer(job) for job in simulation.jobs]), outcome)
    assert {row.metric for row in rows} > {"TTFT, mean", "within the SLOs"}
    assert not any("TPOT" in row.metric for row in rows)


def test_a_workload_without_a_prompt_that_fits_is_refused() -> None:
    work = Workload(sessions=3, prompt_tokens=4000, spread=0.0)
    with pytest.raises(ConfigError, match="longer than the 1800 tokens"):
        Settings(2, 1, work).requests(work)


def _answer(job: Job) -> Answer:
    """What a client would have seen of a simulated request, sent at 0."""
    request = job.request
    gaps_s = np.concatenate(job.gaps_s) if job.gaps_s else np.empty(0)
    token_s = job.first_token_s - request.arrival_s + np.concatenate(([0.0], np.cumsum(gaps_s)))
    cached = request.input_tokens - job.use["computed"]
    return Answer(
        0.0, float(token_s[-1]), tuple(token_s), request.output_tokens, request.input_tokens, cached
    )


# Conversations of four requests, seconds apart: how fast a machine is does not decide what is cached when the
# next one comes, nor on which node it is cheapest.
_APART = (
    "sessions=2,rate=1,turns=1,tool_share=1,tool_calls=3,tool_s=3,token_s=0.002,"
    "system_tokens=0,prompt_tokens=512,turn_tokens=96,output_tokens=16,spread=0"
)


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.timeout(300)
def test_real_clusters_and_simulated_ones_hit_the_same_blocks(tmp_path: Path) -> None:
    rows = _validate(tmp_path, "--nodes", "1", "--workload", _APART)
    hits = [row for row in rows if row["metric"] == "cache hit"]
    assert [row["case"].split(",")[0] for row in hits] == ["1 + 1", "1 both"]
    for hit in hits:
        assert hit["ratio"] == pytest.approx(1.0, abs=0.01)
        # All but the first request of a conversation find the prompt of the one before.
        assert hit["value"] == pytest.approx(100 * (512 + 624 + 736) / (512 + 624 + 736 + 848), abs=1)


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.timeout(300)
def test_the_simulator_is_near_real_clusters(tmp_path: Path) -> None:
    """Wider bounds than the goals. A busy machine makes real nodes late, which queues amplify: so TTFT, and
    what is beyond saturation, is limited from above only."""
    rows = _validate(tmp_path, "--nodes", "2", "--seconds", "15")
    ratios = {(row["case"].split(":")[0], row["metric"]): row["ratio"] for row in rows}
    for cluster in ("2 + 2", "2 both"):
        for load in ("near", "beyond"):
            case = f"{cluster}, {load} saturation"
            assert ratios[case, "cache hit"] == pytest.approx(1.0, abs=0.2), case
            assert ratios[case, "TTFT, mean"] < 1.25, case
            assert ratios[case, "TPOT, mean"] < 1.25, case
        assert ratios[f"{cluster}, near saturation", "TPOT, mean"] > 0.75, cluster


def _validate(tmp_path: Path, *options: str) -> list[dict[str, Any]]:
    out = tmp_path / "report.json"
    command = [sys.executable, "-m", "moonpool.cli", "bench", "simulate", "--validate", *options]
    done = subprocess.run(
        [*command, "--json", str(out)], capture_output=True, text=True, check=False, timeout=300
    )
    assert out.exists(), done.stderr
    content = json.loads(out.read_text())
    validate_report(content)
    rows: list[dict[str, Any]] = content["rows"]
    return rows
