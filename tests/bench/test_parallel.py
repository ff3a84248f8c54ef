"""``moonpool bench parallel`` measures what it says, and writes it down."""

from __future__ import annotations

import gc
import json
import os
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from click.testing import CliRunner

from moonpool.bench.engine.model_shapes import MIXTURE
from moonpool.bench.harness.memory_group import NoMemoryGroups, memory_group
from moonpool.bench.parallel import capacity, experts, handover
from moonpool.bench.parallel.bubble import ROWS
from moonpool.bench.parallel.command import parallel
from moonpool.bench.parallel.handover import Pools, StridedCopy
from moonpool.bench.parallel.steps import BATCH, CONTEXT, running
from moonpool.engine.node.engine_memory import EngineMemory
from moonpool.kvstore.blocks.layout import KVLayout
from moonpool.runtime.config.options import ModelOptions, ParallelOptions


def measured(tmp_path: Path, *arguments: str) -> dict[tuple[str, str], dict[str, Any]]:
    """The rows of a quick run of one round, by case and metric."""
    path = tmp_path / "report.json"
    options = [*arguments, "--quick", "--rounds", "1", "--json", str(path)]
    result = CliRunner().invoke(parallel, options, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return {(row["case"], row["metric"]): row for row in json.loads(path.read_text())["rows"]}


def test_a_plan_that_is_none_is_refused() -> None:
    result = CliRunner().invoke(parallel, ["--plan", "two"])
    assert result.exit_code == 2
    assert "two is not TP,PP or TP,PP,CP" in result.output


@pytest.mark.parametrize("plan", [ParallelOptions(), ParallelOptions(tp=2)], ids=["one rank", "tp 2"])
async def test_every_rank_has_one_thread(plan: ParallelOptions) -> None:
    async with running(ModelOptions().directory, "cpu", plan) as session:
        assert session.engine.options.compute_threads(cores=16) == 1


@pytest.mark.slow
def test_steps_of_two_ranks(tmp_path: Path) -> None:
    plot_path = tmp_path / "plot.png"
    arguments = ["--plan", "2,1", "--plan", "1,1,2", "--part", "steps", "--plot", str(plot_path)]
    of = measured(tmp_path, *arguments)
    rows = {name: row["value"] for name, row in of.items()}
    case = f"tp 2 × pp 1, decode, batch {BATCH}, context {CONTEXT}"
    # The embedding, two a layer, and the logits.
    assert rows[case, "exchanges"] == 1 + 2 * 6 + 1
    assert 0 < rows[case, "computing, busiest rank"] < 1
    assert rows[case, "exchanged by rank 0"] == BATCH * rows[case, "exchanged by rank 0, by token"] > 0
    assert of[case, "all beside tensors and exchanges"]["limit_value"] == 1.5
    an_exchange = of[case, "an exchange"]
    assert 0 < an_exchange["p50"] <= an_exchange["p95"] <= an_exchange["p99"]
    prompt = "tp 2 × pp 1, prompt of 300"
    assert rows[prompt, "exchanges"] == 1 + 2 * 6 + 1
    speedup = rows[prompt, "speedup over one rank"]
    assert rows[prompt, "scaling efficiency"] == pytest.approx(speedup / 2)
    assert rows[prompt, "bubble, most"] == 0
    # Q, K and V, and what came of them, once a layer; the rows of which logits are wanted, and the logits.
    assert rows["tp 1 × pp 1 × cp 2, prompt of 300", "exchanging, most"] > 0
    assert rows[case.replace("tp 2 × pp 1", "tp 1 × pp 1 × cp 2"), "exchanges"] == 2 * 6 + 2
    assert plot_path.stat().st_size > 0


@pytest.mark.slow
def test_stages_on_two_machines_beside_one(tmp_path: Path) -> None:
    rows = measured(tmp_path, "--part", "hosts")
    case = f"decode, batch {BATCH}, context {CONTEXT}"
    one, two = (
        rows[f"tp 1 × pp 2, {of}, {case}", "step"] for of in ("one machine", "2 machines on loopback")
    )
    assert two["peer_value"] == one["value"] > 0
    for metric in ("batch to the ranks", "until all are done", "an exchange"):
        assert rows[f"tp 1 × pp 2, 2 machines on loopback, {case}", metric]["peer"] == "one machine"


@pytest.mark.slow
def test_what_a_second_rank_is_worth(tmp_path: Path) -> None:
    rows = measured(tmp_path, "--worth")
    for form in ("one rank", "tp 2", "two replicas"):
        for concurrent in (1, 4):
            case = f"{form}, {concurrent} at a time, 64 + 32 tokens"
            assert 0 < rows[case, "TTFT"]["p50"] <= rows[case, "E2E"]["p99"]
            assert 0 < rows[case, "utilisation of cores"]["value"] <= 110
            if form != "one rank":
                of = rows[case, "output throughput"]
                assert of["peer"] == "one rank"
                assert rows[case, "scaling efficiency"]["value"] == pytest.approx(of["ratio"] / 2)
    # Two ranks share the weights of each step; a second replica has nothing to do for one request.
    for model, few, many in (("LLaMA3-8B", "one rank", "tp 2"), ("LLaMA3-70B", "tp 2", "tp 4")):
        inside, network = (f"simulated, {model}, H200{over}" for over in ("", " over 400 Gb/s"))
        tokens = "1 at once, 1024 + 256 tokens"
        alone = rows[f"{inside}: {few}, {tokens}", "output throughput"]["value"]
        replicas = rows[f"{inside}: two replicas of {few}, {tokens}", "output throughput"]["value"]
        assert replicas == pytest.approx(alone)
        by_link = [rows[f"{of}: {many}, {tokens}", "output throughput"]["value"] for of in (inside, network)]
        assert alone < by_link[1] < by_link[0] < 2 * alone


@pytest.mark.slow
def test_two_stages_serve_a_model_that_one_of_them_has_no_memory_for(tmp_path: Path) -> None:
    """Under real limits: the kernel kills one process with the whole model."""
    try:
        with memory_group(1 << 30):
            pass
    except NoMemoryGroups as error:
        pytest.skip(f"limits need control groups of memory: {error}")
    plot_path, (few, *_) = tmp_path / "plot.svg", ROWS
    rows = measured(tmp_path, "--bubble", "--plot", str(plot_path))
    ((killed,),) = [[row] for (_, metric), row in rows.items() if metric.startswith("killed by the kernel")]
    assert killed["value"] == 1
    both = rows[f"two processes, decode, {few} sequences each, context 64", "decode throughput"]
    assert both["peer"] == f"one process, {few} sequences"
    for count in (1, 2):
        for stage in (0, 1):
            memory = rows[f"pp 2, {count} micro-batches", f"memory of stage {stage}"]
            assert 0.4 < memory["ratio"] < 1, "half of the weights, in the stage's own process"
        case = f"pp 2, {count} micro-batches, decode, {count * few} sequences, context 64"
        assert 0 < rows[case, "bubble"]["value"] < 1
        assert rows[case, "bubble"].get("limit_value") == (0.1 if count == 2 else None)
        assert rows[case, "decode throughput"]["peer"] == "one process"
        assert rows[case, "decode throughput, a stage's"]["peer"] == f"one process, {few} sequences"
    assert "micro-batches of the pipeline" in plot_path.read_text()


@pytest.mark.slow
def test_context_that_cp_ranks_split(tmp_path: Path) -> None:
    rows = measured(tmp_path, "--cp")
    one, two = (f"cp {cp}, pools of 1024 tokens" for cp in (1, 2))
    assert rows[one, "KV of a rank"]["value"] == rows[two, "KV of a rank"]["value"] > 0
    assert rows[one, "largest prompt served"]["value"] == 1023
    assert rows[two, "largest prompt served"]["value"] == 2047
    assert rows["cp 2, prompt of 300", "first token"]["peer"] == "cp 1"
    counted = rows["cp 2, prompt of 16384, by counted multiplications", "speedup over one rank"]
    assert 1.7 < counted["value"] <= 2


@pytest.mark.slow
def test_two_replicas_beside_one(tmp_path: Path) -> None:
    rows = measured(tmp_path, "--part", "replicas")
    case = f"dp 2, decode, batch {BATCH} each, context {CONTEXT}"
    assert rows[case, "throughput"]["peer"] == "one replica"
    assert rows[case, "scaling efficiency"]["value"] == pytest.approx(rows[case, "throughput"]["ratio"] / 2)


def test_a_plan_without_gpus_for_it_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    arguments = ["--device", "cuda", "--plan", "2,1", "--plan", "2,2", "--part", "handover"]
    result = CliRunner().invoke(parallel, arguments)
    assert result.exit_code == 0, result.output
    assert "tp 2 × pp 2 is left out: it needs 4 GPUs, there are 1" in result.output


ENGINE = SimpleNamespace(
    layout=KVLayout(2, 2, 64, 32, "float32"),
    shards=[SimpleNamespace(layers=range(2), kv_heads=range(2), cp_rank=0)],
)


def test_a_copy_that_bounds_a_transfer_keeps_the_memory_it_copies() -> None:
    pools = [Pools(cast(EngineMemory, SimpleNamespace(engine=ENGINE)), 3) for _ in "ab"]
    memory = [weakref.ref(array) for pool in pools for array in pool.arrays]
    copy = StridedCopy(*pools, 3)
    del pools
    gc.collect()
    assert all(array() is not None for array in memory)
    copy.copy()


def test_a_copy_has_a_thread_for_each_core_that_it_may_use() -> None:
    parts: list[slice] = []

    class Counted(StridedCopy):
        def _copy(self, blocks: slice) -> None:
            parts.append(blocks)

    pools = [Pools(cast(EngineMemory, SimpleNamespace(engine=ENGINE)), 3) for _ in "ab"]
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        Counted(*pools, 3).copy()
    finally:
        os.sched_setaffinity(0, cores)
    assert parts == [slice(0, 3)]


@pytest.mark.slow
def test_blocks_between_plans(tmp_path: Path) -> None:
    rows = measured(tmp_path, "--plan", "1,1", "--plan", "2,1", "--part", "handover")
    case = "tp 2 × pp 1 → tp 1 × pp 1"
    seconds, rate = rows[case, "8 blocks of 64 tokens"], rows[case, handover.BLOCKS]
    # 6 layers, K and V of 2 heads of 32 floats a token.
    assert seconds["value"] * rate["value"] * 1e9 == pytest.approx(8 * 64 * 6 * 2 * 4 * 32 * 4)
    assert rate["ratio"] == pytest.approx(rate["value"] / rate["peer_value"])
    assert rate["limit_value"] == 0.7


@pytest.mark.slow
def test_experts_of_two_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experts, "PROMPTS", (9, 300))
    rows = measured(tmp_path, "--part", "experts")
    # To the experts of each layer, and back.
    exchanges = 2 * MIXTURE["num_hidden_layers"]  # type: ignore[operator]
    assert rows["ep 2, all-to-all, prompt of 300", "all-to-alls"]["value"] == exchanges
    assert 0 < rows["ep 2, all-to-all, prompt of 300", "in all-to-all, most"]["value"] < 1
    assert ("ep 2, all ranks see all tokens, prompt of 300", "all-to-alls") not in rows
    skew = rows[f"ep 2, all-to-all, {experts.COPIES} copies a layer, prompt of 300", "busiest rank over mean"]
    assert skew["value"] >= 1 <= skew["peer_value"]


@pytest.mark.slow
def test_limits_of_experts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capacity, "_PROMPT", 300)
    rows = {name: row["value"] for name, row in measured(tmp_path, "--part", "capacity").items()}
    name = "ep 2, at most 1 × the mean, {}"
    assert rows["ep 2, no limit", "dropped"] == 0 <= rows[name.format("reroute"), "dropped"] < 0.01
    assert 0.05 < rows[name.format("drop"), "dropped"] < 0.9
    skews = [rows[of, "busiest rank over mean"] for of in ("ep 2, no limit", name.format("reroute"))]
    assert skews[0] > skews[1] >= 1
    assert 0 < rows[name.format("reroute"), "best token as without a limit"] < 1


@pytest.mark.slow
def test_blocks_saved_and_loaded(tmp_path: Path) -> None:
    rows = measured(tmp_path, "--plan", "1,1", "--plan", "1,2", "--part", "saving")
    kinds = (handover.MAPPED_POOLS, handover.REMOTE_POOLS, handover.TCP_POOLS)
    assert rows.keys() == {
        (f"tp 1 × pp 2, {kind}", metric) for kind in kinds for metric in (handover.SAVED, handover.LOADED)
    }
    mapped = rows[f"tp 1 × pp 2, {handover.MAPPED_POOLS}", handover.SAVED]
    remote = rows[f"tp 1 × pp 2, {handover.REMOTE_POOLS}", handover.SAVED]
    assert remote["ratio"] == pytest.approx(remote["value"] / mapped["value"])
