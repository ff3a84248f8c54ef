"""``moonpool bench transfer`` runs every path and writes a valid report."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from moonpool.bench.harness.peers import PeerAbsent, PeerFailed, peers_dir
from moonpool.bench.harness.sizes import size_name
from moonpool.bench.transfer import session
from moonpool.bench.transfer import shapes as shape
from moonpool.bench.transfer.command import transfer
from moonpool.bench.transfer.peers.perftest import bandwidth_of
from moonpool.bench.transfer.target_child import Target
from moonpool.runtime.config.conversion import to_size
from moonpool.runtime.config.options import TransferOptions
from moonpool.runtime.reports import report
from moonpool.transfer import TransferAgent, TransferError
from moonpool.transfer.native.cuda import load_cuda
from tests.transfer.device import use_stand_in

METRICS = ("bandwidth", "latency", "spans", "processor time")


def in_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "TURN_S", 0.01)
    monkeypatch.setattr(session, "_IDLE_S", 0.05)
    monkeypatch.setattr(session, "_NOTES", 20)


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["local", "shm", "tcp"])
def test_a_run_writes_its_figures(transport: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_a_moment(monkeypatch)
    path = tmp_path / "report.json"
    arguments = [
        "--transport",
        transport,
        "--block",
        "64KiB",
        "--batch",
        "8",
        "--rounds",
        "2",
        "--pool",
        "4MiB",
    ]
    result = CliRunner().invoke(transfer, [*arguments, "--json", str(path)], catch_exceptions=False)
    assert result.exit_code == 0
    content = json.loads(path.read_text())
    report.validate(content)
    rows = {(row["case"], row["metric"]): row for row in content["rows"]}
    for way in ("read", "write"):
        for checksum in ("on", "off"):
            row = rows[f"{transport}/64KiB/8/{way}/checksum-{checksum}", "bandwidth"]
            assert row["value"] > 0
            assert row["peer"] == ("raw sockets" if transport == "tcp" else "memcpy")
            assert row["ratio"] == pytest.approx(row["value"] / row["peer_value"])
            units = {rows[f"{transport}/64KiB/8/{way}/checksum-{checksum}", m]["unit"] for m in METRICS}
            assert units == {"GB/s", "µs", "spans/s", "s/GB"}
    assert (f"{transport}/note/64B" in {case for case, _ in rows}) == (transport != "local")


def test_small_batches_are_measured_beside_memcpy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_a_moment(monkeypatch)
    path = tmp_path / "report.json"
    arguments = ["--small", "--transport", "local", "--rounds", "1", "--pool", "4MiB", "--json", str(path)]
    result = CliRunner().invoke(transfer, arguments, catch_exceptions=False)
    assert result.exit_code == 0
    rows = [row for row in json.loads(path.read_text())["rows"] if row["metric"] == "bandwidth"]
    assert {row["peer"] for row in rows} == {"memcpy"}
    found = {row["case"].removesuffix("/checksum-on").removesuffix("/checksum-off") for row in rows}
    assert found == {f"local/{shape}/{way}" for shape in ("4KiB/1", "64KiB/16") for way in ("read", "write")}


@pytest.mark.parametrize("transport", ["cuda-ipc", "cuda-shm"])
def test_device_memory_is_measured_beside_copies_of_the_device(
    transport: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_a_moment(monkeypatch)
    use_stand_in(monkeypatch)
    path = tmp_path / "report.json"
    arguments = ["--transport", transport, "--block", "64KiB", "--batch", "8", "--rounds", "2"]
    more = ["--pool", "4MiB", "--json", str(path)]
    result = CliRunner().invoke(transfer, [*arguments, *more], catch_exceptions=False)
    assert result.exit_code == 0
    content = json.loads(path.read_text())
    report.validate(content)
    rows = {(row["case"], row["metric"]): row for row in content["rows"]}
    for case in ("read/checksum-on", "read/checksum-off", "write/checksum-off"):
        row = rows[f"{transport}/64KiB/8/{case}", "bandwidth"]
        assert row["value"] > 0
        assert row["peer"] == "cudaMemcpy"


def test_without_a_device_its_memory_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOONPOOL_CUDART", "/nowhere/libcudart.so.13")
    load_cuda.cache_clear()
    result = CliRunner().invoke(transfer, ["--memory", "cuda"])
    assert result.exit_code == 2
    assert "/nowhere/libcudart.so.13" in result.output


def test_sizes_have_names() -> None:
    for nbytes, name in ((4096, "4KiB"), (1 << 20, "1MiB"), (3 << 30, "3GiB"), (1000, "1000B")):
        assert size_name(nbytes) == name
        assert to_size(name) == nbytes
    result = CliRunner().invoke(transfer, ["--block", "lots"])
    assert result.exit_code != 0
    assert "64KiB" in result.output


@pytest.mark.parametrize(
    "arguments",
    [
        ["--block", "1MiB", "--batch", "0"],
        ["--block", "1MiB", "--parallel", "0"],
        ["--block", "0KiB"],
        ["--rounds", "0"],
        ["--batch", "5"],
        ["--contiguous"],
        ["--small", "--block", "4KiB"],
        ["--peer", "nobody"],
        ["--block", "1MiB", "--batch", "64", "--pool", "1MiB"],
    ],
)
def test_bad_usage_is_told_before_anything_starts(arguments: list[str]) -> None:
    result = CliRunner().invoke(transfer, arguments)
    assert result.exit_code == 2
    assert "Error: " in result.output


def test_blocks_of_parallel_batches_are_disjoint() -> None:
    for one in (shape.Shape(4096, 16, parallel=4), shape.Shape(4096, 16, scattered=False)):
        spans = one.spans(1, 1 << 20, 0)
        offsets = [offset for part in spans for offset in part.offset.tolist()]
        assert len(set(offsets)) == one.batch * one.parallel
        assert sum(part.total_nbytes for part in spans) == one.nbytes


async def test_a_target_that_cannot_return_notes_says_so_at_once() -> None:
    """It would never return one otherwise, and whoever measures notes would wait for it for ever."""
    gone = await TransferAgent.start(TransferOptions(transports=("tcp",)), agent_id="gone", epoch=1)
    await gone.close()
    target = Target("tcp", 1 << 20, streams=1, slice_nbytes=1 << 20, busy=False)
    await target.start()
    with pytest.raises(TransferError, match="gone"):
        await target.echo_to(gone.describe().pack().decode())
    await target.close()


# ---------------------------------------------------------------------- peers


@pytest.mark.parametrize("peer", ["mooncake", "nixl", "ucx_perftest"])
def test_an_absent_peer_is_a_sentence_with_the_command(
    peer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    result = CliRunner().invoke(transfer, ["--peer", peer])
    assert isinstance(result.exception, PeerAbsent)
    assert f"{peer} is not installed; this does it: " in str(result.exception)
    assert "install" in str(result.exception).partition("this does it")[2]


STAND_IN = """
import time
class TransferEngine:
    def initialize(self, host, metadata, protocol, device):
        print("what libraries say on stdout is not an answer")
        return (host, metadata, protocol) != ("127.0.0.1", "P2PHANDSHAKE", "tcp")
    def register_memory(self, address, nbytes):
        self.pool = range(address, address + nbytes)
        return 0
    def get_rpc_port(self):
        return 1
    def batch_transfer_sync_read(self, target, here, there, sizes):
        assert target == "127.0.0.1:1" and len(here) == len(there) == len(sizes) == 8
        assert all(address in self.pool for address in here)
        time.sleep(0.001)
        return 0
    def batch_transfer_sync_write(self, *_):
        return -1
"""


def install_stand_in(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package of Mooncake's name, with its calls and without its speed."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(home))
    python = peers_dir() / "mooncake" / "bin" / "python"
    python.parent.mkdir(parents=True)
    # Not a link: through one it would not find what is installed beside it.
    path = os.pathsep.join([str(home), *sys.path[1:]])
    python.write_text(f'#!/bin/sh\nPYTHONPATH={path} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    (home / "mooncake").mkdir()
    (home / "mooncake" / "__init__.py").touch()
    (home / "mooncake" / "engine.py").write_text(STAND_IN)


@pytest.mark.slow
def test_a_peer_moves_the_same_blocks_in_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_a_moment(monkeypatch)
    install_stand_in(tmp_path, monkeypatch)
    arguments = ["--transport", "tcp", "--block", "64KiB", "--batch", "8", "--rounds", "2", "--pool", "4MiB"]
    path = tmp_path / "report.json"
    arguments += ["--peer", "mooncake", "--direction"]
    result = CliRunner().invoke(transfer, [*arguments, "read", "--json", str(path)], catch_exceptions=False)
    assert result.exit_code == 0
    content = json.loads(path.read_text())
    report.validate(content)
    (row,) = [r for r in content["rows"] if r["metric"] == "bandwidth" and r["peer"] == "mooncake"]
    assert row["case"] == "tcp/64KiB/8/read/checksum-off"
    assert 0 < row["peer_value"] < 8 * (64 << 10) / 0.001 / 1e9
    # What goes wrong there is said here.
    with pytest.raises(PeerFailed, match="the transfer failed"):
        CliRunner().invoke(transfer, [*arguments, "write"], catch_exceptions=False)


def test_the_output_of_ucx_perftest_is_read() -> None:
    output = "iterations,50.0_percentile_lat,avg_lat,overall_lat,avg_bw,overall_bw,avg_mr,overall_mr\n"
    assert bandwidth_of(output + "2000,17.7,18.6,18.6,53000.00,2000.00,53636,53636\n") == 2000 * 2**20


PERFTEST = """#!/bin/sh
[ "$1" = -p ] && exec sleep 60
i=0; while [ $i -lt 20000 ]; do i=$((i + 1)); done
echo 2000,17.7,18.6,18.6,53000.00,2000.00,53636,53636
"""


def test_no_processor_time_is_told_of_ucx_perftest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_a_moment(monkeypatch)
    program = tmp_path / "ucx_perftest"
    program.write_text(PERFTEST)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    arguments = ["--transport", "shm", "--block", "64KiB", "--batch", "8", "--rounds", "1", "--pool", "4MiB"]
    arguments += ["--direction", "read", "--checksum", "off", "--peer", "ucx_perftest"]
    path = tmp_path / "report.json"
    result = CliRunner().invoke(transfer, [*arguments, "--json", str(path)], catch_exceptions=False)
    assert result.exit_code == 0
    rows = [row for row in json.loads(path.read_text())["rows"] if row.get("peer") == "ucx_perftest"]
    assert [(row["metric"], row["peer_value"]) for row in rows] == [("bandwidth", 2000 * 2**20 / 1e9)]
