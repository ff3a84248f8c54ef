"""``moonpool bench parallel`` measures what it says, and writes it down."""

from __future__ import annotations

import gc
import json
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from click.testing import CliRunner

from moonpool.bench.parallel import expert_dispatch as experts
from moonpool.bench.parallel import handover, replicas, steps
from moonpool.bench.parallel import host_memory as saving
from moonpool.bench.parallel.command import parallel
from moonpool.bench.parallel.copy_limit import Pools, RunCopy
from moonpool.bench.parallel.moe_checkpoint import NUM_LAYERS
from moonpool.engine.node.engine_memory import EngineMemory
from moonpool.kvstore.blocks.layout import KVLayout
from moonpool.kvstore.blocks.shards import BlockShard


def test_a_plan_that_is_none_is_refused() -> None:
    result = CliRunner().invoke(parallel, ["--plan", "two"])
    assert result.exit_code == 2
    assert "two is not TP,PP or TP,PP,CP" in result.output


def test_steps_of_two_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "NUM_STEPS", 20)
    monkeypatch.setattr(steps, "PROMPT", 300)
    json_path, plot_path = tmp_path / "report.json", tmp_path / "plot.png"
    arguments = ["--plan", "2,1", "--plan", "1,1,2", "--rounds", "1", "--part", "steps"]
    result = CliRunner().invoke(parallel, [*arguments, "--json", str(json_path), "--plot", str(plot_path)])
    assert result.exit_code == 0, result.output
    of = {(row["case"], row["metric"]): row for row in json.loads(json_path.read_text())["rows"]}
    rows = {name: row["value"] for name, row in of.items()}
    case = f"tp 2 × pp 1, decode, batch {steps.BATCH}, context {steps.CONTEXT}"
    # The embedding, two a layer, and the logits.
    assert rows[case, "exchanges"] == 1 + 2 * 6 + 1
    assert 0 < rows[case, "computing, busiest rank"] < 1
    assert rows[case, "exchanged by rank 0"] == steps.BATCH * rows[case, "exchanged by rank 0, by token"] > 0
    an_exchange = of[case, "an exchange"]
    assert 0 < an_exchange["p50"] <= an_exchange["p95"] <= an_exchange["p99"]
    prompt = "tp 2 × pp 1, prompt of 300"
    assert rows[prompt, "exchanges"] == 1 + 2 * 6 + 1
    speedup = rows[prompt, "speedup over one rank"]
    assert rows[prompt, "scaling efficiency"] == pytest.approx(speedup / 2)
    assert rows[prompt, "bubble, most"] == 0
    # K and V once a layer, the rows whose logits are wanted, and the logits.
    assert rows["tp 1 × pp 1 × cp 2, prompt of 300", "exchanging, most"] > 0
    assert rows[case.replace("tp 2 × pp 1", "tp 1 × pp 1 × cp 2"), "exchanges"] == 6 + 2
    assert plot_path.stat().st_size > 0


@pytest.mark.slow
def test_stages_on_two_machines_beside_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "NUM_STEPS", 20)
    monkeypatch.setattr(steps, "PROMPT", 300)
    json_path = tmp_path / "report.json"
    parts = ["--part", "steps", "--part", "hosts"]
    result = CliRunner().invoke(
        parallel, [*parts, "--plan", "1,2", "--rounds", "1", "--json", str(json_path)]
    )
    assert result.exit_code == 0, result.output
    rows = {(row["case"], row["metric"]): row for row in json.loads(json_path.read_text())["rows"]}
    case = f"decode, batch {steps.BATCH}, context {steps.CONTEXT}"
    near, far = (
        rows[f"tp 1 × pp 2, {of}, {case}", "step"] for of in ("one machine", "2 machines on loopback")
    )
    assert far["peer_value"] == near["value"] > 0
    for metric in ("batch to the ranks", "until all are done", "an exchange"):
        assert rows[f"tp 1 × pp 2, 2 machines on loopback, {case}", metric]["peer"] == "one machine"


@pytest.mark.slow
def test_two_replicas_beside_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "_JOBS", (("decode", 10),))
    json_path = tmp_path / "report.json"
    result = CliRunner().invoke(parallel, ["--rounds", "1", "--part", "replicas", "--json", str(json_path)])
    assert result.exit_code == 0, result.output
    (row, efficiency) = json.loads(json_path.read_text())["rows"]
    assert row["case"] == f"dp 2, decode, batch {steps.BATCH} each, context {steps.CONTEXT}"
    assert row["peer"] == "one replica"
    assert efficiency["value"] == pytest.approx(row["ratio"] / 2)


def test_a_plan_without_gpus_for_it_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    arguments = ["--device", "cuda", "--plan", "2,1", "--plan", "2,2", "--part", "handover"]
    result = CliRunner().invoke(parallel, arguments)
    assert result.exit_code == 0, result.output
    assert "tp 2 × pp 2 is left out: it needs 4 GPUs, there are 1" in result.output


def test_a_copy_that_bounds_a_transfer_keeps_the_memory_it_copies() -> None:
    shard = BlockShard(range(2), range(2))
    engine = SimpleNamespace(
        layout=KVLayout(2, 2, 64, 32, "float32"),
        shards=[SimpleNamespace(layers=shard.layers, kv_heads=shard.heads)],
    )
    pools = [Pools(cast(EngineMemory, SimpleNamespace(engine=engine)), 3) for _ in "ab"]
    memory = [weakref.ref(array) for pool in pools for array in pool.arrays]
    copy = RunCopy(*pools, 3)
    del pools
    gc.collect()
    assert all(array() is not None for array in memory)
    copy.time()
    assert len(copy.took_s) == 1


@pytest.mark.slow
def test_blocks_between_plans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handover, "NUM_BLOCKS", 8)
    json_path, plot_path = tmp_path / "report.json", tmp_path / "plot.png"
    arguments = ["--plan", "1,1", "--plan", "2,1", "--rounds", "2", "--part", "handover"]
    result = CliRunner().invoke(parallel, [*arguments, "--json", str(json_path), "--plot", str(plot_path)])
    assert result.exit_code == 0, result.output
    rows = {(row["case"], row["metric"]): row for row in json.loads(json_path.read_text())["rows"]}
    case = "tp 2 × pp 1 → tp 1 × pp 1"
    seconds, rate = rows[case, handover.SECONDS], rows[case, handover.BLOCKS]
    # 6 layers, K and V of 2 heads of 32 floats a token.
    assert seconds["value"] * rate["value"] * 1e9 == pytest.approx(8 * 64 * 6 * 2 * 4 * 32 * 4)
    assert rate["ratio"] == pytest.approx(rate["value"] / rate["peer_value"])
    assert plot_path.stat().st_size > 0


@pytest.mark.slow
def test_experts_of_two_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experts, "PLANS", (2,))
    monkeypatch.setattr(experts, "PROMPTS", (9, 300))
    json_path, plot_path = tmp_path / "report.json", tmp_path / "plot.png"
    arguments = ["--rounds", "1", "--part", "experts", "--json", str(json_path), "--plot", str(plot_path)]
    result = CliRunner().invoke(parallel, arguments)
    assert result.exit_code == 0, result.output
    rows = {(row["case"], row["metric"]): row for row in json.loads(json_path.read_text())["rows"]}
    # To the experts of each layer, and back.
    assert rows["ep 2, all-to-all, prompt of 300", "all-to-alls"]["value"] == 2 * NUM_LAYERS
    assert 0 < rows["ep 2, all-to-all, prompt of 300", "in all-to-all, most"]["value"] < 1
    assert ("ep 2, all ranks see all tokens, prompt of 300", "all-to-alls") not in rows
    skew = rows[f"ep 2, all-to-all, {experts.COPIES} copies a layer, prompt of 300", "busiest rank over mean"]
    assert skew["value"] >= 1 <= skew["peer_value"]
    assert plot_path.stat().st_size > 0


@pytest.mark.slow
def test_blocks_saved_and_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (handover, saving):
        monkeypatch.setattr(module, "NUM_BLOCKS", 8)
    json_path = tmp_path / "report.json"
    arguments = ["--plan", "1,1", "--plan", "1,2", "--rounds", "1", "--part", "saving"]
    result = CliRunner().invoke(parallel, [*arguments, "--json", str(json_path)])
    assert result.exit_code == 0, result.output
    rows = {(row["case"], row["metric"]): row for row in json.loads(json_path.read_text())["rows"]}
    kinds = (saving.SHARED, saving.APART, saving.NETWORK)
    assert rows.keys() == {
        (f"tp 1 × pp 2, {kind}", metric) for kind in kinds for metric in (saving.SAVED, saving.LOADED)
    }
    shared = rows[f"tp 1 × pp 2, {saving.SHARED}", saving.SAVED]
    apart = rows[f"tp 1 × pp 2, {saving.APART}", saving.SAVED]
    assert apart["ratio"] == pytest.approx(apart["value"] / shared["value"])
