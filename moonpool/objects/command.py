"""``moonpool store``: objects and their nodes from the command line."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
from rich.console import Console
from rich.table import Table

from moonpool.kvstore.client.errors import BadObject, BadUrl, UnknownNode
from moonpool.kvstore.client.queries import ObjectStat
from moonpool.kvstore.client.store import StoreClient
from moonpool.objects.discovery import connect
from moonpool.objects.verification import verify_nodes
from moonpool.runtime.config.loading import load_config

DEFAULT_URL = "http://127.0.0.1:8000"

# Into a file or a pipe, tables are as wide as they need. stdout is for what was asked for.
console = Console(highlight=False, width=None if sys.stdout.isatty() else 160)
messages = Console(highlight=False, stderr=True)


@dataclass(frozen=True, slots=True)
class _Where:
    url: str
    tenant: str
    config: Path | None
    sets: tuple[str, ...]

    def run(self, work: Callable[[StoreClient], Awaitable[int | None]]) -> None:
        """Connect, do ``work``, exit with its code. Wrong input is a sentence and code 2."""

        async def main() -> int | None:
            config = load_config(self.config, self.sets)
            salt = os.environ.get("MOONPOOL_TENANT_SALT", "")
            async with connect(
                self.url,
                tenant=self.tenant,
                salt=salt,
                namespace=config.index.namespace,
                transfer=config.transfer,
            ) as client:
                return await work(client)

        try:
            sys.exit(asyncio.run(main()))
        except (BadUrl, BadObject, UnknownNode) as error:
            raise click.UsageError(str(error)) from error


def _with_where(command: Callable[..., None]) -> Callable[..., None]:
    """The options that say which store and whose; the command gets them as its first argument."""

    @functools.wraps(command)
    def run(url: str, tenant: str, config: Path | None, sets: tuple[str, ...], **given: Any) -> None:
        command(_Where(url, tenant, config, sets), **given)

    options = (
        click.option(
            "--url",
            default=DEFAULT_URL,
            envvar="MOONPOOL_URL",
            show_default=True,
            help="The conductor's API, or the index's Redis.",
        ),
        click.option(
            "--tenant",
            default="",
            envvar="MOONPOOL_TENANT",
            metavar="NAME",
            help="Whose objects. The salt they are named with is read from MOONPOOL_TENANT_SALT.",
        ),
        click.option("--set", "sets", multiple=True, metavar="KEY=VALUE", help="Set one option."),
        click.option(
            "--config", type=click.Path(path_type=Path), metavar="FILE", help="TOML file of options."
        ),
    )
    for option in options:
        run = option(run)
    return run


@click.group()
def store() -> None:
    """Put objects on the cluster's store nodes, get them, look after them."""


@store.command("put")
@click.argument("file", metavar="FILE|-")
@click.option("--name", metavar="NAME", help="Its name in the store (default: the file's).")
@click.option("--copies", default=1, show_default=True, type=click.IntRange(min=1), help="On how many nodes.")
@click.option("--node", default="", metavar="ID", help="The node that is to have it first.")
@_with_where
def put_command(where: _Where, file: str, name: str | None, copies: int, node: str) -> None:
    """Store a file's bytes; - reads standard input."""
    if file == "-" and name is None:
        raise click.UsageError("standard input has no name: give it one with --name")
    stored_as = name if name is not None else Path(file).name
    data = _read(file)

    async def work(client: StoreClient) -> None:
        began_s = time.perf_counter()
        await client.put(stored_as, data, copies=copies, node=node)
        seconds = time.perf_counter() - began_s
        rate = f"{data.nbytes / seconds / 1e9:.2f} GB/s"
        stat = await client.stat(stored_as)
        holders = ", ".join(stat.nodes) if stat is not None else "no node any more"
        messages.print(
            f"{stored_as}: {size(data.nbytes)} on {holders} in {seconds:.3f} s, {rate}", markup=False
        )

    where.run(work)


@store.command("get")
@click.argument("name")
@click.argument("file", metavar="FILE|-", default="-")
@_with_where
def get_command(where: _Where, name: str, file: str) -> None:
    """Write an object's bytes into FILE, or to standard output."""
    if file == "-" and sys.stdout.isatty():
        raise click.UsageError("an object's bytes would not do your terminal good: name a file")
    if file != "-" and not Path(file).parent.is_dir():
        raise click.UsageError(f"{file} cannot be written: there is no directory {Path(file).parent}")

    async def work(client: StoreClient) -> None:
        stat = await client.stat_existing(name)
        data = np.empty(stat.nbytes, np.uint8)
        await client.get_into(name, data, required=True)
        if file == "-":
            sys.stdout.buffer.write(data.data)
            return
        # A file that is there is whole, whatever happens meanwhile.
        unfinished = Path(f"{file}.part")
        try:
            unfinished.write_bytes(data.data)
            unfinished.rename(file)
        except OSError as error:
            raise click.ClickException(f"{file} cannot be written: {error.strerror}") from error

    where.run(work)


@store.command("ls")
@click.argument("prefix", default="")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@_with_where
def ls_command(where: _Where, prefix: str, as_json: bool) -> None:
    """List the objects whose names begin with PREFIX."""

    async def work(client: StoreClient) -> None:
        objects = await client.ls(prefix)
        if as_json:
            click.echo(json.dumps([_plain(each) for each in objects], indent=2))
        else:
            console.print(_objects_table(objects))

    where.run(work)


@store.command("stat")
@click.argument("name", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@_with_where
def stat_command(where: _Where, name: str | None, as_json: bool) -> None:
    """Describe the object NAME; without it, what each store node lends and keeps."""

    async def work(client: StoreClient) -> None:
        if name is None:
            rows = _usage_rows(await client.usage())
            if as_json:
                click.echo(json.dumps(rows, indent=2))
            else:
                console.print(_usage_table(rows))
            return
        found = await client.stat_existing(name)
        if as_json:
            click.echo(json.dumps(_plain(found), indent=2))
        else:
            console.print(_objects_table([found]))

    where.run(work)


@store.command("evict")
@click.argument("names", nargs=-1, metavar="NAME...")
@click.option("--all", "everything", is_flag=True, help="Every object of this tenant.")
@_with_where
def evict_command(where: _Where, names: tuple[str, ...], everything: bool) -> None:
    """Drop every copy of these objects."""
    if bool(names) == everything:
        raise click.UsageError("name the objects to drop, or say --all")

    async def work(client: StoreClient) -> int:
        wanted = [each.name for each in await client.ls()] if everything else list(names)
        num_removed = await client.batch_remove(wanted)
        messages.print(f"{num_removed} of {len(wanted)} objects dropped")
        return 0 if num_removed == len(wanted) else 1

    where.run(work)


@store.command("verify")
@_with_where
def verify_command(where: _Where) -> None:
    """Check every block and chunk on every store node; damaged ones are dropped. Exit code 1: there were
    some, or a node could not be asked."""

    async def work(client: StoreClient) -> int:
        return await verify_nodes(await client.nodes(), messages)

    where.run(work)


def _read(file: str) -> np.ndarray[Any, np.dtype[np.uint8]]:
    if file == "-":
        return np.frombuffer(sys.stdin.buffer.read(), np.uint8)
    path = Path(file)
    if not path.is_file():
        raise click.UsageError(f"{file} is not a file")
    try:
        # Mapped, not read: its pages go from the page cache to the node. An empty file cannot be.
        return np.memmap(path, np.uint8, "r") if path.stat().st_size else np.empty(0, np.uint8)
    except OSError as error:
        raise click.UsageError(f"{file} cannot be read: {error.strerror}") from error


def _plain(stat: ObjectStat) -> dict[str, Any]:
    return {**asdict(stat), "shape": list(stat.shape), "nodes": list(stat.nodes)}


def _objects_table(objects: list[ObjectStat]) -> Table:
    table = _table(("name", "dtype", "shape", "put", "on"), right=("size",))
    for each in objects:
        put_at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(each.version / 1e9))
        shape = "×".join(map(str, each.shape)) or "scalar"
        table.add_row(each.name, each.dtype, shape, put_at, ", ".join(each.nodes), size(each.nbytes))
    return table


def _usage_rows(usage: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {
            "node": node_id,
            "keeps": tier.shelf,
            "tier": tier.tier,
            "used_nbytes": tier.num_held * tier.block_nbytes,
            "capacity_nbytes": tier.num_blocks * tier.block_nbytes,
            "blocks": tier.num_held,
            "own_objects": reply.num_objects if tier.shelf == "objects" else None,
        }
        for node_id, reply in sorted(usage.items())
        for tier in reply.tiers
    ]


def _usage_table(rows: list[dict[str, Any]]) -> Table:
    table = _table(("node", "keeps", "tier"), right=("used", "of", "blocks", "your objects"))
    for row in rows:
        own = row["own_objects"]
        table.add_row(
            row["node"],
            row["keeps"],
            row["tier"],
            size(row["used_nbytes"]),
            size(row["capacity_nbytes"]),
            str(row["blocks"]),
            "" if own is None else str(own),
        )
    return table


def _table(left: tuple[str, ...], right: tuple[str, ...]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for heading in left:
        table.add_column(heading, no_wrap=True)
    for heading in right:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def size(nbytes: int) -> str:
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if nbytes >= unit:
            return f"{nbytes / unit:.1f} {name}"
    return f"{nbytes} B"
