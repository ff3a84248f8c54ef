"""``moonpool bench elastic`` compares what it says, and writes it down."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, cast

import pytest
from click.testing import CliRunner

from moonpool.bench.cli import bench
from moonpool.bench.elastic.comparison import Case, Comparison, behaviour, num_reversed
from moonpool.bench.elastic.fleets import Planned, Result, Task, simulate
from moonpool.bench.elastic.live import LiveLoad, Watch
from moonpool.conductor.observing.slo import Slo
from moonpool.conductor.planning.plan import ADD, REMOVE, SWITCH, Bounds
from moonpool.runtime.errors import ConfigError
from moonpool.runtime.reports import report
from moonpool.simulator.cluster.elastic_fleet import Change
from moonpool.simulator.inputs.hardware import A800, LLAMA3_70B, tensor_parallel
from moonpool.simulator.inputs.trace import TraceRequest

BURST_S, PAUSE_S = 10, 110


def bursts(count: int, per_s: int = 24) -> list[tuple[float, int, int]]:
    """Arrival, prompt and output tokens: bursts with nothing in between."""
    return [
        (number * (BURST_S + PAUSE_S) + i / per_s, 2048 + i % 7, 8)
        for number in range(count)
        for i in range(BURST_S * per_s)
    ]


def written(tmp_path: Path, requests: list[tuple[float, int, int]]) -> Path:
    path, begin = tmp_path / "trace.csv", datetime(2026, 1, 1, tzinfo=UTC)
    lines = ["TIMESTAMP,ContextTokens,GeneratedTokens"]
    for at_s, prompt, output in requests:
        stamp = (begin + timedelta(seconds=at_s)).strftime("%Y-%m-%d %H:%M:%S.%f")
        lines.append(f"{stamp}0,{prompt},{output}")
    path.write_text("\n".join(lines) + "\n")
    return path


def run(*arguments: str, file: Path) -> dict[str, dict[str, dict[str, Any]]]:
    """The rows by case and metric."""
    line = ["elastic", *arguments, "--json", str(file)]
    result = CliRunner().invoke(bench, line, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    content = json.loads(file.read_text())
    report.validate(content)
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for row in content["rows"]:
        found.setdefault(row["case"], {})[row["metric"]] = row
    return found


@pytest.mark.parametrize(
    "option", ["--target=2", "--hold=-1", "--spare=-1", "--migrate=drain,queu", "--join=-1"]
)
def test_options_that_the_planner_would_refuse_are_refused(tmp_path: Path, option: str) -> None:
    trace = written(tmp_path, [(0.0, 374, 44)])
    result = CliRunner().invoke(bench, ["elastic", "--trace", str(trace), option])
    assert result.exit_code, result.output
    assert isinstance(result.exception, ConfigError | SystemExit), result.exception


@pytest.mark.slow
def test_a_planned_fleet_is_compared_with_the_smallest_fixed_one_that_is_as_good(tmp_path: Path) -> None:
    trace = written(tmp_path, bursts(4))
    options = ["--times", "1", "--prefill", "2:16", "--decode", "1:2", "--join", "4", "--hold", "10"]
    found = run("--trace", str(trace), *options, file=tmp_path / "report.json")
    (planned,) = (rows for case, rows in found.items() if case.startswith("planned"))
    saved = planned["fewer node-hours at equal attainment"]
    fixed = found[f"{saved['peer']} (equal attainment)"]
    kept = "requests within both SLOs"
    assert fixed[kept]["value"] >= planned[kept]["value"]
    assert saved["value"] == pytest.approx(
        100 * (1 - planned["node-hours"]["value"] / fixed["node-hours"]["value"])
    )
    equal = next(rows for case, rows in found.items() if case.endswith("(equal node-hours)"))
    assert equal["node-hours"]["value"] >= planned["node-hours"]["value"] * 0.99
    assert planned["nodes that serve, most"]["value"] > planned["nodes that serve, fewest"]["value"]
    assert planned["nodes added and removed"]["value"] > 0


def fleet(prefill: int, *, planned: bool = False, attained: float = 0.0) -> Task:
    bounds = {"prefill": Bounds(2, 16, 0), "decode": Bounds(1, 2, 0)}
    rules = Planned(bounds, target=0.95, hold_s=10.0, join_s=4.0) if planned else None
    hardware = tensor_parallel(A800, LLAMA3_70B, 4)
    return Task(hardware, Slo(20.0, 1.0), prefill, 1, ("drain", "queue"), rules, attained)


def requests(count: int) -> list[TraceRequest]:
    return [TraceRequest(*one, ()) for one in bursts(count)]


def test_a_fleet_that_is_too_small_is_given_up_and_one_that_suffices_is_not() -> None:
    work = requests(2)
    assert simulate(fleet(1, attained=0.95), work) is None
    large = simulate(fleet(12, attained=0.95), work)
    assert large is not None and large.attained >= 0.95
    small = simulate(fleet(1), work)
    assert small is not None and small.attained < 0.95


@pytest.mark.slow
def test_in_bursts_a_planned_fleet_needs_fewer_node_hours_than_a_fixed_one_that_is_as_good() -> None:
    work = requests(4)
    planned = simulate(fleet(2, planned=True), work)
    assert planned is not None and planned.attained >= 0.95
    assert planned.num_replaced > 0  # nodes that join take over what waits
    sizes = (simulate(fleet(prefill, attained=planned.attained), work) for prefill in range(1, 17))
    smallest = next(one for one in sizes if one is not None)
    assert planned.node_hours < 0.85 * smallest.node_hours


def test_the_smallest_fixed_fleet_may_have_many_more_decode_nodes() -> None:
    """One more in place of a prefill node does not yet suffice, three more do."""
    least = {1: 6, 2: 5, 3: 4, 4: 1}  # prefill nodes by decode nodes

    class Simulator:
        def run(self, tasks: Iterable[Task]) -> Iterator[Result | None]:
            for task in tasks:
                suffices = task.prefill >= least[task.decode]
                yield Result(1.0, task.prefill + task.decode, 1.0, ()) if suffices else None

    case = Case(fleet(2), Planned({}, target=0.9, hold_s=10.0, join_s=4.0))
    most = {"prefill": Bounds(1, 16, 0), "decode": Bounds(1, 4, 0)}
    found = Comparison(cast(Any, Simulator()), [case], most, lambda text: None)._smallest(case, 0.9)
    assert found is not None and found[:2] == (1, 4)


def test_a_node_that_comes_back_soon_was_removed_in_vain() -> None:
    changes = [Change(0.0, REMOVE, "prefill"), Change(5.0, ADD, "decode"), Change(8.0, ADD, "prefill")]
    assert num_reversed(changes, 10.0) == 1
    assert num_reversed(changes, 5.0) == 0


def test_the_live_case_takes_the_busiest_window_and_a_part_of_the_tokens() -> None:
    work = [TraceRequest(at_s, 4000, 40, ()) for at_s in (0.0, 50.0, 51.0, 52.0, 60.0, 99.0)]
    assert LiveLoad(window_s=10.0, shrink=4).cut(work) == [(at_s, 1000, 10) for at_s in (0.0, 1.0, 2.0, 10.0)]


def looked_at(needed: int, ready: int, **states: str) -> dict[str, Any]:
    """As of ``GET /v1/fleet``: nodes by name with role and state; empty: no provider started them."""
    nodes = []
    for name, state in states.items():
        supplied = {"state": state} if state else None
        nodes.append({"node_id": name, "role": name.partition("_")[0], "supplied": supplied})
    role = {"join_s": 4.0, "needed": needed, "ready": ready}
    return {"nodes": nodes, "planner": {"roles": {"prefill": role}}}


def test_a_live_fleet_has_the_figures_of_a_simulated_one() -> None:
    watch = Watch(100.0, {"prefill": 2})
    watch.look(looked_at(1, 1, prefill_0="running", decode_0=""), 100.0)
    watch.look(looked_at(9, 1, prefill_0="running", decode_0="", prefill_1="starting"), 101.0)
    watch.look(looked_at(9, 1, prefill_0="running", decode_0="", prefill_1="starting"), 105.0)
    watch.look(looked_at(9, 2, prefill_0="running", decode_0="", prefill_1="running"), 107.0)
    watch.look(looked_at(1, 1, prefill_0="stopping", decode_0="", prefill_1="running"), 109.0)
    switched = looked_at(1, 1, decode_0="", prefill_1="running")
    switched["nodes"][1]["role"] = "decode"
    watch.look(switched, 110.0)
    found = watch.result(0.9)
    assert found.node_hours * 3600 == 3 * 9 + 2
    assert (watch.most, watch.join_s, found.span_s) == (3, 4.0, 10.0)
    assert [(one.at_s, one.kind, one.role) for one in found.changes] == [
        *((1.0, ADD, "prefill"), (9.0, REMOVE, "prefill"), (10.0, SWITCH, "prefill"))
    ]
    assert [(one.began_s, one.ended_s) for one in found.shortages] == [(1.0, 7.0)]  # two are the most
    rows = {row.metric: row.value for row in behaviour("live", watch.join_s, found)}
    assert rows["role changes (switches)"] == pytest.approx(360)
    assert rows["from a burst to enough nodes"] == 6.0


@pytest.mark.slow
async def test_a_live_planned_cluster_is_compared_with_fixed_ones(tmp_path: Path) -> None:
    trace = written(tmp_path, bursts(1, per_s=2))
    options = ["--trace", str(trace), "--part", "live", "--quick"]
    found = await asyncio.to_thread(run, *options, file=tmp_path / "report.json")
    assert {"live, planned", "live, fixed: 1 prefill + 1 decode", "live, fixed: 2 prefill + 1 decode"} == set(
        found
    )
    for rows in found.values():
        assert rows["node-hours"]["value"] > 0
        assert rows["TTFT"]["value"] > 0
    assert found["live, fixed: 2 prefill + 1 decode"]["nodes at most"]["value"] == 3
    planned = found["live, planned"]
    assert {"role changes (switches)", "nodes added and removed", "prompts placed again"} <= planned.keys()
