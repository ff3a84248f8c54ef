"""The report's shape: what ``moonpool.runtime.reports.report`` documents is what it writes and what it
checks."""

from __future__ import annotations

import io
import json
import math
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from rich.console import Console

from moonpool.bench.cli import bench
from moonpool.runtime.reports import report
from moonpool.runtime.reports.report import Report, Row
from moonpool.runtime.reports.schema import ReportInvalid
from tests.bench.records import CONDITIONS, ENVIRONMENT

FULL = Row(
    *("case", "throughput", 20.0, "tokens/s", 20.0, 21.0, "at least", 2.0, 2.5, "other", 8.0),
    peer_kind="peer",
)


def content(*rows: dict[str, Any]) -> dict[str, Any]:
    return {"environment": Report(ENVIRONMENT, ()).as_json()["environment"], "rows": list(rows)}


def test_documented_example_is_valid() -> None:
    assert report.__doc__ is not None
    block = report.__doc__.split("writes::")[1].split("All numbers")[0]
    example = json.loads(re.sub(r"#.*", "", block))
    report.validate(example)
    documented = set(example["rows"][0])
    assert documented == set(Row.__dataclass_fields__)


def test_committed_results_name_their_command_and_commit() -> None:
    results = Path(__file__).parents[2] / "bench" / "results"
    files = sorted(results.glob("*.json"))
    assert files
    for file in files:
        environment = report.read(file).environment
        assert "moonpool bench" in environment.command, file.name
        assert re.fullmatch("[0-9a-f]{7,40}", environment.commit), f"{file.name}: uncommitted changes"


def test_a_peers_figure_of_0_has_no_ratio(tmp_path: Path) -> None:
    # Tokens that a busy client read in one piece have no time between them.
    row = report.versus(Row("case", "TPOT", 5.8, "ms"), "A", 0.0, "baseline")
    assert (row.peer_value, row.ratio) == (0.0, None)
    report.write(Report(ENVIRONMENT, [row]), tmp_path / "report.json")
    assert report.read(tmp_path / "report.json").rows == [row]


def test_written_report_is_read_back(tmp_path: Path) -> None:
    written = Report(ENVIRONMENT, [FULL, Row("case", "ttft", 0.01, "s")])
    report.write(written, tmp_path / "report.json")
    read = json.loads((tmp_path / "report.json").read_text())
    report.validate(read)
    assert read == written.as_json()
    assert read["rows"][1] == {"case": "case", "metric": "ttft", "value": 0.01, "unit": "s"}


FIELDS = (
    *("command", "options", "conditions", "machine", "versions", "commit", "date"),
    *(f"conditions.{name}" for name in ("models", "cache", "warm_up", "seeds", "noise")),
    *(f"conditions.models.0.{name}" for name in ("name", "revision", "weights", "kv")),
    *(f"conditions.cache.{name}" for name in ("state", "tokens", "blocks", "note")),
    *("conditions.noise.rounds", "conditions.noise.load"),
)


@pytest.mark.parametrize("field", FIELDS)
def test_a_record_that_lacks_a_field_is_refused(field: str) -> None:
    made = Report(ENVIRONMENT, [FULL]).as_json()
    report.validate(made, complete=True)
    *path, name = field.split(".")
    place: Any = made["environment"]
    for step in path:
        place = place[int(step) if step.isdigit() else step]
    del place[name]
    with pytest.raises(ReportInvalid, match=f"{name} is missing"):
        report.validate(made, complete=True)


def test_a_figure_beside_ours_that_does_not_say_what_it_is_is_refused() -> None:
    made = Report(ENVIRONMENT, [FULL]).as_json()
    del made["rows"][0]["peer_kind"]
    report.validate(made)
    with pytest.raises(ReportInvalid, match="peer_kind is missing"):
        report.validate(made, complete=True)


def test_noise_is_the_middle_half_of_the_repetitions_over_their_median(tmp_path: Path) -> None:
    rows = [Row("c", "m", 10.0, "s", samples=[8.0, 9.0, 10.0, 11.0, 12.0]), Row("c", "n", 1.0, "s")]
    report.write(Report(ENVIRONMENT, rows), tmp_path / "report.json")
    written = json.loads((tmp_path / "report.json").read_text())
    assert written["rows"][0]["noise"] == pytest.approx(0.2)
    assert "noise" not in written["rows"][1]
    assert written["environment"]["conditions"]["noise"] == {"rounds": 5, "load": [0.5, 1.0], "spread": 0.2}
    assert report.read(tmp_path / "report.json").environment == ENVIRONMENT


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({"value": None}, "rows[0].value"),
        ({"value": math.nan}, "rows[0].value"),
        ({"value": True}, "rows[0].value"),
        ({"unit": 3}, "rows[0].unit"),
        ({"p42": 1.0}, "rows[0].p42"),
        ({"samples": []}, "rows[0].samples"),
        ({"samples": [1.0, math.inf]}, "rows[0].samples"),
        ({"limit": "at least"}, "rows[0]"),
        ({"limit": "about", "limit_value": 1.0}, "rows[0].limit"),
        ({"ratio": 2.0}, "rows[0].ratio"),
        ({"peer_kind": "peer"}, "rows[0].peer_kind"),
        ({"peer": "p", "peer_value": 1.0, "peer_kind": "friend"}, "rows[0].peer_kind"),
    ],
)
def test_wrong_row_is_named(change: dict[str, Any], where: str) -> None:
    row = {"case": "c", "metric": "m", "value": 1.0, "unit": "s", **change}
    with pytest.raises(ReportInvalid) as caught:
        report.validate(content(row))
    assert caught.value.where == where


def test_repeated_measurement_is_refused() -> None:
    row = {"case": "c", "metric": "m", "value": 1.0, "unit": "s"}
    with pytest.raises(ReportInvalid, match="repeats"):
        report.validate(content(row, row))
    report.validate(content(row, {**row, "peer": "p", "peer_value": 2.0}))


@pytest.mark.parametrize("option", ["--json", "--plot"])
def test_a_file_that_cannot_be_written_is_refused_before_the_run(tmp_path: Path, option: str) -> None:
    answer = CliRunner().invoke(bench, ["index", option, str(tmp_path / "missing" / "file.json")])
    assert answer.exit_code == 2
    assert f"there is no directory {tmp_path / 'missing'}; make it first" in answer.output


def test_invalid_report_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(ReportInvalid):
        report.write(Report(ENVIRONMENT, [Row("c", "m", math.inf, "s")]), tmp_path / "report.json")
    assert not (tmp_path / "report.json").exists()


def test_limit_is_of_the_ratio_where_there_is_a_peer() -> None:
    assert FULL.reached
    assert not Row("c", "m", 11.0, "ms", limit="at most", limit_value=10.0).reached
    assert Row("c", "m", 11.0, "ms").reached is None


def test_this_machine_is_described() -> None:
    environment = report.measure_environment(
        ["rich", "no-such-package"], lambda: datetime(2026, 11, 21, tzinfo=UTC)
    )
    report.validate(Report(environment, ()).as_json())
    assert "rich" in environment.versions
    assert "no-such-package" not in environment.versions


def test_options_are_recorded_without_secrets(tmp_path: Path) -> None:
    options = {"seed": 3, "sets": ("a=1", "conductor.api_key=hunter2"), "password": "hunter2", "url": None}
    environment = report.measure_environment((), command="x", options=options, conditions=CONDITIONS)
    report.write(Report(environment, ()), tmp_path / "report.json")
    assert report.read(tmp_path / "report.json").environment.options == environment.options
    assert environment.options is not None
    assert environment.options["seed"] == "3"
    assert "hunter2" not in (tmp_path / "report.json").read_text()


def test_table_shows_figures_and_verdicts() -> None:
    out = io.StringIO()
    report.show(Report(ENVIRONMENT, [FULL]), Console(file=out, width=160))
    for text in ("2.5", "reached", "other 8"):
        assert text in out.getvalue()
