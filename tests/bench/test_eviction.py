"""Laws of the eviction benchmark, and the hit rates the default policy must reach."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path

import pytest
from click.testing import CliRunner

from moonpool.bench.eviction.ablations import ablations, fates_of
from moonpool.bench.eviction.command import eviction
from moonpool.bench.eviction.policies import CONTENDERS
from moonpool.bench.eviction.replay import GENERATED, RULES, Request, optimum, replay, replay_writes
from moonpool.runtime.reports.report import validate
from moonpool.simulator.inputs.trace import TraceInvalid, load_trace

TRACE = Path(__file__).parents[3] / "shared/data/conversation_trace.jsonl.gz"
needs_trace = pytest.mark.skipif(not TRACE.exists(), reason=f"{TRACE} is not here")


@pytest.mark.parametrize("policy", CONTENDERS)
def test_nobody_beats_the_clairvoyant_and_room_for_all_misses_only_what_is_new(policy: str) -> None:
    requests = GENERATED["conversations"](random.Random(1), 600)
    best = optimum(requests, 300)
    assert replay(requests, policy, 300).hit_rate <= best
    different = len({block for blocks in requests for block in blocks})
    total = sum(map(len, requests))
    assert replay(requests, policy, different).num_hits == total - different
    assert optimum(requests, different) == pytest.approx((total - different) / total)


@pytest.mark.parametrize("option", ["--blocks=-3", "--block-tokens=0", "--ssd=-1"])
def test_sizes_that_cannot_be_are_refused(tmp_path: Path, option: str) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 10, "output_length": 1, "hash_ids": [1]}\n')
    result = CliRunner().invoke(eviction, ["--trace", str(trace), option])
    assert (result.exit_code, option.partition("=")[0] in result.output) == (2, True), result.output


def recorded() -> list[Request]:
    return [request.block_ids for request in load_trace(TRACE)]


@pytest.mark.slow
@needs_trace
def test_lru_on_the_trace_is_what_its_readme_says() -> None:
    assert replay(recorded(), "lru", 10_000).hit_rate == pytest.approx(0.211, abs=0.001)


@needs_trace
@pytest.mark.slow
@pytest.mark.parametrize(("capacity", "least"), [(1_000, 0.08), (10_000, 0.24)])
def test_the_prefix_policy_reaches_its_hit_rates_on_the_trace(capacity: int, least: float) -> None:
    assert replay(recorded(), "prefix", capacity).hit_rate >= least


@pytest.mark.slow
@pytest.mark.parametrize(
    ("load", "capacity", "num_requests"),
    [*((load, 1000, 3000) for load in GENERATED), ("drift", 5000, 3000), ("quick-conversations", 300, 6000)],
)
def test_the_prefix_policy_loses_nothing_to_lru_on_generated_loads(
    load: str, capacity: int, num_requests: int
) -> None:
    requests = GENERATED[load](random.Random(2), num_requests)
    assert replay(requests, "prefix", capacity).hit_rate >= replay(requests, "lru", capacity).hit_rate - 0.005


def test_the_command_writes_a_valid_report(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    fields = {"timestamp": 0, "input_length": 1500, "output_length": 1}
    lines = [json.dumps({**fields, "hash_ids": [0, n % 5 + 1, n % 5 + 9]}) for n in range(50)]
    trace.write_text("\n".join(lines))
    out = tmp_path / "report.json"
    options = ["--trace", str(trace), "--policies", "lru,prefix", "--blocks", "2,4", "--json", str(out)]
    result = CliRunner().invoke(eviction, options)
    assert result.exit_code == 0, result.output
    content = json.loads(out.read_text())
    validate(content)
    assert {row["case"] for row in content["rows"]} == {"2 blocks", "4 blocks"}


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ([], "--trace"),
        (["--generate", "drift", "--policies", "fifo"], "fifo"),
    ],
)
def test_impossible_options_are_refused_by_name(options: list[str], word: str) -> None:
    result = CliRunner().invoke(eviction, options)
    assert result.exit_code != 0
    assert word in result.output


def test_a_trace_that_is_not_there_is_refused_by_name() -> None:
    result = CliRunner().invoke(eviction, ["--trace", "/none"])
    assert isinstance(result.exception, TraceInvalid)
    assert "/none" in str(result.exception)


@pytest.mark.slow
def test_more_knowledge_gives_more_hits_and_never_more_than_the_optimum() -> None:
    requests = GENERATED["conversations"](random.Random(1), 600)
    rates = dict(ablations(requests, 300))
    some = [rates[f"lru, told which blocks return of {share}%"] for share in (25, 50, 75)]
    right = [
        rates[f"lru, told which blocks return, {wrong}% of requests wrong"]
        for wrong in (30, 25, 20, 15, 10, 0)
    ]
    base = replay(requests, "lru", 300).hit_rate
    assert base < some[0] < some[1] < some[2] < right[-1] <= optimum(requests, 300)
    assert right == sorted(right)


def test_fates_say_whether_a_block_is_used_again() -> None:
    assert fates_of([(1, 2), (1,), (3,), (1, 2)]) == [[True, True], [True], [False], [False, False]]


@pytest.mark.parametrize("rule", RULES)
def test_write_policies_write_each_block_of_a_large_ssd_once(rule: str) -> None:
    requests = GENERATED["conversations"](random.Random(1), 200)
    found = replay_writes(requests, rule, "lru", 50, 100_000)
    uses = Counter(block for blocks in requests for block in blocks)
    most = {
        "write-through": len(uses),
        "write-back": len(uses),
        "selective": sum(count > 1 for count in uses.values()),
        RULES[-1]: sum(count > 1 for count in uses.values()),
    }
    assert 0 < found.num_writes <= most[rule]
    assert 0 < found.num_hits <= found.num_blocks - len(uses)
