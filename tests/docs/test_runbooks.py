"""docs/runbooks.md: a row for every class, a section for every drill, and no name that does not exist."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from moonpool.bench.drill.drills import DRILLS
from moonpool.commands.reference_pages import metrics
from moonpool.runtime.failures import CAUSES, FailureClass

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/runbooks.md").read_text()
SECTIONS = {section.partition("\n")[0]: section for section in PAGE.split("\n## ")}


def test_every_class_has_its_row_and_every_cause_is_named() -> None:
    rows = re.findall(r"^\| `(\w+)` \|", SECTIONS["Classes of failure"], re.MULTILINE)
    assert [row for row in rows if not row.startswith("moonpool_")] == [each.value for each in FailureClass]
    causes = SECTIONS["Classes of failure"].partition("`cause` is one word:")[2].partition("\n\n")[0]
    assert set(re.findall(r"`(\w+)`", causes)) == CAUSES


@pytest.mark.parametrize("drill", DRILLS, ids=lambda drill: drill.name)
def test_every_drill_has_a_runbook(drill: object) -> None:
    name = getattr(drill, "name", "")
    section = SECTIONS[name[0].upper() + name[1:]]
    for part in ("Symptom", "Panel", "Metric", "Command", "What to do"):
        assert f"- **{part}**: " in section


def test_metrics_alerts_and_panels_that_are_named_exist() -> None:
    known = {row.name for row in metrics()}
    # Declared by a function, and made at a scrape.
    known |= {"moonpool_kv_pool_usage_ratio", "moonpool_node_health", "moonpool_gpu_xid"}
    known |= {"moonpool_time_to_first_token_seconds", "moonpool_waiting_requests"}
    named = set(re.findall(r"`(moonpool_\w+)", PAGE))
    assert named <= known, named - known
    alerts = yaml.safe_load((ROOT / "deploy/prometheus/alerts.yml").read_text())
    rules = {rule["alert"] for group in alerts["groups"] for rule in group["rules"]}
    assert set(re.findall(r"`(Moonpool[A-Z]\w+)`", PAGE)) <= rules
    dashboard = json.loads((ROOT / "deploy/grafana/dashboards/moonpool.json").read_text())
    titles = {panel["title"] for panel in dashboard["panels"]}
    asked = {
        panel
        for line in PAGE.splitlines()
        if line.startswith("- **Panel**")
        for panel in re.findall(r'"([^"]+)"', line)
    }
    assert asked and asked <= titles, asked - titles
