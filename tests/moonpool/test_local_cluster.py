"""What a local cluster does about children that end."""

from __future__ import annotations

import asyncio
import shutil
import sys
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from moonpool.conductor.fleet.providers.provider import FAILED
from moonpool.errors import TooLittleMemory
from moonpool.local import children, preflight
from moonpool.local import cluster as cluster_module
from moonpool.local.cluster import LocalCluster
from moonpool.local.elastic_nodes import NodeNotSupplied
from moonpool.runtime.config.engine_options import shipped
from moonpool.runtime.config.options import ClusterOptions, Config, ModelsOptions
from moonpool.runtime.errors import ChildFailed
from moonpool.runtime.security import certificates
from moonpool.runtime.security.https import CA_VARIABLE, HttpsServer
from moonpool.runtime.security.roles import CONDUCTOR, Caller
from moonpool.runtime.service import crash_loop
from moonpool.runtime.service.child import Child
from moonpool.runtime.service.vital import cancel_and_wait


async def test_a_child_is_started_again_unless_it_fails_soon_after_each_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However often in its life; five times in a row, each soon after its start, is too often."""
    said: list[str] = []
    cluster = LocalCluster(Config(), directory=tmp_path, restart=True, report=said.append)
    program = "import os; print('{}', flush=True); os.read(0, 1) or os._exit(3)"
    child = Child("decode-0", [sys.executable, "-S", "-c", program], tmp_path / "log", sends_json=True)
    cluster.children["decode-0"] = child

    def num_starts() -> int:
        return sum("is ready" in sentence for sentence in said)

    monkeypatch.setattr(crash_loop, "MIN_UPTIME_S", 0.0)  # each life was long
    await cluster._start_child(child)
    cluster._start_watching("decode-0")
    async with asyncio.timeout(120):
        while num_starts() < 7:  # noqa: ASYNC110 (processes decide)
            await asyncio.sleep(0.01)
        monkeypatch.setattr(crash_loop, "MIN_UPTIME_S", 1e9)
        await cluster._watchers["decode-0"]
    assert "is not started again" in said[-1]
    assert num_starts() <= 7 + crash_loop.MAX_SHORT_RUNS + 1


async def test_a_node_that_cannot_be_started_again_is_given_up_and_the_cluster_serves_on(
    tmp_path: Path,
) -> None:
    said: list[str] = []
    directory = tmp_path / "logs"
    directory.mkdir()
    cluster = LocalCluster(Config(), directory=directory, restart=True, report=said.append)
    command = [sys.executable, "-S", "-c", "import signal; print('{}', flush=True); signal.pause()"]
    child = Child("decode-0", command, directory / "log", sends_json=True)
    cluster._elastic._add(child, "tiny", "decode")
    try:
        await cluster._start_child(child)
        cluster._start_watching("decode-0")
        shutil.rmtree(directory)
        child.kill()
        async with asyncio.timeout(60):
            await asyncio.wait((cluster._watchers["decode-0"],))
        assert not cluster._broken.done()
        assert cluster._elastic._as_supplied(child).state == FAILED
        assert f"decode-0 was not started: [Errno 2] No such file or directory: '{directory}/log'" in said
    finally:
        await cluster.stop()


async def test_a_node_that_is_given_up_leaves_its_place_to_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a_node.py").write_text("import signal; print('{}', flush=True); signal.pause()")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(children, "computes_on_gpus", lambda config: 2)
    config = replace(Config(), cluster=ClusterOptions(prefill=1, decode=1, most=2))
    cluster = LocalCluster(config, directory=tmp_path)
    nodes = cluster._elastic
    made = children.Children(config, tmp_path, lambda name, done, total: None, node_module="a_node")
    nodes.begin(config, {"tiny": made}, supervises=True)
    try:
        for child in nodes.nodes:
            await cluster._start_child(child)
        with pytest.raises(children.NoRoom):
            await nodes.start_node("decode")
        nodes.children["decode-0"].kill()
        await cluster._watch("decode-0")
        assert {node.node_id: node.state for node in nodes.supplied()}["decode-0"] == FAILED
        for number in range(5, 30):  # replacements that do not start either
            nodes._roles[f"decode-{number}"], nodes._model_of[f"decode-{number}"] = "decode", "tiny"
            nodes.gave_up(f"decode-{number}", "it did not start")
        assert {node.node_id: node.state for node in nodes.supplied()}["decode-0"] == FAILED
        assert await nodes.start_node("decode") == "decode-1"
        assert "model.device=cuda:1" in nodes.children["decode-1"]._command
        with pytest.raises(children.NoRoom):
            await nodes.start_node("decode")
    finally:
        await cluster.stop()


async def test_a_node_that_ends_while_it_starts_and_is_stopped_breaks_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a_node.py").write_text("import signal; signal.pause()")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    config = replace(Config(), cluster=ClusterOptions(prefill=1, decode=1))
    cluster = LocalCluster(config, directory=tmp_path)
    nodes = cluster._elastic
    made = children.Children(config, tmp_path, lambda name, done, total: None, node_module="a_node")
    nodes.begin(config, {"tiny": made}, supervises=True)
    try:
        for turn in range(9):
            name = await nodes.start_node("decode")
            (child := nodes.children[name]).kill()
            while child.returncode is None:  # noqa: ASYNC110
                await asyncio.sleep(0)
            for _ in range(turn % 3):
                await asyncio.sleep(0)
            with suppress(NodeNotSupplied):
                nodes.stop_node(name)
            while nodes._changes:
                await asyncio.wait(nodes._changes)
            await asyncio.sleep(0)
            assert not cluster._broken.done(), cluster._broken.exception()
            assert name not in nodes.children and name not in nodes._ending
    finally:
        await cluster.stop()


class LateChild(Child):
    """Its process is started once ``may_start`` is set, or fails to start."""

    def __init__(self, directory: Path, *, fails: bool) -> None:
        program = "import signal; signal.pause()"
        command = [sys.executable, "-S", "-c", program]
        super().__init__("decode-0", command, directory / "log", sends_json=True)
        self.starts, self.may_start = asyncio.Event(), asyncio.Event()
        self._fails = fails

    async def start(self) -> None:
        self.starts.set()
        await self.may_start.wait()
        if self._fails:
            raise OSError("no process")
        await super().start()


@pytest.mark.parametrize("fails", [False, True])
async def test_a_node_that_is_stopped_before_its_process_runs_does_not_run_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    config = replace(Config(), planner=replace(Config().planner, min_warm=0))
    cluster = LocalCluster(config, directory=tmp_path)
    nodes, child = cluster._elastic, LateChild(tmp_path, fails=fails)
    made = children.Children(config, tmp_path, lambda name, done, total: None)
    monkeypatch.setattr(made, "another", lambda role, live, settings: child)
    nodes.begin(config, {"tiny": made}, supervises=True)
    try:
        starting = asyncio.create_task(nodes.start_node("decode"))
        await child.starts.wait()
        nodes.stop_node("decode-0")
        await asyncio.wait(nodes._changes)
        child.may_start.set()
        (error,) = await asyncio.gather(starting, return_exceptions=True)
        assert not nodes.children
        assert (child.returncode is None) == fails, "its process runs"
        assert isinstance(error, OSError if fails else NodeNotSupplied)
    finally:
        await child.stop(0.0)
        await cluster.stop()


async def test_the_pools_of_all_models_together_must_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = replace(
        Config(),
        cluster=ClusterOptions(prefill=0, decode=0, both=1),
        engine=replace(Config().engine, pool_nbytes=300 << 20),
        models=ModelsOptions(served=("a=", f"b={shipped('small')}")),
        conductor=replace(Config().conductor, port=0),
    )
    monkeypatch.setattr(preflight, "available_nbytes", lambda: 500 << 20)
    cluster = LocalCluster(config, directory=tmp_path)
    try:
        with pytest.raises(TooLittleMemory):
            await cluster.start()
    finally:
        await cluster.stop()


@pytest.mark.parametrize("serves", [True, False])
async def test_a_first_node_that_is_stopped_while_the_cluster_starts_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, serves: bool
) -> None:
    says = "True" if serves else "'decode' not in sys.argv"
    program = f"import signal, sys; {says} and print('{{}}', flush=True); signal.pause()"
    (tmp_path / "a_node.py").write_text(program)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    config, said = replace(Config(), cluster=ClusterOptions(prefill=1, decode=1)), list[str]()
    cluster = LocalCluster(config, directory=tmp_path, report=said.append)
    nodes = cluster._elastic
    made = children.Children(config, tmp_path, lambda name, done, total: None, node_module="a_node")

    def started() -> bool:
        return "decode-0" in cluster.children and cluster.children["decode-0"]._process is not None

    async def nothing() -> None: ...

    async def create_children() -> None:
        nodes.begin(config, {"tiny": made}, supervises=True)
        command = [sys.executable, "-S", "-c", "import signal; print('{}', flush=True); signal.pause()"]
        cluster.children["conductor"] = Child("conductor", command, tmp_path / "c", sends_json=True)

    async def seen(client: object) -> set[str]:
        return {"prefill-0"}

    monkeypatch.setattr(cluster, "_start_redis", nothing)
    monkeypatch.setattr(cluster, "_create_children", create_children)
    monkeypatch.setattr(cluster, "_seen", seen)
    monkeypatch.setattr(cluster, "client", nullcontext)
    starting = asyncio.create_task(cluster.start())
    try:
        async with asyncio.timeout(120):
            while not (any("decode-0 is ready" in one for one in said) if serves else started()):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            nodes.stop_node("decode-0")
            await starting
        assert set(cluster._watchers) == {"conductor", "prefill-0"}
    finally:
        await cancel_and_wait(starting)
        await cluster.stop()


async def test_a_node_that_is_added_while_the_cluster_starts_ends_when_it_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has one watcher, so that nothing starts it again."""
    said: list[str] = []
    config = replace(Config(), planner=replace(Config().planner, min_warm=0))
    cluster = LocalCluster(config, directory=tmp_path, restart=True, report=said.append)
    nodes = cluster._elastic
    program = "import signal; print('{}', flush=True); signal.pause()"
    children_of = [sys.executable, "-S", "-c", program]
    made = children.Children(config, tmp_path, lambda name, done, total: None)
    added = Child("decode-0", children_of, tmp_path / "log", sends_json=True)
    monkeypatch.setattr(made, "another", lambda role, live, settings: added)

    async def nothing() -> None: ...

    async def create_children() -> None:
        cluster.children["conductor"] = Child("conductor", children_of, tmp_path / "c", sends_json=True)
        nodes.begin(config, {"tiny": made}, supervises=True)

    async def wait_joined(first: object, away: object) -> None:
        await nodes.start_node("decode")
        while nodes._changes:
            await asyncio.wait(nodes._changes)

    monkeypatch.setattr(cluster, "_start_redis", nothing)
    monkeypatch.setattr(cluster, "_create_children", create_children)
    monkeypatch.setattr(cluster, "_wait_joined", wait_joined)
    await cluster.start()
    try:
        nodes.stop_node("decode-0")
        while nodes._changes:
            await asyncio.wait(nodes._changes)
        for _ in range(10):
            await asyncio.sleep(0)
        assert added.returncode is not None
        assert set(cluster._watchers) == {"conductor"}
        assert not any("starting it again" in sentence for sentence in said)
    finally:
        await cluster.stop()


async def test_a_conductor_that_does_not_answer_at_first_is_told_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its certificate may not name this machine."""
    monkeypatch.setattr(cluster_module, "JOIN_TIMEOUT_S", 1.0)
    monkeypatch.setenv(CA_VARIABLE, str(tmp_path / "ca.pem"))
    certificates.init(tmp_path, days=1)
    cert = certificates.issue(tmp_path, Caller(CONDUCTOR, "c"), days=1, addresses=["conductor.example"])
    served = HttpsServer(str(cert), str(cert.with_suffix(".key")))
    cluster = LocalCluster(Config(), directory=tmp_path)
    command = [sys.executable, "-S", "-c", "import signal; print('{}', flush=True); signal.pause()"]
    for name in ("conductor", "prefill-0"):
        child = Child(name, command, tmp_path / f"{name}.log", sends_json=True)
        cluster._elastic._add(child, "tiny", name.partition("-")[0])
    try:
        for child in cluster.children.values():
            await cluster._start_child(child)
        server = TestServer(web.Application(), scheme="https")
        await server.start_server(ssl=served.context)
        try:
            cluster.children["conductor"].ready["url"] = f"https://127.0.0.1:{server.port}"
            with pytest.raises(ChildFailed) as failed:
                await cluster._wait_joined(["conductor", "prefill-0"], ())
        finally:
            await server.close()
        assert "did not see prefill-0 within 1 s: https://127.0.0.1" in str(failed.value)
        assert "certificate is not valid for '127.0.0.1'" in str(failed.value)
        assert "moonpool certs issue --address" in str(failed.value)
    finally:
        await cluster.stop()
