"""Audit and usage lines: whole, bounded, and never in the way of what they tell."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from moonpool.protos import node_pb2, node_pb2_grpc
from moonpool.runtime import rpc
from moonpool.runtime.config.options import AuditOptions, SecurityOptions
from moonpool.runtime.errors import ConfigError
from moonpool.runtime.observing import audit, rotating_file
from moonpool.runtime.observing.rotating_file import QUEUED_LINES, RotatingFile
from moonpool.runtime.security import process
from moonpool.runtime.security.process import Security
from moonpool.runtime.security.roles import Caller

KEY = SecurityOptions(cluster_key="0123456789abcdef")


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that others keep busy gets every line, too."""
    monkeypatch.setattr(rotating_file, "_CLOSE_S", 60.0)


def lines_of(directory: Path, kind: str = "audit") -> list[dict[str, Any]]:
    """All lines, oldest first; each must be whole."""

    def age(file: Path) -> int:
        return 0 if file.suffix == ".jsonl" else int(file.suffix[1:])

    files = sorted(directory.glob(f"{kind}-*.jsonl*"), key=age, reverse=True)
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def test_a_line_tells_who_what_where_when_and_why(tmp_path: Path) -> None:
    with audit.audited(AuditOptions(path=str(tmp_path)), "node/1"):
        audit.refused("Node/Drain", "no token", origin="ipv4:10.0.0.9:4711", kind="Unauthenticated")
        audit.administrative("Node/Drain", "ok", who="operator me", origin="ipv6:[::1]:4711")
        audit.usage(tenant="acme", prompt_tokens=3, request_id="cmpl-1", model="m" * 1000)
    refused, drained = lines_of(tmp_path)
    assert refused.pop("time").endswith("Z")
    assert refused == {
        "process": "node/1",
        "event": "refused",
        "what": "Node/Drain",
        "origin": "ipv4:10.0.0.9:4711",
        "why": "no token",
    }
    assert (drained["event"], drained["who"], drained["outcome"]) == ("administrative", "operator me", "ok")
    (used,) = lines_of(tmp_path, "usage")
    assert (used["request_id"], used["prompt_tokens"], len(used["model"])) == ("cmpl-1", 3, 256)
    for file in tmp_path.glob("*.jsonl"):
        assert file.stat().st_mode & 0o777 == 0o600
        assert "/" not in file.name


def test_without_a_directory_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with audit.audited(AuditOptions(), "n"):
        audit.usage(tenant="acme")
        audit.refused("Node/Drain", "no token")
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_cannot_be_written_is_told_at_the_start() -> None:
    with (
        pytest.raises(ConfigError, match=r"audit\.path: /proc/none cannot be written"),
        audit.audited(AuditOptions(path="/proc/none"), "n"),
    ):
        pass


def test_files_rotate_and_their_number_is_bounded(tmp_path: Path) -> None:
    file = RotatingFile(tmp_path / "f.jsonl", 100, 3)
    for number in range(100):
        file.append(b"%029d\n" % number)
    file.close()
    names = {path.name: path.read_bytes().split() for path in tmp_path.iterdir()}
    assert names.keys() == {"f.jsonl", "f.jsonl.1", "f.jsonl.2"}
    kept = [int(line) for name in sorted(names, reverse=True) for line in names[name]]
    assert kept == list(range(100 - len(kept), 100))
    # A process that starts again goes on where the last one was.
    again = RotatingFile(tmp_path / "f.jsonl", 100, 3)
    again.append(b"%099d\n" % 7)
    again.close()
    assert (tmp_path / "f.jsonl").stat().st_size == 100
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names)


def test_a_file_that_was_removed_is_made_again(tmp_path: Path) -> None:
    file = RotatingFile(tmp_path / "f", 1 << 20, 2)
    file.append(b"1\n")
    (tmp_path / "f").unlink()
    file.append(b"2\n")
    file.close()
    assert (tmp_path / "f").read_bytes() == b"2\n"


def test_two_processes_of_one_name_have_a_file_each(tmp_path: Path) -> None:
    options = AuditOptions(path=str(tmp_path))
    with audit.audited(options, "conductor"):
        code = (
            "from moonpool.runtime.config.options import AuditOptions as O\n"
            "from moonpool.runtime.observing import audit, rotating_file\n"
            "rotating_file._CLOSE_S = 60.0\n"
            f"with audit.audited(O(path={str(tmp_path)!r}), 'conductor'): audit.administrative('x', 'ok')"
        )
        subprocess.run([sys.executable, "-c", code], check=True)
        audit.administrative("y", "ok")
    written = {path.name: json.loads(path.read_text())["what"] for path in tmp_path.glob("*.jsonl")}
    assert written == {"audit-conductor.jsonl": "y", "audit-conductor-2.jsonl": "x"}


def test_a_flood_of_refusals_is_counted_not_written(tmp_path: Path) -> None:
    with audit.audited(AuditOptions(path=str(tmp_path)), "n"):
        began_s = time.thread_time()
        for number in range(50_000):
            audit.refused("Node/Drain", "no token", origin=f"ipv4:10.0.{number % 150}.1:{number}")
        seconds = time.thread_time() - began_s
        audit.refused("Node/Drain", "another reason", origin="ipv4:10.9.9.9:1")
    lines = lines_of(tmp_path)
    assert len(lines) < 250
    more = sum(line["more"] for line in lines if line["event"] == "refused_more")
    assert more + sum(line["event"] == "refused" for line in lines) == 50_001
    assert seconds < 5, "0.1 ms each is 20 times what it takes"


def test_one_source_does_not_hide_another(tmp_path: Path) -> None:
    with audit.audited(AuditOptions(path=str(tmp_path)), "n"):
        for number in range(1000):
            audit.refused("Node/Drain", "no token", origin=f"ipv4:10.0.0.1:{number}", kind="k")
        audit.refused("Node/Drain", "no token", origin="ipv4:10.0.0.2:1", kind="k")
    assert "ipv4:10.0.0.2:1" in {line["origin"] for line in lines_of(tmp_path)}


_CHILD = """
import asyncio, resource, signal, sys, time
from pathlib import Path
from moonpool.runtime.config.options import AuditOptions
from moonpool.runtime.observing import audit, rotating_file

async def serve():
    for number in range(int(sys.argv[2])):
        audit.usage(number=number, tenant="t" * 200)
    longest = 0.0
    for number in range(100):  # the event loop, meanwhile
        began = time.monotonic()
        audit.administrative("Node/Drain", "ok")
        await asyncio.sleep(0.005)
        longest = max(longest, time.monotonic() - began)
    print(longest, flush=True)
    return longest
"""


def test_a_stalled_disk_delays_nobody_and_the_process_ends(tmp_path: Path) -> None:
    """The file is a pipe that nobody reads: a write to it never returns."""
    pipe = tmp_path / "usage-n.jsonl"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    code = (
        _CHILD
        + f"""
with audit.audited(AuditOptions(path={str(tmp_path)!r}), "n"):
    asyncio.run(serve())
"""
    )
    began_s = time.monotonic()
    child = subprocess.run(
        [sys.executable, "-c", code, "", str(3 * QUEUED_LINES)], capture_output=True, timeout=120, check=True
    )
    os.close(reader)
    assert float(child.stdout) < 10  # it would wait for ever; a busy machine may stand still for a while
    assert time.monotonic() - began_s < 100
    # The other file is on a disk that works.
    assert len(lines_of(tmp_path)) == 100


def test_a_full_disk_loses_no_line_that_fits_the_queue_and_tears_none(tmp_path: Path) -> None:
    code = (
        _CHILD
        + f"""
_, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
with audit.audited(AuditOptions(path={str(tmp_path)!r}), "n"):
    asyncio.run(serve())
    file = Path({str(tmp_path / "usage-n.jsonl")!r})
    rotating_file._CLOSE_S = 60.0
    # Where the disk has stood still the file is not there yet, or its last line is just being taken back.
    while not (file.exists() and (text := file.read_text()).endswith("\\n")):
        time.sleep(0.01)
    assert len(text) <= 100_000
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
"""
    )
    subprocess.run([sys.executable, "-c", code, "", str(2 * QUEUED_LINES)], timeout=120, check=True)
    lines = lines_of(tmp_path, "usage")
    numbers = [line["number"] for line in lines if "number" in line]
    assert numbers[:QUEUED_LINES] == list(range(QUEUED_LINES)), (
        "what waited is written, in order, without a gap"
    )
    # Where the thread wrote meanwhile, later ones found room.
    assert numbers == sorted(set(numbers))
    lost = [line["lines"] for line in lines if line["event"] == "lost"]
    assert sum(lost) + len(numbers) == 2 * QUEUED_LINES


class Node(node_pb2_grpc.NodeServicer):
    async def Drain(self, request: node_pb2.DrainRequest, context: object) -> node_pb2.DrainReply:
        return node_pb2.DrainReply()

    async def Status(self, request: node_pb2.StatusRequest, context: object) -> node_pb2.NodeStatus:
        return node_pb2.NodeStatus()

    async def Evict(self, request: node_pb2.EvictRequest, context: object) -> node_pb2.EvictReply:
        process.require("operator")
        return node_pb2.EvictReply()


async def test_calls_that_change_or_are_refused_have_a_line_and_others_have_none(tmp_path: Path) -> None:
    with audit.audited(AuditOptions(path=str(tmp_path)), "n"):
        process.use(Security(KEY, Caller("node", "n")))
        server, port = await rpc.serve([(node_pb2_grpc.add_NodeServicer_to_server, Node())], "127.0.0.1", 0)

        async def calls(options: SecurityOptions, role: str) -> None:
            process.use(Security(options, Caller(role, "me"), serves=False))
            async with rpc.channel(f"127.0.0.1:{port}") as channel:
                stub = node_pb2_grpc.NodeStub(channel)
                drain, status, evict = (
                    node_pb2.DrainRequest(),
                    node_pb2.StatusRequest(),
                    node_pb2.EvictRequest(),
                )
                await asyncio.gather(
                    stub.Drain(drain), stub.Status(status), stub.Evict(evict), return_exceptions=True
                )

        await calls(SecurityOptions(), "operator")
        await calls(KEY, "operator")
        await calls(KEY, "conductor")
        await server.stop(None)
    lines = [(line["event"], line.get("who", ""), line["what"]) for line in lines_of(tmp_path)]
    assert sorted(lines) == [
        ("administrative", "conductor me", "Node/Drain"),
        ("administrative", "operator me", "Node/Drain"),
        ("administrative", "operator me", "Node/Evict"),
        ("refused", "", "Node/Drain"),
        ("refused", "", "Node/Evict"),
        ("refused", "", "Node/Status"),
        ("refused", "conductor me", "Node/Evict"),
    ]
    text = (tmp_path / "audit-n.jsonl").read_text()
    assert KEY.cluster_key not in text
    assert "ipv4:127.0.0.1:" in text
