"""``moonpool index``: verify the index of KV blocks, and follow other engines' KV events."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from moonpool.client import Client
from moonpool.commands.options import (
    api_key,
    api_key_option,
    config_options,
    console,
    plain_table,
)
from moonpool.conductor.fleet.served_model import ServedModel
from moonpool.kvstore.blocks.keys import root_key
from moonpool.kvstore.events.curve import PLAIN_EVENTS, EndpointInvalid, stays_here
from moonpool.kvstore.events.external_engine import ExternalNode
from moonpool.kvstore.events.subscriber import EventSource
from moonpool.kvstore.index.comparison import AskMirror, Held, NodeFinding, repair, verify
from moonpool.kvstore.index.redis.acl import redis_users
from moonpool.kvstore.index.redis.client import connect
from moonpool.kvstore.index.redis.kv_index import KVIndex, replay
from moonpool.kvstore.index.redis.node_record import EXTERNAL_ROLE, NodeRecord
from moonpool.runtime.config.loading import load_config
from moonpool.runtime.config.options import Config
from moonpool.runtime.errors import ConfigError
from moonpool.runtime.redaction import redacted
from moonpool.runtime.security import process


@click.group()
def index() -> None:
    """Verify the index of KV blocks, follow the KV events of other engines, or make its Redis's users."""


_redis_option = click.option("--redis", metavar="URL", help="The index's Redis (index.redis_url).")


def _config(file: Path | None, sets: Sequence[str], redis: str | None) -> Config:
    config = load_config(file, [*sets, *([f"index.redis_url={redis}"] if redis else [])])
    if not config.index.redis_url:
        raise ConfigError(
            "the index is not configured: name its Redis with --redis redis://HOST:PORT", "index.redis_url"
        )
    process.use_as_client(config.security)
    return config


@index.command("verify")
@click.option("--url", multiple=True, envvar="MOONPOOL_URL", help="Compare this conductor's mirror too.")
@api_key_option
@click.option("--repair", "mend", is_flag=True, help="Correct the index where it differs.")
@_redis_option
@config_options
def verify_command(
    url: Sequence[str], mend: bool, redis: str | None, file: Path | None, sets: Sequence[str]
) -> None:
    """Compare the index in Redis with the nodes' blocks, and conductors' mirrors with the index.

    Exit code 1: something differs (or, with --repair, differed), or a node could not be asked.
    """
    sys.exit(asyncio.run(_verify(_config(file, sets, redis), url, mend, api_key())))


async def _verify(config: Config, urls: Sequence[str], mend: bool, key: str) -> int:
    redis = connect(config.index.redis_url)
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(redis.aclose)
        kv_index = KVIndex(redis, config.index.namespace)
        mirrors: dict[str, AskMirror] = {}
        for each in urls:
            client = await stack.enter_async_context(Client(each, api_key=key))
            mirrors[f"mirror of {each}"] = _mirror_of(client)
        findings = await verify(kv_index, mirrors)
        _show(findings)
        if not findings:
            where = redacted(config.index.redis_url)
            console.print(f"no node is in the index {config.index.namespace} at {where}")
        differs = any(any(finding.differences) for finding in findings)
        if differs and mend:
            console.print(f"corrected: {await repair(kv_index, findings):,} entries")
        elif differs:
            console.print("correct it with: moonpool index verify --repair")
    unasked = any(finding.unasked and finding.record.role != EXTERNAL_ROLE for finding in findings)
    return int(differs or unasked)


def _mirror_of(client: Client) -> AskMirror:
    async def read_node_blocks(node_id: str) -> Held:
        return replay([await client.index_blocks(node_id)])

    return read_node_blocks


def _show(findings: Sequence[NodeFinding]) -> None:
    table = plain_table(("node", "role", "compared"), ("blocks", "missing", "wrong tier", "stale"))
    for finding in findings:
        record = finding.record
        if finding.unasked:
            table.add_row(
                record.node_id, record.role, f"not asked: {finding.unasked}", str(finding.num_blocks)
            )
        for each in finding.differences:
            table.add_row(
                record.node_id,
                record.role,
                each.subject,
                str(finding.num_blocks),
                *(str(len(part)) for part in (each.missing, each.wrong, each.stale)),
                style="red" if each else "",
            )
    console.print(table)


@index.command("acl")
@click.argument("directory", type=click.Path(file_okay=False, path_type=Path))
@click.option(
    "--redis", metavar="URL", default="redis://127.0.0.1:6379", show_default=True, help="Of all processes."
)
@config_options
def acl_command(directory: Path, redis: str, file: Path | None, sets: Sequence[str]) -> None:
    """Write users of the index's Redis into DIRECTORY, one for each role, with new passwords.

    \b
    users.acl           for redis-server --aclfile: digests of the passwords; the user `default` is off
    node.url …          the URL of each role: --set index.redis_url=@DIRECTORY/node.url

    Each user may run the commands that its role needs, on the keys of index.namespace and of the further
    models, NAMESPACE/NAME. Add users of your own for administration and replication.
    """
    users = redis_users(redis, load_config(file, sets).index.namespace)
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    files = {f"{user.role}.url": user.url for user in users}
    files["users.acl"] = "\n".join(["user default off", *(user.line for user in users)])
    if found := [name for name in files if (directory / name).exists()]:
        raise ConfigError(f"{directory} has {found[0]} already: processes may use its passwords")
    for name, text in files.items():
        with os.fdopen(os.open(directory / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as out:
            out.write(text + "\n")
    console.print(f"redis-server --aclfile {(directory / 'users.acl').absolute()}", soft_wrap=True)
    for user in users:
        console.print(
            f"{user.role}: --set index.redis_url=@{(directory / user.role).absolute()}.url", soft_wrap=True
        )


@index.command("follow")
@click.option(
    "--zmq", "endpoint", required=True, metavar="ADDRESS", help="The engine's KV events: tcp://HOST:5557."
)
@click.option("--replay", default="", metavar="ADDRESS", help="The engine's replay socket: tcp://HOST:5558.")
@click.option("--topic", default="", metavar="TEXT", help="Only this topic (kv@POD@MODEL).")
@click.option("--node", required=True, metavar="NAME", help="The engine's name in the index.")
@click.option(
    "--plain", is_flag=True, help="Its events come in clear, as vLLM's do: the network must be trusted."
)
@_redis_option
@config_options
def follow_command(
    endpoint: str,
    replay: str,
    topic: str,
    node: str,
    plain: bool,
    redis: str | None,
    file: Path | None,
    sets: Sequence[str],
) -> None:
    """Keep the blocks of another engine (vLLM, SGLang) in the index, by its KV events.

    Start the engine with --kv-events-config '{"enable_kv_cache_events": true, "publisher": "zmq",
    "endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5558"}'. It must serve the model of this
    configuration (model.path), and a Moonpool node of that model must be in the index. vLLM has no CURVE:
    its events from other machines need --plain, and doctor shows them.
    """
    config = _config(file, sets, redis)
    try:
        asyncio.run(_follow(config, endpoint, replay, topic, node, plain=plain))
    except EndpointInvalid as error:
        raise click.UsageError(str(error)) from error


async def _follow(
    config: Config, endpoint: str, replay_endpoint: str, topic: str, name: str, *, plain: bool
) -> None:
    source = EventSource(endpoint, replay_endpoint, topic=topic, plain=plain)
    redis = connect(config.index.redis_url)
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(source.close)
        stack.push_async_callback(redis.aclose)
        kv_index = KVIndex(redis, config.index.namespace)
        layouts = _layouts(config)
        like = await _node_with_layout(kv_index, config, layouts)
        record = NodeRecord(name, time.time_ns(), EXTERNAL_ROLE, model=like.model)
        if plain and not all(map(stays_here, filter(None, (endpoint, replay_endpoint)))):
            record.extra[PLAIN_EVENTS] = endpoint
        follower = ExternalNode(
            kv_index,
            record,
            config.index,
            block_size=config.engine.block_size,
            root_of=lambda adapter: root_key(
                model=like.model.encode(), layout=layouts[like.layout], adapter=adapter
            ),
        )
        await follower.publisher.start()
        stack.push_async_callback(follower.publisher.close)
        console.print(f"following {endpoint} as {name}; Ctrl-C ends it and removes it from the index")
        task = asyncio.create_task(follower.follow(source.batches()))
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, task.cancel)
        with contextlib.suppress(asyncio.CancelledError):
            await task


def _layouts(config: Config) -> dict[str, Any]:
    model = ServedModel.from_checkpoint(
        config.model.directory, block_size=config.engine.block_size, name=config.model.served_name
    )
    return model.layouts()


async def _node_with_layout(kv_index: KVIndex, config: Config, layouts: Mapping[str, Any]) -> NodeRecord:
    """Return a node that serves the configured model: its record has the revision and dtype of block keys.

    Raises:
        ConfigError: there is none.
    """
    for record in (await kv_index.nodes()).values():
        if record.model and record.layout in layouts:
            return record
    raise ConfigError(
        f"no node in the index serves {config.model.served_name} with blocks of {config.engine.block_size} "
        "tokens: start one, or set model.path and engine.block_size as it has them",
        "model.path",
    )
