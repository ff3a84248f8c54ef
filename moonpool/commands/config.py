"""``moonpool config``: check a configuration, or list every option."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import click

from moonpool.commands.options import config_options
from moonpool.runtime.config.loading import explain, load_config, to_toml
from moonpool.runtime.redaction import redacted


@click.command("config")
@click.option("--explain", "all_options", is_flag=True, help="List every option: default, unit, meaning.")
@config_options
def config_command(all_options: bool, file: Path | None, sets: Sequence[str]) -> None:
    """Check a configuration and print what it changes, as TOML."""
    click.echo(_annotated_defaults() if all_options else redacted(to_toml(load_config(file, sets))), nl=False)


def _annotated_defaults() -> str:
    """Return a TOML file of every option at its default, each with a comment."""
    lines: list[str] = []
    section = ""
    for row in explain():
        parent, _, name = row.key.rpartition(".")
        if parent != section:
            section = parent
            lines += ["", f"[{section}]"]
        lines.append(f"{name} = {json.dumps(row.default)}  # {row.unit}: {row.meaning}")
    return "\n".join(lines[1:]) + "\n"
