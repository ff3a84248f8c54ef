"""``python -m moonpool.commands.reference_pages [--check]``: generate docs/reference from the code."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import click

from moonpool.cli import cli
from moonpool.conductor.observing.request_metrics import VLLM_NAMES
from moonpool.runtime.config.loading import explain

ROOT = Path(__file__).resolve().parents[2]
PAGES = ROOT / "docs" / "reference"
PACKAGES = (
    "conductor",
    "connectors",
    "decode_node",
    "engine",
    "kvstore",
    "prefill_node",
    "runtime",
    "transfer",
)

_NOTE = "<!-- made by `make docs`: edit the code -->\n"
_KINDS = ("Counter", "Gauge", "Histogram")


@dataclass(frozen=True, slots=True)
class MetricRow:
    name: str  # as Prometheus shows it
    kind: str
    labels: tuple[str, ...]
    meaning: str
    package: str


def metrics() -> list[MetricRow]:
    """Return every metric that the code declares, by package and name."""
    rows = {row for package in PACKAGES for file in (ROOT / package).rglob("*.py") for row in _declared(file)}
    return sorted(rows, key=lambda row: (row.package, row.name))


def _declared(file: Path) -> Iterator[MetricRow]:
    """Find calls such as ``Counter("moonpool_…", "…", ["label"])`` and ``family(Counter, "moonpool_…", …)``;
    ``of_model`` adds a label."""
    text = file.read_text(encoding="utf-8")
    if '"moonpool_' not in text:
        return
    module = ast.parse(text)
    shared = {
        node.targets[0].id: node.value
        for node in module.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    for node in ast.walk(module):
        if not isinstance(node, ast.Call):
            continue
        called = [value.id for value in (node.func, *node.args[:1]) if isinstance(value, ast.Name)]
        kinds = [name for name in (name.removesuffix("MetricFamily") for name in called) if name in _KINDS]
        texts = [str(value.value) for value in node.args if isinstance(value, ast.Constant)]
        if not kinds or len(texts) < 2 or not texts[0].startswith("moonpool_"):
            continue
        name = texts[0]
        if kinds[0] == "Counter" and not name.endswith("_total"):
            name += "_total"
        labels = ("model_name",) if called[0] == "of_model" else tuple(_labels(node, shared))
        package = str(file.parent.relative_to(ROOT))
        yield MetricRow(name, kinds[0].lower(), labels, texts[1].rstrip("."), package)


def _labels(call: ast.Call, shared: Mapping[str, ast.expr]) -> Iterator[str]:
    given = [keyword.value for keyword in call.keywords if keyword.arg == "labels"] + call.args[2:4]
    for value in given:
        labels = shared[value.id] if isinstance(value, ast.Name) else value
        if isinstance(labels, ast.List | ast.Tuple):
            yield from (str(item.value) for item in labels.elts if isinstance(item, ast.Constant))


def _metrics_page() -> str:
    lines = [
        "# Metrics",
        "",
        _NOTE,
        "Every process serves `/metrics`; `/v1/prometheus-targets` of a conductor says where, and",
        "`deploy/` has a Prometheus and a Grafana that use it. Units end the names; `ratio` is 0 to 1.",
        "",
    ]
    package = ""
    for row in metrics():
        if row.package != package:
            package = row.package
            lines += ["", f"## {package}", "", "| name | kind | labels | meaning |", "|---|---|---|---|"]
        lines.append(f"| `{row.name}` | {row.kind} | {', '.join(row.labels)} | {_cell(row.meaning)} |")
    lines += ["", "## Under vLLM's names", "", "So that dashboards made for vLLM show a cluster.", ""]
    lines += ["| name | the same as |", "|---|---|"]
    lines += [f"| `{theirs}` | `{ours}` |" for ours, theirs in VLLM_NAMES.items()]
    return "\n".join(lines) + "\n"


def _options_page() -> str:
    lines = [
        "# Options",
        "",
        _NOTE,
        "Every process takes the same: a TOML file by `--config FILE`, single ones by `--set KEY=VALUE`",
        "(`KEY=@FILE` reads the value from a file). What is unknown is refused. `moonpool config --explain`",
        "prints this table.",
    ]
    section = ""
    for row in explain():
        parent, _, _ = row.key.rpartition(".")
        if parent != section:
            section = parent
            lines += ["", f"## {section}", "", "| option | default | unit | meaning |", "|---|---|---|---|"]
        default = "" if row.default == "" else f"`{row.default}`"
        lines.append(f"| `{row.key}` | {default} | {row.unit} | {_cell(row.meaning)} |")
    return "\n".join(lines) + "\n"


def _commands_page() -> str:
    lines = ["# Commands", "", _NOTE]
    for path, command in _commands(cli, ("moonpool",)):
        context = click.Context(command, info_name=" ".join(path), terminal_width=100, max_content_width=100)
        lines += [f"## {' '.join(path)}", "", "```", command.get_help(context), "```", ""]
    return "\n".join(lines)


def _commands(group: click.Group, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        if isinstance(command, click.Group):
            yield from _commands(command, (*path, name))
        elif not command.ignore_unknown_options:  # a daemon has options of its own
            yield (*path, name), command


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def pages() -> dict[Path, str]:
    return {
        PAGES / "metrics.md": _metrics_page(),
        PAGES / "options.md": _options_page(),
        PAGES / "commands.md": _commands_page(),
    }


@click.command()
@click.option("--check", is_flag=True, help="Only list the pages that differ from the code.")
def main(check: bool) -> None:
    stale = {path: text for path, text in pages().items() if not path.exists() or path.read_text() != text}
    for path, text in stale.items():
        name = path.relative_to(ROOT)
        click.echo(f"{name} is out of date: run `make docs`" if check else f"{name} is written")
        if not check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    sys.exit(1 if check and stale else 0)


if __name__ == "__main__":
    main()
