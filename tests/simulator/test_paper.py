"""The papers' figures: quick ones on the whole trace, the others on its beginning."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from moonpool.bench.cli import bench
from moonpool.bench.paper import FIGURES, allocation, equal_cost, overload
from moonpool.bench.paper.allocation import Buddy
from moonpool.bench.paper.hit_ratio import PAPER_HITS, hit_ratio
from moonpool.runtime.errors import ConfigError
from moonpool.runtime.reports.report import validate
from moonpool.simulator.inputs.trace import TraceRequest, at_speed, load_trace
from moonpool.simulator.simulation import Simulation

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
@pytest.mark.parametrize("name", [name for name, figure in FIGURES.items() if not figure.workload])
def test_every_figure_of_a_trace_is_a_valid_report_with_its_terms(name: str, tmp_path: Path) -> None:
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


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, figure in FIGURES.items() if figure.workload])
def test_every_generated_figure_is_a_valid_report_with_its_terms(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figure = FIGURES[name]
    assert figure.workload is not None
    beginning = figure.workload()[:150]
    monkeypatch.setitem(FIGURES, name, replace(figure, workload=lambda: beginning))
    out = tmp_path / "report.json"
    result = CliRunner().invoke(bench, ["simulate", "--paper", name, "--json", str(out)])
    assert result.exit_code == 0, result.output
    assert figure.terms.rstrip() in result.output
    report = json.loads(out.read_text())
    validate(report)
    assert report["environment"]["conditions"]["models"][0]["name"] == figure.model


def test_a_generated_figure_takes_no_trace() -> None:
    result = CliRunner().invoke(bench, ["simulate", "--trace", "x", "--paper", "vllm"])
    assert isinstance(result.exception, ConfigError)
    assert "--trace" in str(result.exception)


@given(st.integers(1, 5000), st.lists(st.tuples(st.integers(1, 900), st.booleans()), max_size=40))
def test_regions_of_a_buddy_allocator_never_overlap(num_slots: int, actions: list[tuple[int, bool]]) -> None:
    buddy, taken = Buddy(num_slots), list[tuple[int, int]]()
    for needed, gives in actions:
        if gives and taken:
            buddy.give_back(taken.pop(0))
        elif (region := buddy.take(needed)) is not None:
            assert region[1] >= needed
            taken.append(region)
        slots = [slot for begin, size in taken for slot in range(begin, begin + size)]
        assert len(slots) == len(set(slots)) <= num_slots
        assert not slots or max(slots) < num_slots
        assert buddy.num_free == num_slots - len(slots)
    for region in taken:
        buddy.give_back(region)
    assert buddy.num_free == num_slots
    assert buddy.take(1 << (num_slots.bit_length() - 1)) is not None, "freed regions are joined again"


def test_paged_memory_wastes_less_than_regions() -> None:
    rows = FIGURES["vllm"].measure(allocation.workload()[:400], lambda line: None)
    held = [row.value for row in rows if row.metric == "KV memory that holds tokens"]
    assert held == sorted(held)
    assert held[-1] > 90


@pytest.mark.slow
def test_where_prefills_must_not_be_wasted_a_rejection_at_arrival_is_better_than_one_later() -> None:
    rows = overload.generated(lambda line: None)
    rejected = [row.value for row in rows if row.metric == "rejected"]
    within = [row.value for row in rows if row.metric == "served within the SLOs"]
    # Baseline, early, predicted.
    assert rejected[0] > max(rejected[1:])
    assert within[0] < min(within[1:])


def test_a_machine_that_is_alone_is_as_fast_as_itself() -> None:
    plain = [TraceRequest(60.0 * i, 2000, 20, ()) for i in range(4)]
    (scenario,) = equal_cost.scenarios("Baseline-A100").values()
    assert equal_cost.in_time(Simulation(scenario, plain).run(), scenario.hardware.profile)
    crowd = [replace(request, arrival_s=0.0) for request in plain * 100]
    assert not equal_cost.in_time(Simulation(scenario, crowd).run(), scenario.hardware.profile)


def test_a_figure_takes_no_other_settings() -> None:
    result = CliRunner().invoke(bench, ["simulate", "--trace", "x", "--paper", "fig5", "--prefill", "3"])
    assert isinstance(result.exception, ConfigError)
    assert "--prefill" in str(result.exception)
