"""``moonpool bench simulate``: traces, workloads, options, reports."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from hypothesis import given, settings
from hypothesis import strategies as st

from moonpool.bench.cli import bench
from moonpool.runtime.errors import ConfigError
from moonpool.runtime.reports.report import validate
from moonpool.simulator.inputs.azure_trace import load_azure_trace
from moonpool.simulator.inputs.trace import TraceInvalid, at_speed, load_trace
from moonpool.simulator.inputs.workload import Workload

LINE = {"timestamp": 0, "input_length": 700, "output_length": 20, "hash_ids": [1, 2]}
WORKLOAD = "sessions=20,rate=5,prompt_tokens=600,output_tokens=20"


def simulate(*options: str) -> Result:
    return CliRunner().invoke(bench, ["simulate", *options])


def write(path: Path, *lines: dict[str, Any] | str) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def test_a_trace_is_read_plain_or_gzipped(tmp_path: Path) -> None:
    plain = write(tmp_path / "trace.jsonl", {**LINE, "timestamp": 1500}, LINE)
    zipped = tmp_path / "trace.jsonl.gz"
    zipped.write_bytes(gzip.compress(plain.read_bytes()))
    assert load_trace(plain) == load_trace(zipped)
    assert [request.arrival_s for request in load_trace(plain)] == [0.0, 1.5]
    assert at_speed(load_trace(plain), 3.0)[1].arrival_s == 0.5


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("{", "truncated"),
        ("[]", "Expected `object`"),
        ({**LINE, "timestamp": -1}, "timestamp"),
        ({**LINE, "input_length": "7"}, "input_length"),
        ({**LINE, "output_length": 0}, "output_length"),
        ({**LINE, "hash_ids": [1]}, "2 blocks of 512"),
        ({**LINE, "hash_ids": [1, "x"]}, "hash_ids"),
        ({**LINE, "hash_ids": [3, 2]}, "id 2 followed another prefix"),
    ],
)
def test_a_bad_trace_is_refused_with_its_line(tmp_path: Path, line: dict[str, Any] | str, word: str) -> None:
    path = write(tmp_path / "trace.jsonl", LINE, line)
    with pytest.raises(TraceInvalid, match="line 2.*" + word):
        load_trace(path)


def test_a_trace_that_is_not_there_or_not_gzip_is_refused(tmp_path: Path) -> None:
    damaged = tmp_path / "damaged.gz"
    content = bytearray(gzip.compress(json.dumps(LINE).encode()))
    content[10] = 0xFF  # no kind of block
    damaged.write_bytes(content)
    for path in (tmp_path / "none.jsonl", write(tmp_path / "x.gz", LINE), write(tmp_path / "empty"), damaged):
        with pytest.raises(TraceInvalid, match=str(path)):
            load_trace(path)
        with pytest.raises(TraceInvalid, match=str(path)):
            load_azure_trace(path)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10_000), st.booleans(), st.sampled_from([0.0, 0.5]))
def test_workloads_repeat_and_their_prefixes_are_prefixes(seed: int, bursty: bool, tools: float) -> None:
    work = Workload(sessions=30, bursty=bursty, tool_share=tools, seed=seed)
    requests = work.requests()
    assert requests == work.requests()
    parents: dict[int, int] = {}
    for request in requests:
        assert len(request.block_ids) == -(-request.input_tokens // 512)
        for before, here in zip((-1, *request.block_ids), request.block_ids, strict=False):
            assert parents.setdefault(here, before) == before
    assert [r.arrival_s for r in requests] == sorted(r.arrival_s for r in requests)


def test_workloads_have_the_rate_and_the_sharing_that_was_asked_for() -> None:
    for bursty in (False, True):
        firsts = Workload(sessions=4000, rate=5.0, turns=1, bursty=bursty, system_tokens=0).requests()
        assert len(firsts) / firsts[-1].arrival_s == pytest.approx(5.0, rel=0.1)
        assert max(Counter(i for r in firsts for i in r.block_ids).values()) == 1
    shared = Workload(sessions=400, system_prompts=2, system_tokens=1024, turns=1).requests()
    counts = Counter(request.block_ids[0] for request in shared)
    assert len(counts) == 2
    assert max(counts.values()) / 400 == pytest.approx(2 / 3, abs=0.1)


@pytest.mark.parametrize("wrong", [{"rate": 0.0}, {"tool_share": 2.0}, {"sessions": 0}, {"turns": 0.5}])
def test_impossible_workloads_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Workload(**wrong)  # type: ignore[arg-type]


@pytest.mark.slow
def test_the_command_writes_a_valid_report_and_pictures(tmp_path: Path) -> None:
    out = tmp_path / "report.json"
    options = [
        "--workload",
        WORKLOAD,
        "--prefill",
        "2",
        "--decode",
        "1",
        "--slo-ttft",
        "5",
        "--slo-tbt",
        "0.1",
    ]
    options += ["--policy", "goodput", "--policy", "random", "--at", "1:fail:prefill-0", "--json", str(out)]
    for picture in ("plot.png", "plot.svg"):
        result = simulate(*options, "--plot", str(tmp_path / picture))
        assert result.exit_code == 0, result.output
        assert (tmp_path / picture).stat().st_size > 1000
    content = json.loads(out.read_text())
    validate(content)
    metrics = {row["metric"] for row in content["rows"] if row["case"] == "goodput"}
    assert {"TTFT", "TPOT", "TBT (longest tenth)", "goodput", "cache hit", "bytes moved"} <= metrics


def test_hardware_may_come_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "node.toml"
    file.write_text("kv_token_nbytes = 1000\npool_tokens = 1e5\n[profile]\nprefill_token_s = 1e-4\n")
    result = simulate("--workload", WORKLOAD, "--hardware", str(file))
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ([], "--trace"),
        (["--trace", "/none"], "/none"),
        (["--workload", "cats=1"], "cats"),
        (["--workload", "sessions=x"], "sessions=x"),
        (["--workload", WORKLOAD, "--policy", "best"], "best"),
        (["--workload", WORKLOAD, "--slo-ttft", "0"], "--slo-ttft"),
        (["--workload", WORKLOAD, "--prefill", "0"], "--prefill"),
        (["--workload", WORKLOAD, "--hardware", "abacus"], "abacus"),
        (["--workload", WORKLOAD, "--at", "soon"], "soon"),
        (["--workload", WORKLOAD, "--at", "1.2.3:fail:prefill-0"], "1.2.3"),
        (["--workload", WORKLOAD, "--at", "5:fail:prefill-9"], "prefill-9"),
        (["--workload", WORKLOAD, "--at", "5:fail:decode-8", "--at", "6:join:decode"], "decode-8"),
        (["--workload", WORKLOAD, "--speed", "0"], "--speed"),
        (["--workload", WORKLOAD, "--speed", "nan"], "--speed"),
        (["--workload", WORKLOAD, "--host-tokens", "-5"], "--host-tokens"),
        (["--workload", WORKLOAD, "--pool-tokens", "0"], "--pool-tokens"),
        (["--workload", WORKLOAD, "--plot", "x.gif"], "x.gif"),
    ],
)
def test_impossible_options_are_refused_by_name(options: list[str], word: str) -> None:
    result = simulate(*options)
    assert isinstance(result.exception, ConfigError) or result.exit_code == 2, result.output
    assert word in f"{result.exception} {result.output}"
