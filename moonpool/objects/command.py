"""``moonpool store``: objects on store nodes, and the nodes themselves."""

from __future__ import annotations

import asyncio
import functools
import os
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
import numpy as np
from rich.console import Console
from rich.table import Table

from moonpool.commands.options import (
    DEFAULT_URL,
    api_key,
    api_key_option,
    config_options,
    json_option,
    plain_table,
    show,
)
from moonpool.kvstore.client.errors import BadObject, BadUrl, UnknownNode
from moonpool.kvstore.client.queries import ObjectStat
from moonpool.kvstore.client.store import StoreClient
from moonpool.objects.discovery import connect
from moonpool.objects.verification import verify_nodes
from moonpool.runtime.config.loading import load_config
from moonpool.runtime.security import process

# stdout carries the result alone.
messages = Console(highlight=False, stderr=True)


def _with_client(work: Callable[..., Awaitable[int | None]]) -> Callable[..., None]:
    """Make ``work(client, **options)`` a command that exits with its result; code 2 for wrong input.

    Adds the options that name the store and the tenant. The client connects with its first call.
    """

    @functools.wraps(work)
    def command(url: str, tenant: str, file: Path | None, sets: tuple[str, ...], **options: Any) -> None:
        config = load_config(file, sets)
        process.use_as_client(config.security)
        salt, key = os.environ.get("MOONPOOL_TENANT_SALT", ""), api_key()
        namespace, transfer = config.index.namespace, config.transfer

        async def run() -> int | None:
            async with connect(
                url, tenant=tenant, salt=salt, api_key=key, namespace=namespace, transfer=transfer
            ) as client:
                return await work(client, **options)

        try:
            sys.exit(asyncio.run(run()))
        except (BadUrl, BadObject, UnknownNode) as error:
            raise click.UsageError(str(error)) from error

    url_option = click.option(
        "--url",
        default=DEFAULT_URL,
        envvar="MOONPOOL_URL",
        show_default=True,
        help="The conductor's API, or the index's Redis.",
    )
    tenant_option = click.option(
        "--tenant",
        default="",
        envvar="MOONPOOL_TENANT",
        metavar="NAME",
        help="The tenant of the objects; MOONPOOL_TENANT_SALT has its salt.",
    )
    return config_options(tenant_option(url_option(api_key_option(command))))


@click.group()
def store() -> None:
    """Put objects on the cluster's store nodes, get, list, describe, evict and verify them."""


@store.command("put")
@click.argument("path", metavar="FILE|-")
@click.option("--name", metavar="NAME", help="Its name in the store (default: the file's).")
@click.option("--copies", default=1, show_default=True, type=click.IntRange(min=1), help="On how many hosts.")
@click.option("--node", default="", metavar="ID", help="The node of the first copy.")
@click.option("--ttl", "ttl_s", type=float, metavar="SECONDS", help="Remove it after this time.")
@click.option(
    "--pin",
    default="",
    type=click.Choice(["", "soft", "hard"]),
    help="hard: never evict it; soft: evict it after what is not pinned.",
)
@_with_client
async def put_command(
    client: StoreClient,
    path: str,
    name: str | None,
    copies: int,
    node: str,
    ttl_s: float | None,
    pin: str,
) -> None:
    """Store the bytes of FILE; - reads standard input."""
    if path == "-" and name is None:
        raise click.UsageError("standard input has no name: give it one with --name")
    stored_as = name if name is not None else Path(path).name
    data = _read(path)
    began_s = time.perf_counter()
    await client.put(stored_as, data, copies=copies, node=node, ttl_s=ttl_s, pin=pin)
    seconds = time.perf_counter() - began_s
    stat = await client.stat(stored_as)
    holders = ", ".join(stat.nodes) if stat is not None else "no node any more"
    rate = f"{data.nbytes / seconds / 1e9:.2f} GB/s"
    line = f"{stored_as}: {size(data.nbytes)} on {holders} in {seconds:.3f} s, {rate}"
    messages.print(line, markup=False)


@store.command("get")
@click.argument("name")
@click.argument("path", metavar="FILE|-", default="-")
@_with_client
async def get_command(client: StoreClient, name: str, path: str) -> None:
    """Write an object's bytes into FILE, or to standard output."""
    if path == "-" and sys.stdout.isatty():
        raise click.UsageError("standard output is a terminal: name a file for the object's bytes")
    if path != "-" and not Path(path).parent.is_dir():
        raise click.UsageError(f"{path} cannot be written: there is no directory {Path(path).parent}")
    stale: set[str] = set()
    while True:
        stat = await client.stat_existing(name, stale=stale)
        data = np.empty(stat.nbytes, np.uint8)
        try:
            await client.get_into(name, data, required=True, stale=stale)
            break
        except BadObject:
            # It may have been replaced by one of another size meanwhile.
            if (await client.stat_existing(name, stale=stale)).nbytes == stat.nbytes:
                raise
    _say_stale(stale)
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


@store.command("ls")
@click.argument("prefix", default="")
@json_option
@_with_client
async def ls_command(client: StoreClient, prefix: str, as_json: bool) -> None:
    """List the objects with names that begin with PREFIX."""
    stale: set[str] = set()
    objects = await client.ls(prefix, stale=stale)
    _say_stale(stale)
    show([_plain(each) for each in objects], _objects_table(objects), as_json)


@store.command("stat")
@click.argument("name", required=False)
@json_option
@_with_client
async def stat_command(client: StoreClient, name: str | None, as_json: bool) -> None:
    """Describe the object NAME; without it, the capacity and use of each store node."""
    if name is None:
        rows = _usage_rows(await client.usage())
        show(rows, _usage_table(rows), as_json)
    else:
        stale: set[str] = set()
        found = await client.stat_existing(name, stale=stale)
        _say_stale(stale)
        show(_plain(found), _objects_table([found]), as_json)


@store.command("evict")
@click.argument("names", nargs=-1, metavar="NAME...")
@click.option("--all", "everything", is_flag=True, help="Every object of this tenant.")
@_with_client
async def evict_command(client: StoreClient, names: tuple[str, ...], everything: bool) -> int:
    """Drop every copy of these objects."""
    if bool(names) == everything:
        raise click.UsageError("name the objects to drop, or give --all")
    wanted = [each.name for each in await client.ls()] if everything else list(names)
    num_removed = await client.batch_remove(wanted)
    missing = len(wanted) - num_removed
    absent = f"; {missing} did not exist" if missing else ""
    messages.print(f"{num_removed} of {len(wanted)} objects dropped{absent}")
    return 0 if num_removed == len(wanted) else 1


@store.command("verify")
@_with_client
async def verify_command(client: StoreClient) -> int:
    """Check every block and chunk on every store node, and drop damaged ones.

    Exit code 1: something was damaged, or a node did not answer.
    """
    return await verify_nodes(await client.nodes(), messages)


def _say_stale(stale: set[str]) -> None:
    if stale:
        messages.print(
            "stale: Redis does not answer; this is what the store nodes last knew, "
            "and may be replaced or removed",
            style="yellow",
        )


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
    table = plain_table(("name", "dtype", "shape", "put", "on", "pin", "expires"), right=("size",))
    for each in objects:
        shape = "×".join(map(str, each.shape)) or "scalar"
        table.add_row(
            each.name,
            each.dtype,
            shape,
            _date(each.version / 1e6),
            ", ".join(each.nodes),
            each.pin,
            _date(each.expires_s) if each.expires_s else "",
            size(each.nbytes),
        )
    return table


def _date(unix_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(unix_s))


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
