"""``bench chaos``: what its load counts, how it cuts connections, and the command against a real cluster."""

from __future__ import annotations

import asyncio
import random
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from moonpool.bench.chaos.faults import FaultFailed, command_faults
from moonpool.bench.chaos.load import Counts, KnownLoad
from moonpool.bench.chaos.sockets import cut_connections
from moonpool.bench.cli import bench
from moonpool.bench.serve.client.http_client import HttpClient
from moonpool.bench.serve.client.server import RequestFailed, Server
from moonpool.runtime.reports import report
from tests.bench.fake_server import FakeServer
from tests.forked_command import forked_command

_CONNECTS = """
import socket, sys
connections = [socket.create_connection(("127.0.0.1", int(port))) for port in sys.argv[1:]]
print("connected", flush=True)
print([connection.recv(1) for connection in connections], flush=True)
"""


async def test_answers_are_counted_by_what_became_of_them(fake: FakeServer) -> None:
    async with HttpClient(fake.url) as http:
        load, counts = KnownLoad(await Server.find("fake", http), 1, hung_after_s=60.0), Counts()
        await load.learn()
        await load.run_once(counts)
        assert counts.same == counts.total == len(counts.ttft_s) > 0
        number = counts.total
        fake.first_id = 8
        await load.run_once(counts)
        assert len(counts.different) == number
        fake.failing = True
        await load.run_once(counts)
        assert counts.errors.total() == number
        assert "too many" in next(iter(counts.errors))
        impatient, hung = KnownLoad(load.server, 1, hung_after_s=0.01), Counts()
        fake.failing, fake.hanging = False, True
        await impatient.run_once(hung)
        assert hung.hung == hung.total == number


async def test_a_server_whose_answers_vary_without_a_fault_is_refused(fake: FakeServer) -> None:
    fake.step = 1
    async with HttpClient(fake.url) as http:
        load = KnownLoad(await Server.find("fake", http), 1, hung_after_s=60.0)
        with pytest.raises(RequestFailed, match="two answers to one prompt"):
            await load.learn()


def test_cut_connections_end_on_both_sides_and_others_stay() -> None:
    with socket.create_server(("127.0.0.1", 0)) as cut, socket.create_server(("127.0.0.1", 0)) as kept:
        ports = [str(server.getsockname()[1]) for server in (cut, kept)]
        command = [sys.executable, "-c", _CONNECTS, *ports]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None
            accepted, other = cut.accept()[0], kept.accept()[0]
            assert child.stdout.readline() == "connected\n"
            port = other.getpeername()[1]
            assert cut_connections(child.pid, except_port=port) == 1
            assert accepted.recv(1) == b""
            other.sendall(b"x")
            assert child.stdout.readline() == "[b'', b'x']\n"
            accepted.close()
            other.close()


async def test_a_command_is_a_fault_and_its_failure_is_told(tmp_path: Path) -> None:
    faults = command_faults({"touch": f"touch {tmp_path}/done", "wrong": "exit 3"})
    await faults["touch"](random.Random(0))
    assert (tmp_path / "done").exists()
    with pytest.raises(FaultFailed, match="'wrong' ended with code 3"):
        await faults["wrong"](random.Random(0))


@pytest.mark.parametrize("options", [["--url", "http://127.0.0.1:1"], ["--fault", "name"]])
def test_wrong_options_are_refused(options: list[str]) -> None:
    answer = CliRunner().invoke(bench, ["chaos", *options])
    assert answer.exit_code != 0
    assert "NAME=COMMAND" in str(answer.exception) + answer.output


@pytest.mark.slow
async def test_a_different_answer_makes_the_exit_status_1(fake: FakeServer, tmp_path: Path) -> None:
    file = tmp_path / "chaos.json"
    marker = tmp_path / "fault"

    async def disturb() -> None:
        while not marker.exists():  # noqa: ASYNC110  another process makes it
            await asyncio.sleep(0.01)
        fake.first_id = 9

    disturbing = asyncio.create_task(disturb())
    options = ["--url", fake.url, "--fault", f"touch=touch {marker}", "--seconds", "1", "--json", str(file)]
    process = await asyncio.create_subprocess_exec(*forked_command("moonpool"), "bench", "chaos", *options)
    assert await process.wait() == 1
    await disturbing
    rows = {row.metric: row.value for row in report.read(file).rows}
    assert rows["different texts"] > 0
    assert rows["not the same after the last fault"] > 0
    assert rows["hung requests"] == rows["blocks of pools left in use"] == 0


@pytest.mark.slow
def test_a_local_cluster_survives_ten_seconds_of_faults(tmp_path: Path) -> None:
    file = tmp_path / "chaos.json"
    answer = CliRunner().invoke(bench, ["chaos", "--quick", "--seed", "3", "--json", str(file)])
    assert answer.exit_code == 0, answer.output
    rows = {row.metric: row.value for row in report.read(file).rows}
    assert rows["same texts"] > 0
    assert sum(value for metric, value in rows.items() if metric.startswith("fault: ")) > 0
