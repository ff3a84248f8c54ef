"""Result files of ``moonpool bench … --json``, for the dashboard."""

from __future__ import annotations

import stat
from functools import lru_cache
from pathlib import Path
from typing import Any

import orjson

from moonpool.runtime.reports.schema import ReportInvalid, validate

# Limits of what the page draws.
MAX_FILES = 256
MAX_NBYTES = 1 << 20
MAX_ROWS = 2000

CHECKOUT = Path(__file__).resolve().parents[2] / "bench" / "results"

_Read = tuple[dict[str, Any] | None, str]  # the report in a file, or why it is not shown


class ResultUnknown(LookupError):
    """The file does not exist, or is not a benchmark result."""


class BenchResults:
    """The ``*.json`` of one directory, newest first. New and changed files are read and validated.

    Blocking: call it from a thread.
    """

    def __init__(self, directory: str) -> None:
        """``directory``: empty for the one of the checkout."""
        self._directory = Path(directory) if directory else CHECKOUT

    def listed(self) -> list[dict[str, Any]]:
        """Name, date and reached limits of each file, or why it is not shown.

        The latest run first, by the date in the file: a checkout gives all files one date.
        """
        found = [_summary(name, *read) for name, read in self._read_all().items()]
        return sorted(found, key=lambda one: one.get("date", ""), reverse=True)

    def report(self, name: str) -> dict[str, Any]:
        """One file, as ``moonpool.runtime.reports.report`` documents it. Raises ``ResultUnknown``."""
        read = self._read_all()
        if name not in read:
            raise ResultUnknown(f"there is no {name!r} among the benchmark results")
        report, problem = read[name]
        if report is None:
            raise ResultUnknown(f"{name} is not shown: {problem}")
        return report

    def _read_all(self) -> dict[str, _Read]:
        found = []
        for path in self._directory.glob("*.json") if self._directory.is_dir() else ():
            try:
                status = path.lstat()
            except OSError:
                continue  # it was removed meanwhile
            # A link could point to any file that the conductor can read.
            if stat.S_ISREG(status.st_mode):
                found.append((status.st_mtime_ns, status.st_size, path))
        found.sort(reverse=True)
        return {path.name: _read(path, nbytes, changed_ns) for changed_ns, nbytes, path in found[:MAX_FILES]}


def _summary(name: str, report: dict[str, Any] | None, problem: str) -> dict[str, Any]:
    if report is None:
        return {"name": name, "problem": problem}
    rows = report["rows"]
    return {
        "name": name,
        "date": report["environment"]["date"],
        "num_rows": len(rows),
        "num_limits": sum("limit" in row for row in rows),
        "num_reached": sum(_reached(row) for row in rows if "limit" in row),
    }


def _read(path: Path, nbytes: int, changed_ns: int) -> _Read:
    try:
        return _parse(path, nbytes, changed_ns)
    except OSError as error:
        return None, f"it cannot be read: {error}"[:300]


@lru_cache(maxsize=MAX_FILES)
def _parse(path: Path, nbytes: int, changed_ns: int) -> _Read:
    """``changed_ns``: when the file was changed: only then it is read again, or after an ``OSError``."""
    if nbytes > MAX_NBYTES:
        return None, f"it is {nbytes} bytes long, and at most {MAX_NBYTES} are read"
    try:
        with path.open("rb") as file:
            report = orjson.loads(file.read(MAX_NBYTES))
        validate(report)
    except (ValueError, ReportInvalid) as error:
        return None, f"it is no report of `moonpool bench`: {error}"[:300]
    if len(report["rows"]) > MAX_ROWS:
        return None, f"it has {len(report['rows'])} rows, and at most {MAX_ROWS} are drawn"
    return report, ""


def _reached(row: dict[str, Any]) -> bool:
    measured, bound = row.get("ratio", row["value"]), row["limit_value"]
    return bool(measured >= bound if row["limit"] == "at least" else measured <= bound)
