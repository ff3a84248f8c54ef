"""``moonpool bench store`` measures what it says, and says what is missing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from moonpool.bench.store.command import store
from moonpool.runtime.reports import report


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(store, arguments)
    return result.exit_code, result.output


def test_every_figure_has_its_limit_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    options = (
        "--cases",
        "host",
        "--cases",
        "disk",
        "--block",
        "64KiB",
        "--total",
        "4MiB",
        "--rounds",
        "1",
        "--directory",
        str(tmp_path),
    )
    code, output = run(*options, "--json", str(path))
    assert code == 0, output
    content = json.loads(path.read_text())
    report.validate(content)
    beside = {(row["case"].split(",")[0], row.get("peer")) for row in content["rows"]}
    assert {("host put", "memcpy"), ("host verified get", "memcpy")} <= beside
    assert {("disk put", "raw disk"), ("disk get", "raw disk")} <= beside
    assert [entry.name for entry in tmp_path.iterdir()] == ["report.json"], "something was left on the disk"


def test_a_peer_that_is_not_here_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    code, output = run(
        *("--cases", "disk", "--block", "64KiB", "--total", "1MiB", "--rounds", "1"),
        *("--directory", str(tmp_path), "--peer", "lmcache"),
    )
    assert code == 0, output
    assert "lmcache is not installed; this does it:" in output.replace("\n", " ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--block", "1000"), "whole pages"),
        (("--block", "much"), "sizes look like"),
        (("--total", "900000GiB"), "MiB free"),
        (("--peer", "nobody"), "lmcache"),
        (("--directory", "/nowhere/at/all"), "no directory"),
    ],
)
def test_wrong_use_is_refused(arguments: tuple[str, ...], message: str) -> None:
    code, output = run(*arguments)
    assert code == 2
    assert message in output
