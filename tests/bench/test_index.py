"""The index benchmark runs and reports in the one shape."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from click.testing import CliRunner

from moonpool.bench.harness.command import Run
from moonpool.bench.harness.services import redis
from moonpool.bench.index import command
from moonpool.bench.index.command import index
from moonpool.runtime.reports.report import validate


@pytest.mark.parametrize("option", ["--nodes=0", "--blocks=100"])
def test_an_index_without_a_node_or_a_whole_prompt_is_refused(option: str) -> None:
    result = CliRunner().invoke(index, [option, "--quick"])
    assert (result.exit_code, option.partition("=")[0] in result.output) == (2, True), result.output


async def test_the_processor_time_of_a_server_elsewhere_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def only_here(pid: int | None = None) -> psutil.Process:
        """The number that such a server tells is of no process here, or of another one."""
        if pid is not None:
            raise psutil.NoSuchProcess(pid)
        return psutil.Process()

    monkeypatch.setattr(command, "psutil", SimpleNamespace(Process=only_here))
    async with redis() as url:
        filled = command._Index(Run([], (), 1, False, False, print), command.Settings(url, 20_000, 1), url)
        try:
            figures = {row.metric: row.value for row in await filled.publish_rows()}
        finally:
            await filled.close()
    assert figures["publish, server CPU"] > 0


@pytest.mark.slow
def test_the_command_writes_a_valid_report(tmp_path: Path) -> None:
    out = tmp_path / "report.json"
    options = ["--blocks", "5000", "--nodes", "3", "--rounds", "1", "--json", str(out)]
    result = CliRunner().invoke(index, options)
    assert result.exit_code == 0, result.output
    content = json.loads(out.read_text())
    validate(content)
    metrics = {row["metric"] for row in content["rows"]}
    assert {"publish", "lookups of 128 blocks", "seen in a mirror, p99", "mirror memory"} <= metrics
