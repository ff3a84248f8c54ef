"""The pages made from the code are as the code is."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.metrics import MetricWrapperBase

from moonpool.commands.reference_pages import PACKAGES, MetricRow, metrics, pages
from moonpool.conductor.observing import planner_metrics
from moonpool.conductor.observing.request_metrics import RequestMetrics

ROOT = Path(__file__).parents[2]
DIRECTORY = ROOT / "docs" / "reference"


@pytest.fixture(scope="module")
def made() -> dict[Path, str]:
    return pages()


@pytest.fixture(scope="module")
def rows() -> list[MetricRow]:
    return metrics()


@pytest.mark.parametrize("path", sorted(DIRECTORY.iterdir()), ids=lambda path: path.name)
def test_a_page_is_fresh(path: Path, made: dict[Path, str]) -> None:
    assert path.read_text(encoding="utf-8") == made[path], "run `make docs`"


def test_there_is_every_page(made: dict[Path, str]) -> None:
    assert set(made) == set(DIRECTORY.iterdir()), "run `make docs`"


def test_every_metric_ends_in_its_unit_and_says_what_it_counts(rows: list[MetricRow]) -> None:
    assert len({row.name for row in rows}) == len(rows)
    for row in rows:
        assert row.meaning[0].isupper() or row.meaning[0].isdigit(), row
        assert row.kind == "counter" or not row.name.endswith("_total"), row


def test_metrics_of_collectors_have_rows(rows: list[MetricRow]) -> None:
    wanted = {"moonpool_node_health", "moonpool_host_energy_joules_total", "moonpool_gpu_clock_hertz"}
    assert wanted <= {row.name for row in rows}


def test_rows_have_the_labels_of_their_metrics(rows: list[MetricRow]) -> None:
    declared = {
        f"{metric._name}_total" if metric._type == "counter" else metric._name: metric._labelnames
        for metric in vars(planner_metrics).values()
        if isinstance(metric, MetricWrapperBase)
    }
    assert declared.items() <= {row.name: row.labels for row in rows}.items()


def test_metrics_of_requests_have_rows(rows: list[MetricRow]) -> None:
    registry = CollectorRegistry()
    RequestMetrics("a model", registry)
    row_of = {row.name.removesuffix("_total"): row for row in rows}
    for metric in registry.collect():
        if metric.name.startswith("moonpool_"):
            row = row_of[metric.name]
            assert (row.kind, row.meaning) == (metric.type, metric.documentation), metric
            assert all(set(row.labels) <= set(sample.labels) for sample in metric.samples), row


@pytest.mark.parametrize("package", PACKAGES)
def test_collectors_write_the_names_of_metrics_out(package: str) -> None:
    """Else the page lacks them."""
    for file in (ROOT / package).rglob("*.py"):
        if "MetricFamily" not in (text := file.read_text(encoding="utf-8")):
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("MetricFamily"):
                assert isinstance(node.args[0], ast.Constant), f"{file}: {ast.unparse(node.args[0])}"
