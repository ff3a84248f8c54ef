"""``bench drill``: what it reads in timelines, answers and counters, and the command on a real cluster."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from click.testing import CliRunner

from moonpool.bench.cli import bench
from moonpool.bench.drill import gpu_stand_in
from moonpool.bench.drill.beside import Link
from moonpool.bench.drill.course import CapacityWatch, Course, FailureWatch
from moonpool.bench.drill.drills import DRILLS
from moonpool.bench.serve.client.answer import Answer
from moonpool.engine.device import selection
from moonpool.engine.node import node
from moonpool.runtime.config.loading import load_config
from moonpool.runtime.health import gpu
from moonpool.runtime.health.gpu import GpuWatch
from moonpool.runtime.reports import report


def event(name: str, unix_s: float, **facts: Any) -> dict[str, Any]:
    return {"event": name, "unix_s": unix_s, **facts}


def test_a_course_is_what_timelines_say_since_the_fault() -> None:
    course, lost = Course(), {"class": "node", "cause": "lost"}
    recovered = lost | {"contain_s": 0.5, "recover_s": 1.5, "recomputed_tokens": 7}
    events = [
        event("retry", 90.0, **lost),  # before the fault
        event("retry", 103.0, **lost),
        event("retry", 104.0, **lost | {"class": "rank"}),
        event("retry", 104.5, **lost | {"cause": "queue"}),  # nothing failed
        event("preempted", 104.6),
        event("recovered", 105.0, **recovered),
    ]
    course.add({"started_unix_s": 80.0, "events": events}, 100.0)
    assert (course.detect_s, course.contain_s, course.recover_s) == ([3.0], [0.5], [1.5])
    assert (course.num_failed_attempts, course.recomputed_tokens, course.preempted) == (2, 7, 1)
    assert course.num_recovered == 1
    assert course.classes == {"node": 1, "rank": 1}
    # A request that began after the fault has noticed it since it began.
    course.add({"started_unix_s": 109.0, "events": [event("retry", 111.0, **lost)]}, 100.0)
    assert course.detect_s == [3.0, 2.0]
    course.add({"request_id": "r", "api": {}}, 100.0)  # of one that was rejected at once
    assert course.detect_s == [3.0, 2.0]


def test_answers_are_lost_late_or_rejected() -> None:
    course = Course()
    course.count(
        [
            Answer(0.0, 9.0),  # before the fault
            Answer(5.0, 12.0),
            Answer(9.0, 19.5),
            Answer(11.0, 12.0, error="status 429: over a limit"),
            Answer(11.0, 12.0, error="status 504: too late"),
        ],
        fault_s=10.0,
        late_s=10.0,
    )
    assert (course.total, course.late, course.rejected, course.lost) == (4, 1, 1, 1)
    assert course.e2e_s == [7.0, 10.5]


async def test_the_index_is_away_of_processes_that_had_it() -> None:
    connected = {"mirror": 1, "publisher": 0}

    async def page(_: web.Request) -> web.Response:
        lines = [f"moonpool_index_{kind}_connected {value}.0" for kind, value in connected.items()]
        return web.Response(text="\n".join([*lines, ""]))

    app = web.Application()
    app.router.add_get("/metrics", page)
    async with TestServer(app) as server:
        watch = FailureWatch([str(server.make_url("/metrics"))])
        await watch.read()
        assert watch.has_index and not watch.without_index_s
        connected["mirror"] = 0
        await watch.read()
        assert not watch.has_index and watch.without_index_s
        connected["mirror"] = 1
        await watch.read()
        assert watch.has_index


async def test_counters_that_grow_tell_class_and_time() -> None:
    counts = {"store": 3.0, "request": 0.0}

    async def page(_: web.Request) -> web.Response:
        lines = [f'moonpool_failures_total{{cause="late",class="{name}"}} {n}' for name, n in counts.items()]
        return web.Response(text="\n".join([*lines, ""]))

    app = web.Application()
    app.router.add_get("/metrics", page)
    async with TestServer(app) as server:
        watch = FailureWatch([str(server.make_url("/metrics")), "http://127.0.0.1:9/metrics"])
        await watch.read()
        watch.forget()
        await watch.read()
        assert watch.first_s == {}
        counts["store"] = 1.0  # it was restarted
        await watch.read()
        assert watch.first_s == {}
        counts["store"] = 2.0
        await watch.read()
        assert watch.first_s.keys() == {("store", "late")}


def test_capacity_is_missing_while_a_node_takes_no_requests() -> None:
    def node(name: str, state: str = "ready", closes_in_s: float = 0.0) -> dict[str, Any]:
        return {"node_id": name, "state": state, "breaker_closes_in_s": closes_in_s}

    watch = CapacityWatch(None)  # type: ignore[arg-type]
    watch.see([node("a"), node("b"), node("c")], 10.0)
    watch.see([node("a"), node("b"), node("c")], 11.0)
    assert watch.missing_s == 0
    watch.see([node("a"), node("b", "unhealthy"), node("c", closes_in_s=0.2)], 11.5)
    watch.see([node("a"), node("d")], 12.0)  # two are gone, and another one is no replacement of them
    assert watch.missing_s == 2.0
    watch.see([node("a"), node("b"), node("c")], 13.0)
    assert watch.missing_s == 2.0


async def test_a_cut_link_is_silent_and_loses_nothing(tmp_path: Path) -> None:
    async def upper(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(100):
            writer.write(data.upper())
        writer.close()

    path = tmp_path / "socket"
    async with await asyncio.start_unix_server(upper, str(path)), Link.to(path) as link:
        reader, writer = await asyncio.open_connection("127.0.0.1", link.port)
        writer.write(b"one")
        assert await reader.readexactly(3) == b"ONE"
        link.cut()
        writer.write(b"two")
        answer = asyncio.ensure_future(reader.readexactly(3))
        _, late = await asyncio.open_connection("127.0.0.1", link.port)  # not refused
        done, _ = await asyncio.wait((answer,), timeout=0.05)
        assert not done
        link.join()
        assert await answer == b"TWO"
        late.close()
        writer.close()


def test_the_stand_in_of_a_gpu_is_lost_for_nvml_and_for_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in ((gpu, "pynvml"), (node, "gpu_uuids"), (selection, "CpuDevice")):
        monkeypatch.setattr(module, name, getattr(module, name))  # so that they come back
    nvml = gpu_stand_in.install()
    device = selection.CpuDevice()
    uuids = node.gpu_uuids(device.torch)
    watch = GpuWatch(uuids)
    assert not watch.read()[0].lost
    assert device.run(lambda: 3).wait() == 3
    nvml.lost = True
    assert watch.read()[0].lost == "GPU is lost"
    for use in (device.check, lambda: device.run(lambda: 3)):
        with pytest.raises(RuntimeError, match="CUDA error"):
            use()


@pytest.mark.parametrize("drill", DRILLS, ids=lambda drill: drill.name)
def test_both_arms_are_options_of_a_cluster_and_differ(drill: Any) -> None:
    (with_it, on, restarts), (without, off, never) = drill.arms()
    assert (with_it, without, never) == ("with", "without", False)
    assert load_config(None, on) != load_config(None, off) or restarts


@pytest.mark.slow
def test_a_node_is_killed_and_no_request_is_lost(tmp_path: Path) -> None:
    file = tmp_path / "drill.json"
    answer = CliRunner().invoke(bench, ["drill", "--quick", "--json", str(file)])
    assert answer.exit_code == 0, answer.output
    rows = {(row.case, row.metric): row.value for row in report.read(file).rows}
    assert rows["killed decode node, with", "lost requests"] == 0
    assert rows["killed decode node, with", "requests"] > 0
    failed = rows["killed decode node, without", "failed attempts"]
    assert rows["killed decode node, without", "lost requests"] == failed
