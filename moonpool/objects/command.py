"""``moonpool store``: objects on store nodes, and the nodes themselves."""

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

from moonpool.commands.options import DEFAULT_URL, config_options, console, json_option, plain_table
from moonpool.kvstore.client.errors import BadObject, BadUrl, UnknownNode
from moonpool.kvstore.client.queries import ObjectStat
from moonpool.kvstore.client.store import StoreClient
from moonpool.objects.discovery import connect
from moonpool.objects.verification import verify_nodes
from moonpool.runtime.config.loading import load_config

# stdout carries the result alone.
messages = Console(highlight=False, stderr=True)


@dataclass(frozen=True, slots=True)
class _Target:
    url: str
    tenant: str
    file: Path | None
    sets: tuple[str, ...]

    def run(self, work: Callable[[StoreClient], Awaitable[int | None]]) -> None:
        """Connect, do ``work``, exit with its code; code 2 for wrong input."""

        async def main() -> int | None:
            config = load_config(self.file, self.sets)
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


def _on_target(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options that name the store and the tenant; the command gets a ``_Target`` first."""

    @functools.wraps(command)
    def run(url: str, tenant: str, file: Path | None, sets: tuple[str, ...], **given: Any) -> None:
        command(_Target(url, tenant, file, sets), **given)

    url = click.option(
        "--url",
        default=DEFAULT_URL,
        envvar="MOONPOOL_URL",
        show_default=True,
        help="The conductor's API, or the index's Redis.",
    )
    tenant = click.option(
        "--tenant",
        default="",
        envvar="MOONPOOL_TENANT",
        metavar="NAME",
        help="The tenant of the objects; MOONPOOL_TENANT_SALT has its salt.",
    )
    return config_options(tenant(url(run)))


@click.group()
def store() -> None:
    """Put objects on the cluster's store nodes, get, list, describe, evict and verify them."""


@store.command("put")
@click.argument("path", metavar="FILE|-")
@click.option("--name", metavar="NAME", help="Its name in the store (default: the file's).")
@click.option("--copies", default=1, show_default=True, type=click.IntRange(min=1), help="On how many nodes.")
@click.option("--node", default="", metavar="ID", help="The node of the first copy.")
@_on_target
def put_command(target: _Target, path: str, name: str | None, copies: int, node: str) -> None:
    """Store the bytes of FILE; - reads standard input."""
    if path == "-" and name is None:
        raise click.UsageError("standard input has no name: give it one with --name")
    stored_as = name if name is not None else Path(path).name
    data = _read(path)

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

    target.run(work)


@store.command("get")
@click.argument("name")
@click.argument("path", metavar="FILE|-", default="-")
@_on_target
def get_command(target: _Target, name: str, path: str) -> None:
    """Write an object's bytes into FILE, or to standard output."""
    if path == "-" and sys.stdout.isatty():
        raise click.UsageError("standard output is a terminal: name a file for the object's bytes")
    if path != "-" and not Path(path).parent.is_dir():
        raise click.UsageError(f"{path} cannot be written: there is no directory {Path(path).parent}")

    async def work(client: StoreClient) -> None:
        stat = await client.stat_existing(name)
        data = np.empty(stat.nbytes, np.uint8)
        await client.get_into(name, data, required=True)
        if path == "-":
            sys.stdout.buffer.write(data.data)
            return
        # FILE is complete or absent, also after a crash.
        unfinished = Path(f"{path}.part")
        try:
            unfinished.write_bytes(data.data)
            unfinished.rename(path)
        except OSError as error:
            raise click.ClickException(f"{path} cannot be written: {error.strerror}") from error

    target.run(work)


@store.command("ls")
@click.argument("prefix", default="")
@json_option
@_on_target
def ls_command(target: _Target, prefix: str, as_json: bool) -> None:
    """List the objects with names that begin with PREFIX."""

    async def work(client: StoreClient) -> None:
        objects = await client.ls(prefix)
        if as_json:
            click.echo(json.dumps([_plain(each) for each in objects], indent=2))
        else:
            console.print(_objects_table(objects))

    target.run(work)


@store.command("stat")
@click.argument("name", required=False)
@json_option
@_on_target
def stat_command(target: _Target, name: str | None, as_json: bool) -> None:
    """Describe the object NAME; without it, the capacity and use of each store node."""

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

    target.run(work)


@store.command("evict")
@click.argument("names", nargs=-1, metavar="NAME...")
@click.option("--all", "everything", is_flag=True, help="Every object of this tenant.")
@_on_target
def evict_command(target: _Target, names: tuple[str, ...], everything: bool) -> None:
    """Drop every copy of these objects."""
    if bool(names) == everything:
        raise click.UsageError("name the objects to drop, or give --all")

    async def work(client: StoreClient) -> int:
        wanted = [each.name for each in await client.ls()] if everything else list(names)
        num_removed = await client.batch_remove(wanted)
        messages.print(f"{num_removed} of {len(wanted)} objects dropped")
        return 0 if num_removed == len(wanted) else 1

    target.run(work)


@store.command("verify")
@_on_target
def verify_command(target: _Target) -> None:
    """Check every block and chunk on every store node, and drop damaged ones.

    Exit code 1: something was damaged, or a node did not answer.
    """

    async def work(client: StoreClient) -> int:
        return await verify_nodes(await client.nodes(), messages)

    target.run(work)


def _read(file: str) -> np.ndarray[Any, np.dtype[np.uint8]]:
    if file == "-":
        return np.frombuffer(sys.stdin.buffer.read(), np.uint8)
    path = Path(file)
    if not path.is_file():
        raise click.UsageError(f"{file} is not a file")
    try:
        # Mapped, so that pages go from the page cache to the node. An empty file cannot be mapped.
        return np.memmap(path, np.uint8, "r") if path.stat().st_size else np.empty(0, np.uint8)
    except OSError as error:
        raise click.UsageError(f"{file} cannot be read: {error.strerror}") from error


def _plain(stat: ObjectStat) -> dict[str, Any]:
    return {**asdict(stat), "shape": list(stat.shape), "nodes": list(stat.nodes)}


def _objects_table(objects: list[ObjectStat]) -> Table:
    table = plain_table(("name", "dtype", "shape", "put", "on"), right=("size",))
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
    table = plain_table(("node", "keeps", "tier"), right=("used", "of", "blocks", "your objects"))
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


def size(nbytes: int) -> str:
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if nbytes >= unit:
            return f"{nbytes / unit:.1f} {name}"
    return f"{nbytes} B"
