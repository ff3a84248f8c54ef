"""What the dashboard is told of benchmark files: only what they are, whatever stands in them."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from moonpool.conductor.dashboard.benchmark_results import (
    CHECKOUT,
    MAX_FILES,
    MAX_NBYTES,
    MAX_ROWS,
    BenchResults,
    ResultUnknown,
)

ENVIRONMENT = {"machine": "m", "versions": {}, "commit": "", "date": "2026-11-21T03:00:00+00:00"}
ROW = {"case": "c", "metric": "m", "value": 2.0, "unit": "s", "limit": "at most", "limit_value": 1.0}


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text(json.dumps({"environment": ENVIRONMENT, "rows": rows}))


def test_files_are_listed_newest_first_and_read_again_when_they_change(tmp_path: Path) -> None:
    results = BenchResults(str(tmp_path))
    assert results.listed() == []
    for number, name in enumerate(("old.json", "new.json")):
        write(tmp_path / name, [ROW])
        os.utime(tmp_path / name, ns=(number, number))
    assert [one["name"] for one in results.listed()] == ["new.json", "old.json"]
    assert results.listed()[0]["num_reached"] == 0
    write(tmp_path / "old.json", [ROW, {**ROW, "metric": "other", "value": 0.5}])
    first = results.listed()[0]
    assert (first["name"], first["num_rows"], first["num_limits"], first["num_reached"]) == (
        "old.json",
        2,
        2,
        1,
    )
    assert len(results.report("old.json")["rows"]) == 2


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"not json", "no report"),
        (b"[" * 100_000, "no report"),
        (b'{"environment": {}, "rows": []}', "environment.machine is missing"),
        (b" " * (MAX_NBYTES + 1), "bytes long"),
        (
            json.dumps(
                {"environment": ENVIRONMENT, "rows": [{**ROW, "case": str(n)} for n in range(MAX_ROWS + 1)]}
            ).encode(),
            "rows",
        ),
        (json.dumps({"environment": ENVIRONMENT, "rows": [{**ROW, "value": 10**400}]}).encode(), "no report"),
    ],
)
def test_what_is_no_report_is_said_so(tmp_path: Path, content: bytes, problem: str) -> None:
    (tmp_path / "file.json").write_bytes(content)
    results = BenchResults(str(tmp_path))
    (listed,) = results.listed()
    assert problem in listed["problem"]
    with pytest.raises(ResultUnknown, match="is not shown"):
        results.report("file.json")


def test_only_files_of_the_directory_are_served(tmp_path: Path) -> None:
    outside, inside = tmp_path / "outside.json", tmp_path / "results"
    inside.mkdir()
    write(outside, [ROW])
    (inside / "link.json").symlink_to(outside)
    (inside / "folder.json").mkdir()
    results = BenchResults(str(inside))
    assert results.listed() == []
    for name in ("link.json", "../outside.json", str(outside), "folder.json"):
        with pytest.raises(ResultUnknown, match="there is no"):
            results.report(name)


def test_the_number_of_files_is_bounded(tmp_path: Path) -> None:
    for number in range(MAX_FILES + 3):
        write(tmp_path / f"{number}.json", [ROW])
    assert len(BenchResults(str(tmp_path)).listed()) == MAX_FILES


def test_all_results_of_the_checkout_are_listed() -> None:
    listed = [one["name"] for one in BenchResults("").listed()]
    assert sorted(listed) == sorted(path.name for path in CHECKOUT.glob("*.json"))


def test_a_file_that_could_not_be_opened_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "one.json", [ROW])
    results = BenchResults(str(tmp_path))
    with monkeypatch.context() as fault:
        fault.setattr(Path, "open", Mock(side_effect=OSError(errno.EMFILE, "Too many open files")))
        assert "Too many open files" in results.listed()[0]["problem"]
    assert results.listed()[0]["num_rows"] == 1
