"""``moonpool bench store`` measures what it says, and says what is missing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from moonpool.bench.harness.peers import PeerAbsent
from moonpool.bench.store.command import store
from moonpool.runtime.reports import report


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(store, arguments)
    return result.exit_code, result.output


@pytest.mark.slow
def test_every_figure_has_its_limit_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    options = [*("--part", "host", "--cases", "disk", "--block", "64KiB", "--total", "4MiB")]
    options += ["--rounds", "1", "--directory", str(tmp_path), "--json", str(path)]
    code, output = run(*options)
    assert code == 0, output
    content = json.loads(path.read_text())
    report.validate(content)
    assert content["environment"]["command"] == f"moonpool bench store {' '.join(options)}"
    beside = {(row["case"].split(",")[0], row.get("peer")) for row in content["rows"]}
    assert {("host put", "memcpy"), ("host verified get", "memcpy")} <= beside
    assert {("disk put", "raw disk"), ("disk get", "raw disk")} <= beside
    limits = {row["metric"]: row["limit_value"] for row in content["rows"] if "limit" in row}
    assert limits == {"time a block beside memcpy": 20.0}
    assert [entry.name for entry in tmp_path.iterdir()] == ["report.json"], "something was left on the disk"


@pytest.mark.slow
def test_objects_of_a_store_node(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    code, output = run("--part", "remote", "--quick", "--rounds", "1", "--json", str(path))
    assert code == 0, output
    rows = {(row["case"], row.get("peer")): row for row in json.loads(path.read_text())["rows"]}
    assert rows["remote/get/1 × 64 MiB", "the transfer path itself"]["limit_value"] == 0.85
    assert rows["remote/put/1 × 1 MiB", "the transfer path itself"]["value"] > 0


@pytest.mark.slow
def test_small_objects_have_a_bare_call_beside_them(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    code, output = run("--small", "--quick", "--json", str(path))
    assert code == 0, output
    content = json.loads(path.read_text())
    report.validate(content)
    rows = {(row["case"], row["metric"], row.get("peer")): row for row in content["rows"]}
    assert rows["small/get/1MiB", "latency", None]["limit_value"] == 0.3
    assert rows["small/put/1MiB", "latency", None]["limit_value"] == 0.6
    assert rows["small/put/1MiB", "beside", "memcpy"]["ratio"] > 1
    rates = {case for case, metric, peer in rows if (metric, peer) == ("rate", "bare call")}
    assert rates == {
        "small/exists/batch of 512",
        "small/get/4KiB/8 in flight",
        "small/get/4KiB/batch of 64",
    }


def test_a_peer_that_is_not_here_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    result = CliRunner().invoke(store, ["--directory", str(tmp_path), "--peer", "lmcache"])
    assert isinstance(result.exception, PeerAbsent)
    assert "lmcache is not installed; this does it:" in str(result.exception)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--block", "1000"), "whole pages"),
        (("--block", "much"), "sizes look like"),
        (("--total", "900000GiB"), "MiB free"),
        # A round has eight blocks or more.
        (("--block", "900000GiB", "--total", "1MiB", "--part", "disk"), "MiB free"),
        (("--peer", "nobody"), "lmcache"),
        (("--directory", "/nowhere/at/all"), "no directory"),
    ],
)
def test_wrong_use_is_refused(arguments: tuple[str, ...], message: str) -> None:
    code, output = run(*arguments)
    assert code == 2
    assert message in output
