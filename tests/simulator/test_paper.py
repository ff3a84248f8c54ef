"""The papers' figures: quick ones on the whole trace, the others on its beginning."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from moonpool.bench.cli import bench
from moonpool.bench.paper import FIGURES
from moonpool.bench.paper.hit_ratio import PAPER_HITS, hit_ratio
from moonpool.runtime.errors import ConfigError
from moonpool.runtime.reports.report import validate
from moonpool.simulator.inputs.trace import TraceRequest, at_speed, load_trace

TRACE = Path(__file__).parents[3] / "shared/data/conversation_trace.jsonl.gz"
needs_trace = pytest.mark.skipif(not TRACE.exists(), reason=f"{TRACE} is not here")


@pytest.mark.slow
@needs_trace
def test_hit_ratios_are_the_papers() -> None:
    requests = load_trace(TRACE)
    for tokens in (1_000_000, 10_000_000):
        assert hit_ratio(requests, "lru", tokens) == pytest.approx(PAPER_HITS[tokens], abs=0.015)


def test_a_hit_counts_whole_blocks_and_half_of_the_one_where_it_ends() -> None:
    first = TraceRequest(0.0, 1024, 1, (0, 1))
    again = TraceRequest(1.0, 1536, 1, (0, 1, 2))
    assert hit_ratio([first, again], "lru", 10**6) == pytest.approx((256 + 1024 + 256) / 2560)


@pytest.mark.slow
@needs_trace
@pytest.mark.parametrize("name", FIGURES)
def test_every_figure_is_a_valid_report_with_its_terms(name: str, tmp_path: Path) -> None:
    beginning = tmp_path / "trace.jsonl"
    lines = [
        {
            "timestamp": 1e3 * request.arrival_s,
            "input_length": request.input_tokens,
            "output_length": request.output_tokens,
            "hash_ids": list(request.block_ids),
        }
        for request in at_speed(load_trace(TRACE), 1.0, 120)
    ]
    beginning.write_text("".join(json.dumps(line) + "\n" for line in lines))
    out = tmp_path / "report.json"
    options = ["simulate", "--trace", str(beginning), "--paper", name, "--json", str(out)]
    result = CliRunner().invoke(bench, options)
    assert result.exit_code == 0, result.output
    assert FIGURES[name].terms.rstrip() in result.output
    validate(json.loads(out.read_text()))


def test_a_figure_takes_no_other_settings() -> None:
    result = CliRunner().invoke(bench, ["simulate", "--trace", "x", "--paper", "fig5", "--prefill", "3"])
    assert isinstance(result.exception, ConfigError)
    assert "--prefill" in str(result.exception)
