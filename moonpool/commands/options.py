"""Shared by the commands: the console, tables, options, and a connected client."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import click
from rich.console import Console, RenderableType
from rich.table import Table

from moonpool.client import API_KEY_VARIABLE, Client
from moonpool.runtime.security.https import CA_VARIABLE

T = TypeVar("T")
Command = Callable[..., None]

_API_KEY = "moonpool.api_key"
DEFAULT_URL = "http://127.0.0.1:8000"

# Into a file or a pipe, tables are as wide as they need.
console = Console(highlight=False, width=None if sys.stdout.isatty() else 160)


def _keep_api_key(context: click.Context, parameter: click.Parameter, value: str) -> None:
    context.meta[_API_KEY] = value


def _use_ca(context: click.Context, parameter: click.Parameter, value: Path | None) -> None:
    if value is not None:
        os.environ[CA_VARIABLE] = str(value)


# Read by ``https.client_context``.
_ca_option = click.option(
    "--ca",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    envvar=CA_VARIABLE,
    expose_value=False,
    callback=_use_ca,
    help="The authority of an https:// URL (PEM), if it is not one of the system's.",
)
# Read by ``api_key``: no command needs an argument for it.
_api_key_option = click.option(
    "--api-key",
    default="",
    envvar=API_KEY_VARIABLE,
    expose_value=False,
    callback=_keep_api_key,
    help=f"Where API keys are configured; in {API_KEY_VARIABLE} other users of this machine cannot see it.",
)


def api_key_option(command: Command) -> Command:
    """Add ``--api-key`` and ``--ca``, which become no arguments."""
    return _api_key_option(_ca_option(command))


def api_key() -> str:
    """The key given to the running command; empty: none."""
    context = click.get_current_context(silent=True)
    return str(context.meta.get(_API_KEY, "")) if context else ""


def url_option(command: Command) -> Command:
    """Add ``--url`` (argument ``url``), ``--api-key`` and ``--ca``."""
    url = click.option(
        "--url", default=DEFAULT_URL, envvar="MOONPOOL_URL", show_default=True, help="The conductor's API."
    )
    return url(api_key_option(command))


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


def show(found: Any, view: RenderableType, as_json: bool) -> None:
    """Print ``found`` as JSON, or ``view``, its form for people."""
    if as_json:
        click.echo(json.dumps(found, indent=2))
    else:
        console.print(view)


def run_with_client(url: str, work: Callable[[Client], Awaitable[T]]) -> T:
    """Run ``work`` with a client of the conductor at ``url``."""
    key = api_key()

    async def run() -> T:
        async with Client(url, api_key=key) as client:
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
