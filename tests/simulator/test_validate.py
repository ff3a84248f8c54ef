"""``--validate``: the prompts' blocks, and the fit of the simulated to the real cluster."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from moonpool.bench.serve.client.answer import Answer
from moonpool.bench.simulation.cluster_replay import Replayed, prompt_of
from moonpool.bench.simulation.validation import _fitted, default_workload
from moonpool.conductor.costs.model import Profile
from moonpool.runtime.reports.report import validate as validate_report
from moonpool.simulator.inputs.hardware import Hardware
from moonpool.simulator.inputs.scenario import Scenario
from moonpool.simulator.inputs.trace import TraceRequest
from moonpool.simulator.simulation import Simulation

NODE = Hardware(
    name="small",
    profile=Profile(3e-3, 1e-4, 1e-9, 4e-4, 5e-5, 1e-8),
    kv_token_nbytes=1,
    pool_tokens=40_000,
    network_nbytes_per_s=1e12,
    network_latency_s=3e-3,
    request_s=4e-3,
    chunk_tokens=512,
)


def test_equal_blocks_have_equal_tokens_and_others_not() -> None:
    first, again = TraceRequest(0.0, 40, 1, (1, 2, 3)), TraceRequest(0.0, 48, 1, (1, 2, 4))
    assert prompt_of(first, 16, 7)[:32] == prompt_of(again, 16, 7)[:32]
    assert prompt_of(first, 16, 7)[32:] != prompt_of(again, 16, 7)[32:40]
    assert len(prompt_of(first, 16, 7)) == 40
    assert prompt_of(first, 16, 7)[:16] != prompt_of(first, 16, 8)[:16]


def test_the_fit_finds_how_much_slower_the_real_nodes_are() -> None:
    scenario = Scenario(NODE, 1, 1, decode_hardware=NODE, block_tokens=16)
    slower = replace(scenario, hardware=NODE.scaled(prefill=1.3), decode_hardware=NODE.scaled(decode=1.7))
    requests = default_workload(3).requests()
    answers = []
    for each in Simulation(slower, requests).run().served:
        ends_s = each.ttft_s + each.tpot_s * (each.output_tokens - 1)
        answers.append(Answer(0.0, each.e2e_s, (each.ttft_s, ends_s), each.output_tokens))
    fitted = _fitted(scenario, [Replayed(requests, answers)], lambda line: None)
    assert fitted.hardware.profile.prefill_token_s == pytest.approx(1.3e-4, rel=0.02)
    assert fitted.decode_hardware is not None
    assert fitted.decode_hardware.profile.decode_base_s == pytest.approx(1.7 * 4e-4, rel=0.02)


# Conversations of four requests, seconds apart: how fast a machine is does not decide what is cached when the
# next one comes, nor on which node it is cheapest.
_APART = (
    "sessions=2,rate=1,turns=1,tool_share=1,tool_calls=3,tool_s=3,token_s=0.002,"
    "system_tokens=0,prompt_tokens=512,turn_tokens=96,output_tokens=16,spread=0"
)


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.timeout(300)
def test_a_real_cluster_and_a_simulated_one_hit_the_same_blocks(tmp_path: Path) -> None:
    out = tmp_path / "report.json"
    command = [sys.executable, "-m", "moonpool.cli", "bench", "simulate", "--validate", "--workload", _APART]
    command += ["--json", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    content = json.loads(out.read_text())
    validate_report(content)
    hit = next(row for row in content["rows"] if row["metric"] == "cache hit")
    assert hit["ratio"] == pytest.approx(1.0, abs=0.01)
    # All but the first request of a conversation find the prompt of the one before.
    assert hit["value"] == pytest.approx(100 * (512 + 624 + 736) / (512 + 624 + 736 + 848), abs=1)
