"""``moonpool bench transfer`` runs every path and writes a valid report."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from bench import report
from bench.transfer import session, shape
from bench.transfer.command import transfer


@pytest.mark.parametrize("transport", ["local", "shm", "tcp"])
def test_a_run_writes_its_figures(transport: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "_ROUND_S", 0.01)
    monkeypatch.setattr(session, "_IDLE_S", 0.05)
    monkeypatch.setattr(session, "_NOTES", 20)
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
    assert (f"{transport}/note/64B" in {case for case, _ in rows}) == (transport != "local")


def test_sizes_have_names() -> None:
    for nbytes, name in ((4096, "4KiB"), (1 << 20, "1MiB"), (3 << 30, "3GiB"), (1000, "1000B")):
        assert shape.size_name(nbytes) == name
        assert shape.size_of(name) == nbytes
    result = CliRunner().invoke(transfer, ["--block", "lots"])
    assert result.exit_code != 0
    assert "64KiB" in result.output


def test_blocks_of_parallel_batches_are_disjoint() -> None:
    for one in (shape.Shape(4096, 16, parallel=4), shape.Shape(4096, 16, scattered=False)):
        spans = one.spans(1, 1 << 20, 0)
        offsets = [offset for part in spans for offset in part.offset.tolist()]
        assert len(set(offsets)) == one.batch * one.parallel
        assert sum(part.total_nbytes for part in spans) == one.nbytes
