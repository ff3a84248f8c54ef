"""A node of several replicas: start, drain, restarts and end."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import signal
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from moonpool.runtime.config.options import Config, EventsOptions, ModelOptions, NodeOptions, ParallelOptions
from moonpool.runtime.errors import ConfigError
from moonpool.runtime.machine import gpus
from moonpool.runtime.replicas.group import replica_configs
from moonpool.runtime.replicas.identity import Replica
from moonpool.runtime.replicas.metrics_page import merged
from tests.forked import PipedProcess, start_module
from tests.processes import children_of

MODULE = "tests.runtime.replica_node"


class Node:
    def __init__(self, process: PipedProcess, log: Path) -> None:
        self.process = process
        self._log = log

    def ready(self) -> dict[str, Any]:
        ready: dict[str, Any] = json.loads(self.process.stdout.readline())
        return ready

    def replicas(self) -> dict[str, psutil.Process]:
        """The processes there are, by name."""
        found = {}
        for process in children_of(self.process.pid):
            if name := re.search(r"node\.id=(\S+)", " ".join(process.cmdline())):
                found[name[1]] = process
        return found

    def end(self) -> tuple[int, str]:
        """Its exit code and what it and its replicas logged."""
        return self.process.wait(90), self._log.read_text()


@contextmanager
def node(tmp_path: Path, name: str, *options: str, forked: bool = True) -> Iterator[Node]:
    sets = [f"--set={option}" for option in (f"node.id={name}", "engine.parallel.dp=2", *options)]
    environment = {**os.environ, "TOLD": str(tmp_path / "told")}
    file = tmp_path / f"{name}.log"
    with (
        file.open("wb") as log,
        start_module(MODULE, *sets, environment=environment, stderr=log.fileno(), forked=forked) as process,
    ):
        try:
            yield Node(process, file)
        finally:
            process.kill()


def until(holds: Callable[[], object]) -> None:
    for _ in range(6000):
        if holds():
            return
        time.sleep(0.01)
    pytest.fail("not within 60 s")


def page(url: str) -> str:
    with urllib.request.urlopen(url, timeout=60) as answer:
        return str(answer.read().decode())


def test_group_is_ready_once_and_drains_together(tmp_path: Path) -> None:
    with node(tmp_path, "n", "security.cluster_key=hush, 16 of them") as running:
        ready = running.ready()
        assert ready["node_id"] == "n"
        assert [one["node_id"] for one in ready["replicas"]] == ["n.0", "n.1"]
        assert {one["secret"] for one in ready["replicas"]} == {"hush, 16 of them"}
        replicas = running.replicas()
        assert replicas.keys() == {"n.0", "n.1"}
        assert "hush" not in "".join(map(str, (process.cmdline() for process in replicas.values())))
        running.process.send_signal(signal.SIGTERM)
        code, log = running.end()
    assert code == 0
    assert "drained n.0" in log
    assert "drained n.1" in log


def test_dead_replica_is_restarted(tmp_path: Path) -> None:
    with node(tmp_path, "n") as running:
        url = running.ready()["metrics_url"]
        before = running.replicas()
        before["n.1"].kill()
        until(lambda: 'moonpool_replica_starts_total{replica="1"} 2.0' in page(url))
        until(lambda: "moonpool_replicas_ready 2.0" in page(url))
        after = running.replicas()
        assert after["n.0"].pid == before["n.0"].pid
        assert after["n.1"].pid != before["n.1"].pid
        running.process.send_signal(signal.SIGTERM)
        code, log = running.end()
    assert code == 0
    assert "replica n.1 ended by signal 9 and is restarted" in log


def test_silent_replica_is_restarted_and_busy_replica_is_not(tmp_path: Path) -> None:
    with node(tmp_path, "busy", "engine.parallel.timeout_s=2.5") as running:
        url = running.ready()["metrics_url"]
        before = running.replicas()
        before["busy.1"].suspend()
        began_s = time.monotonic()
        before["busy.1"].wait(timeout=60)
        assert 2.4 < time.monotonic() - began_s < 30  # twenty looks, late ones on a busy machine
        until(lambda: "moonpool_replicas_ready 2.0" in page(url))
        assert 'moonpool_replica_starts_total{replica="1"} 2.0' in page(url)
        # Longer than the bound, and nobody was found silent.
        time.sleep(max(0, began_s + 5 - time.monotonic()))
        assert running.replicas()["busy.0"].pid == before["busy.0"].pid
        running.process.send_signal(signal.SIGTERM)
        code, log = running.end()
    assert code == 0
    assert "replica busy.1 has been silent for 2.5 s and is killed" in log
    assert "replica busy.1 ended by signal 9 and is restarted" in log
    assert re.search(r"replica busy\.1 serves again \d+\.\d\d s after its start", log)
    assert "busy.0 has been silent" not in log


@pytest.mark.slow
def test_replica_silent_before_ready_ends_the_node(tmp_path: Path) -> None:
    with node(tmp_path, "slow", "engine.parallel.start_timeout_s=5") as running:
        until(lambda: running.replicas().keys() == {"slow.0", "slow.1"})
        running.replicas()["slow.1"].suspend()
        code, log = running.end()
    assert code == 1
    assert "replica slow.1 has been silent for 5 s and is killed" in log
    assert "replica slow.1 ended by signal 9 before it was ready" in log


def test_replicas_die_with_the_node(tmp_path: Path) -> None:
    with node(tmp_path, "n", forked=False) as running:
        running.ready()
        replicas = list(running.replicas().values())
        running.process.kill()
        _, alive = psutil.wait_procs(replicas, timeout=60)
        assert all(process.status() == psutil.STATUS_ZOMBIE for process in alive)


def test_crash_loop_ends_the_node(tmp_path: Path) -> None:
    with node(tmp_path, "short") as running:
        code, log = running.end()
    assert code == 1
    assert "5 times in a row within 10 s of getting ready" in log
    assert "the other replicas drain and the node ends" in log


def test_rejected_options_end_the_node(tmp_path: Path) -> None:
    with node(tmp_path, "refused") as running:
        code, log = running.end()
    assert code == 2
    assert "no, not like this" in log
    assert "replica refused.1 rejected its options" in log


def test_drain_of_one_replica_drains_all(tmp_path: Path) -> None:
    with node(tmp_path, "told") as running:
        running.ready()
        (tmp_path / "told").touch()
        code, log = running.end()
    assert code == 0
    assert "drained told.0" in log
    assert "drained told.1" in log


def test_the_first_signal_ends_a_start_and_the_second_a_drain(tmp_path: Path) -> None:
    with node(tmp_path, "slow") as running:
        until(lambda: running.replicas().keys() == {"slow.0", "slow.1"})
        running.process.send_signal(signal.SIGTERM)
        assert running.end()[0] == 0
    with node(tmp_path, "stuck") as running:
        running.ready()
        replicas = list(running.replicas().values())
        running.process.send_signal(signal.SIGTERM)
        psutil.wait_procs(replicas[:1], timeout=60)
        running.process.send_signal(signal.SIGTERM)
        assert running.end()[0] == 1
        assert not any(process.is_running() for process in replicas)


@pytest.mark.slow  # It waits for the whole grace time.
def test_replica_that_does_not_drain_is_killed(tmp_path: Path) -> None:
    with node(tmp_path, "n", "node.drain_s=0", "store.flush_s=0") as running:
        running.ready()
        replicas = running.replicas()
        replicas["n.1"].suspend()
        running.process.send_signal(signal.SIGTERM)
        code, log = running.end()
        assert not replicas["n.1"].is_running()
    assert code == 1
    assert "replica n.1 did not end within 10 s of the request to drain" in log


def test_metrics_pages_are_merged() -> None:
    text = '# HELP a_total As\n# TYPE a_total counter\na_total{kind="x"} 1.0\n'
    (family,) = merged({0: text, 1: text})
    assert [sample.labels for sample in family.samples] == [
        {"kind": "x", "replica": "0"},
        {"kind": "x", "replica": "1"},
    ]
    assert list(merged({0: ""})) == []
    assert [family.type for family in text_string_to_metric_families(text)] == [family.type]


def config(device: str = "cpu", *, port: int = 0, **parallel: Any) -> Config:
    whole = Config()
    return replace(
        whole,
        model=ModelOptions(device=device),
        engine=replace(whole.engine, parallel=ParallelOptions(**parallel)),
        node=NodeOptions(id="n", port=port),
        events=EventsOptions(zmq_endpoint="tcp://*:5557", replay_endpoint="ipc://replay"),
    )


def test_replica_configs() -> None:
    told = replica_configs(config(port=7000, dp=3))
    assert [one.node.id for one in told] == ["n.0", "n.1", "n.2"]
    assert [one.node.port for one in told] == [7000, 7001, 7002]
    assert [one.events.zmq_endpoint for one in told] == ["tcp://*:5557", "tcp://*:5558", "tcp://*:5559"]
    assert told[1].events.replay_endpoint == "ipc://replay_dp1"
    assert {one.engine.parallel.dp for one in told} == {1}
    told = replica_configs(config(dp=2, pp=2, hosts=2, listen="10.0.0.1:7400"))
    assert [one.engine.parallel.listen for one in told] == ["10.0.0.1:7400", "10.0.0.1:7401"]
    with pytest.raises(ConfigError, match=r"node\.port is 65535, but 2 replicas need 2 ports"):
        replica_configs(config(port=65535, dp=2))


def test_gpus_of_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "num_gpus", lambda: 8)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.13.0")
    told = replica_configs(config("auto", dp=2, tp=2, pp=2))
    assert [one.model.device for one in told] == ["cuda:0", "cuda:4"]
    told = replica_configs(config("cuda:5", dp=3))
    assert [one.model.device for one in told] == ["cuda:5", "cuda:6", "cuda:7"]
    with pytest.raises(ConfigError, match=r"needs 12 GPUs from cuda:0 on, there are 8: .* at most 2"):
        replica_configs(config("cuda", dp=3, tp=4))


def test_replica_identity_from_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Replica.ours() is None
    replica = Replica("n", 1, 2, 17, "http://here/metrics", start_number=3)
    for name, value in replica.environment().items():
        monkeypatch.setenv(name, value)
    assert Replica.ours() == replica
    assert replica.replica_id == "n.1"
