"""``GET /v1/report``: a running cluster as the record of a run."""

from __future__ import annotations

from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from moonpool.conductor.observing.cluster_report import Served, cluster_report
from moonpool.conductor.observing.request_metrics import RequestMetrics, SequenceClock
from moonpool.runtime.config.loading import load_config, shown_options
from moonpool.runtime.reports.schema import validate

KEY = "hunter2-hunter2-hunter2-hunter2-hunter2"
NODE = {
    "node_id": "decode-0",
    "role": "decode",
    "model": "9f0c",
    "weights": "bfloat16",
    "machine": "H100, 16 cores",
    "versions": {"torch": "2.13.0"},
    "tiers": [
        {"name": "pool", "num_blocks": 64, "num_used_blocks": 9, "num_cached_blocks": 4},
        {"name": "host", "num_blocks": 64, "num_used_blocks": 6},
    ],
}
STORE = {
    "node_id": "store-0",
    "role": "store",
    "model": "",
    "tiers": [{"name": "host", "num_blocks": 64, "num_used_blocks": 2}],
}
CLUSTER = {"dtype": "float8_e4m3fn", "block_size": 16, "nodes": [NODE, STORE]}


def about() -> dict[str, Any]:
    config = load_config(None, (f"security.cluster_key={KEY}", "conductor.policy=kv-aware"))
    return {
        "machine": "AMD EPYC, 2 cores",
        "commit": "abc1234",
        "versions": {"python": "3.11"},
        "command": "python -m moonpool.conductor",
        "load_average": 0.5,
        "started_unix_s": 1_700_000_000.0,
        "options": shown_options(config),
    }


def counted() -> dict[str, Any]:
    """1,000 sequences: first tokens after 1 to 1,000 ms, then four each 9 ms."""
    metrics = RequestMetrics("tiny", CollectorRegistry())
    for number in range(1, 1001):
        clock = SequenceClock(metrics, 0.0, num_prompt_tokens=32, request_id=f"r{number}")
        clock.begin()
        for at in range(5):
            clock.token(number / 1000 + at * 0.009, 16 if at == 0 else 0)
        clock.end(number / 1000 + 0.036, "length")
    return metrics.snapshot()


def test_it_has_the_conditions_of_a_run_and_the_figures_since_the_start() -> None:
    made = cluster_report(about(), [Served("tiny", CLUSTER, counted())], 1_700_000_100.0).as_json()
    validate(made, complete=True)
    environment, conditions = made["environment"], made["environment"]["conditions"]
    assert environment["options"]["conductor.policy"] == "kv-aware"
    assert KEY not in str(made)
    assert environment["nodes"][0]["machine"] == "H100, 16 cores"
    model = {"name": "tiny", "revision": "9f0c", "weights": "bfloat16", "kv": "float8_e4m3fn"}
    assert conditions["models"] == [model], "store nodes hold no model"
    assert (conditions["cache"]["state"], conditions["cache"]["tokens"]) == ("warm", 16 * (4 + 6 + 2))
    assert "pool 64 tokens, host 128 tokens" in conditions["cache"]["note"]
    assert "2023-11-14T22:13:20" in conditions["warm_up"]
    assert conditions["noise"]["load"][0] == 0.5
    rows = {(row["case"], row["metric"]): row for row in made["rows"]}
    since = "tiny, since the start"
    assert rows[since, "sequences that ended: length"]["value"] == 1000
    assert rows[since, "output tokens"]["value"] == 5000
    assert rows[since, "prompt tokens from cache"]["value"] == 16_000
    assert rows["tiny, now", "cached tokens, host"]["value"] == 128
    # From buckets: within the widest near them.
    ttft = rows[since, "TTFT"]
    for name, expected_ms in (("p50", 500), ("p90", 900), ("p95", 950), ("p99", 990)):
        assert ttft[name] == pytest.approx(expected_ms, rel=0.02)
    assert 7.5 <= rows[since, "TPOT"]["p99"] <= 10
    assert rows[since, "E2E"]["p50"] == pytest.approx(540, rel=0.03)


def test_blocks_of_each_model_have_its_size_and_tiers_add_up() -> None:
    other = {"dtype": "bfloat16", "block_size": 32, "nodes": [NODE]}
    served = [Served("tiny", CLUSTER, {}), Served("other", other, {})]
    made = cluster_report(about(), served, 1_700_000_100.0).as_json()
    cache = made["environment"]["conditions"]["cache"]
    assert cache["blocks"] == (4 + 6 + 2) + (4 + 6)
    assert cache["tokens"] == 16 * (4 + 6 + 2) + 32 * (4 + 6)
    assert f"pool {16 * 4 + 32 * 4} tokens, host {16 * (6 + 2) + 32 * 6} tokens" in cache["note"]
    rows = {(row["case"], row["metric"]): row["value"] for row in made["rows"]}
    assert rows["tiny, now", "cached tokens, host"] == 16 * (6 + 2)
    assert rows["other, now", "cached tokens, host"] == 32 * 6


def test_what_no_node_says_is_said_to_be_unknown() -> None:
    made = cluster_report({}, [Served("tiny", {"nodes": []}, {})], 1_700_000_100.0).as_json()
    validate(made, complete=True)
    (model,) = made["environment"]["conditions"]["models"]
    assert model["revision"] == "not known: no node says"
    assert made["rows"] == []


def test_a_percentile_beyond_the_last_bucket_is_left_out() -> None:
    histogram = {"buckets": [["1.0", 9.0], ["+Inf", 10.0]], "sum": 30.0}
    report = cluster_report(
        {}, [Served("tiny", {"nodes": []}, {"request_seconds": histogram})], 1_700_000_100.0
    )
    (row,) = report.rows
    assert (row.p50, row.p90, row.p95) == (pytest.approx(1000 * 5 / 9), 1000.0, None)


async def test_the_page_is_a_valid_record(api: Any) -> None:
    api.context.about = about()
    await api.complete(max_tokens=2)
    async with api.client.get(f"{api.url}/v1/report") as answer:
        assert answer.status == 200
        made = await answer.json()
    validate(made, complete=True)
    rows = {row["metric"]: row["value"] for row in made["rows"]}
    assert rows["output tokens"] == 2
    assert rows["TTFT"] > 0
