"""Shared by the commands: the console, tables, options, and a connected client."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import click
from rich.console import Console
from rich.table import Table

from moonpool.client import Client

T = TypeVar("T")
Command = Callable[..., None]

DEFAULT_URL = "http://127.0.0.1:8000"

# Into a file or a pipe, tables are as wide as they need.
console = Console(highlight=False, width=None if sys.stdout.isatty() else 160)

url_option = click.option(
    "--url", default=DEFAULT_URL, envvar="MOONPOOL_URL", show_default=True, help="The conductor's API."
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


def config_options(command: Command) -> Command:
    """Add ``--config FILE`` (argument ``file``) and ``--set KEY=VALUE`` (argument ``sets``)."""
    path = click.Path(path_type=Path)
    command = click.option("--set", "sets", multiple=True, metavar="KEY=VALUE", help="Set one option.")(
        command
    )
    return click.option("--config", "file", type=path, metavar="FILE", help="TOML file of options.")(command)


def output_option(**more: Any) -> Callable[[Command], Command]:
    """``-o FILE``: the file that a command writes."""
    path = click.Path(dir_okay=False, writable=True, path_type=Path)
    return click.option("-o", "--output", type=path, metavar="FILE", **more)


def run_with_client(url: str, work: Callable[[Client], Awaitable[T]]) -> T:
    """Run ``work`` with a client of the conductor at ``url``."""

    async def run() -> T:
        async with Client(url) as client:
            return await work(client)

    return asyncio.run(run())


def plain_table(left: Iterable[str], right: Iterable[str] = ()) -> Table:
    """A table without lines; columns ``left`` are aligned left, ``right`` follow aligned right."""
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for heading in left:
        table.add_column(heading, no_wrap=True)
    for heading in right:
        table.add_column(heading, justify="right", no_wrap=True)
    return table
