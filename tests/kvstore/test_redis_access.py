"""Users of the index's Redis, and TLS to it."""

from __future__ import annotations

import asyncio
import ssl
import subprocess
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from redis.exceptions import RedisError

from moonpool.commands.index import acl_command
from moonpool.conductor.canary.record import CanaryRecords, new_sides
from moonpool.conductor.fleet.rollout.record import RolloutRecord, RolloutStatus
from moonpool.conductor.planning.lease import PlannerLease
from moonpool.kvstore.blocks.tier import Tier
from moonpool.kvstore.errors import IndexUnavailable
from moonpool.kvstore.index.redis.client import connect
from moonpool.kvstore.index.redis.kv_index import KVIndex
from moonpool.kvstore.index.redis.node_record import NodeRecord
from moonpool.local.redis_server import find_redis
from moonpool.runtime.config.loading import load_config
from moonpool.runtime.config.models_file import served_models
from moonpool.runtime.config.security_options import SecurityOptions
from moonpool.runtime.errors import ConfigError
from moonpool.runtime.security import certificates, process
from moonpool.runtime.security.process import Security
from moonpool.runtime.security.roles import Caller
from tests.kvstore.nodes import chain
from tests.kvstore.redis_servers import Server, free_ports

# Not a glob.
NAMESPACE = "my[1]*"


@pytest.fixture
async def urls(directory: Path) -> AsyncIterator[dict[str, str]]:
    """By role, of a server with the users that ``moonpool index acl`` makes."""
    made = directory / "users"
    given = [str(made), "--redis", f"unix://{directory}/redis.sock", "--set", f"index.namespace={NAMESPACE}"]
    done = CliRunner().invoke(acl_command, given, catch_exceptions=False)
    assert done.exit_code == 0
    urls = {file.stem: file.read_text().strip() for file in made.glob("*.url")}
    assert all(file.stat().st_mode & 0o77 == 0 for file in made.iterdir())
    for url in urls.values():
        assert url.partition("@")[0].rpartition(":")[2] not in done.output + (made / "users.acl").read_text()
    with pytest.raises(ConfigError, match="already"):
        CliRunner().invoke(acl_command, given, catch_exceptions=False)
    server = Server(directory, "--aclfile", str(made / "users.acl"))
    server.url = urls["operator"]
    await server.start()
    yield urls
    await server.kill()


OTHERS = (
    *(f"{{{NAMESPACE}}}:facts", f"{NAMESPACE}:objects:3", f"{{{NAMESPACE}}}:experts"),
    *("{my1x}:node:a", "{moonpool}:node:a", f"{{{NAMESPACE}2}}:node:a"),
)
REFUSED: list[tuple[object, ...]] = [
    *(("FLUSHALL",), ("FLUSHDB",), ("CONFIG", "GET", "*"), ("KEYS", "*"), ("SCAN", 0), ("DBSIZE",)),
    *(("ACL", "LIST"), ("SHUTDOWN",), ("REPLICAOF", "h", 1), ("MONITOR",), ("CLIENT", "LIST"), ("GET", "x")),
    *(("SCRIPT", "FLUSH"), ("SUBSCRIBE", "x"), ("EVAL", "return redis.call('KEYS', '*')", 0)),
]  # fmt: skip


@pytest.mark.parametrize("role", ["node", "conductor", "operator", "client"])
async def test_each_user_is_refused_what_it_does_not_need(urls: dict[str, str], role: str) -> None:
    redis = connect(urls[role])
    mine = {"node": OTHERS[1:3], "conductor": OTHERS[:1]}.get(role, ())
    more: list[tuple[object, ...]] = [("HGET", key, "x") for key in OTHERS if key not in mine]
    if role == "client":
        more += [
            ("HSET", f"{{{NAMESPACE}}}:node:a", "x", 1),
            ("XADD", f"{{{NAMESPACE}}}:events", "*", "x", 1),
        ]
    for command in REFUSED + more:
        with pytest.raises(RedisError, match=r"(?i)permission|can't run"):
            await redis.execute_command(*command)
    for key in mine:
        assert await redis.execute_command("HGET", key, "x") is None
    await redis.aclose()
    stranger = connect(f"unix://{urls[role].partition('@')[2]}")
    with pytest.raises(RedisError, match=r"(?i)authenticat"):
        await stranger.ping()
    await stranger.aclose()


async def test_a_client_finds_nodes_that_an_operator_registered(urls: dict[str, str]) -> None:
    operator, client = (connect(urls[role]) for role in ("operator", "client"))
    await KVIndex(operator, NAMESPACE).register(NodeRecord("a", 1, "store"), 10)
    assert set(await KVIndex(client, NAMESPACE).nodes()) == {"a"}
    with pytest.raises(IndexUnavailable, match=r"(?i)permission|can't run"):
        await KVIndex(client, NAMESPACE).deregister("a", 1)
    for redis in (operator, client):
        await redis.aclose()


async def test_a_conductor_writes_the_records_that_conductors_share(urls: dict[str, str]) -> None:
    redis = connect(urls["conductor"])
    index = KVIndex(redis, NAMESPACE)
    for name in ("planner", "first_nodes"):
        lease = PlannerLease(index, "c", ttl_s=1.0, clock=time.monotonic, name=name)
        assert (await lease.take()).epoch == 1
    assert await RolloutRecord(index, ttl_s=1.0).begin(RolloutStatus()) == 1
    canaries = CanaryRecords(index)
    await canaries.read()
    assert not canaries.known
    assert await canaries.count("1", "c", new_sides()) == new_sides()
    await redis.aclose()


async def test_each_user_may_do_the_same_for_every_model(urls: dict[str, str]) -> None:
    config = load_config(None, [f"index.namespace={NAMESPACE}", "models.served=large=/l,small=/s"])
    namespaces = [model.config.index.namespace for model in served_models(config).models]
    assert len(set(namespaces)) == 2
    users = {role: connect(url) for role, url in urls.items()}
    for namespace in namespaces:
        of = {role: KVIndex(redis, namespace) for role, redis in users.items()}
        await of["node"].register(NodeRecord("a", 1, "prefill"), 10)
        await of["operator"].register(NodeRecord("b", 1, "store"), 10)
        assert (await PlannerLease(of["conductor"], "c", ttl_s=1.0, clock=time.monotonic).take()).epoch == 1
        for index in of.values():
            assert set(await index.nodes()) == {"a", "b"}
        assert await users["node"].hget(f"{namespace}:objects:3", "x") is None
        with pytest.raises(RedisError, match=r"(?i)permission"):
            await users["client"].hset(f"{{{namespace}}}:node:a", "x", "1")
    for redis in users.values():
        await redis.aclose()


# ---------------------------------------------------------------------- TLS


@pytest.fixture
def certs(tmp_path: Path) -> Path:
    for name in ("ours", "others"):
        certificates.init(tmp_path / name, days=2)
        certificates.issue(tmp_path / name, Caller("node", "redis"), days=2, addresses=["localhost"])
        certificates.issue(tmp_path / name, Caller("node", "a"), days=2)
    return tmp_path


@pytest.fixture
def identity(certs: Path) -> None:
    process.use(secure(certs / "ours"))


def secure(made: Path) -> Security:
    options = SecurityOptions(
        cert=str(made / "node-a.pem"), key=str(made / "node-a.key"), ca=str(made / "ca.pem")
    )
    return Security(options, Caller("node", "a"), serves=False)


@asynccontextmanager
async def in_front_of(path: Path, made: Path) -> AsyncIterator[tuple[int, list[asyncio.StreamWriter]]]:
    """TLS in front of a server without it: a port, and the connections there are."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(made / "ca.pem"))
    context.load_cert_chain(made / "node-redis.pem", made / "node-redis.key")
    context.verify_mode = ssl.CERT_REQUIRED
    tasks: list[asyncio.Task[None]] = []
    open_ones: list[asyncio.StreamWriter] = []

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            writer.write(data)
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        open_ones.append(writer)
        there, back = await asyncio.open_unix_connection(path)
        for each in (copy(reader, back), copy(there, writer)):
            tasks.append(asyncio.create_task(each))

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    async with server:
        yield server.sockets[0].getsockname()[1], open_ones
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.usefixtures("identity")
async def test_the_index_over_tls(server: Server, certs: Path) -> None:
    async with in_front_of(server.path, certs / "ours") as (port, connections):
        redis = connect(f"rediss://localhost:{port}")
        index = KVIndex(redis, "test")
        await index.register(NodeRecord("a", 1, "prefill"), 10)
        await index.publish("a", 1, [(key, Tier.POOL) for key in chain(5)])
        assert len((await index.snapshot())["a"]) == 5
        # Renewed certificates are used by the next connection.
        first = connections[0].get_extra_info("peercert")["serialNumber"]
        certificates.issue(certs / "ours", Caller("node", "a"), days=2)
        connections[0].close()
        with pytest.raises(IndexUnavailable):
            await index.watch()
        await index.watch()
        assert connections[1].get_extra_info("peercert")["serialNumber"] != first
        await redis.aclose()
        # Its certificate names no 127.0.0.1, and one of another authority proves nothing.
        wrong_name = connect(f"rediss://127.0.0.1:{port}")
        with pytest.raises(RedisError, match="IP address mismatch"):
            await wrong_name.ping()
        await wrong_name.aclose()
    async with in_front_of(server.path, certs / "others") as (port, _):
        impostor = connect(f"rediss://localhost:{port}")
        with pytest.raises(RedisError, match="CERTIFICATE_VERIFY_FAILED"):
            await impostor.ping()
        await impostor.aclose()


def test_every_kind_of_client_gets_the_certificates(identity: None, certs: Path) -> None:
    expected = {
        "ssl_ca_certs": str(certs / "ours/ca.pem"),
        "ssl_certfile": str(certs / "ours/node-a.pem"),
        "ssl_keyfile": str(certs / "ours/node-a.key"),
    }
    server = connect("rediss://h:1/2?ssl_ca_certs=/other.pem").connection_pool.connection_kwargs
    assert server.items() >= {**expected, "ssl_ca_certs": "/other.pem"}.items()
    cluster = connect("rediss+cluster://:pw@h1:1,h2:2")
    assert cluster.connection_kwargs.items() >= expected.items()
    master = connect("rediss+sentinel://:pw@h1:1,h2:2/main").connection_pool
    assert master.connection_kwargs.items() >= expected.items()
    for sentinel in master.sentinel_manager.sentinels:
        kwargs = sentinel.connection_pool.connection_kwargs
        assert kwargs.items() >= expected.items()
        assert kwargs["password"] is None
    plain = connect("redis+sentinel://h1:1/main").connection_pool
    assert "ssl_ca_certs" not in plain.connection_kwargs


@pytest.mark.parametrize("url", ["redis://h:1/0", "redis+cluster://h:1,h:2", "redis+sentinel://h:1,h:2/main"])
def test_options_in_the_url_go_first(url: str) -> None:
    client = connect(f"{url}?socket_connect_timeout=9&socket_timeout=8")
    kwargs = client.connection_kwargs if "cluster" in url else client.connection_pool.connection_kwargs
    assert kwargs.items() >= {"socket_connect_timeout": 9.0, "socket_timeout": 8.0}.items()


def has_tls(directory: Path) -> bool:
    command = [str(find_redis().path), "--tls-port", "0", "--port", "0", "--dir", str(directory)]
    return b"tls-port" not in subprocess.run(command, capture_output=True, check=False).stderr


@pytest.mark.usefixtures("identity")
async def test_a_redis_server_with_tls_of_its_own(directory: Path, certs: Path) -> None:
    if not has_tls(directory):
        pytest.skip(f"{find_redis().path} has no TLS: apt install redis-server")
    made, (port,) = certs / "ours", free_ports(1)
    options = ["--tls-port", str(port), "--tls-ca-cert-file", str(made / "ca.pem")]
    options += [
        "--tls-cert-file",
        str(made / "node-redis.pem"),
        "--tls-key-file",
        str(made / "node-redis.key"),
    ]
    server = Server(directory, *options)
    await server.start()
    redis: Any = connect(f"rediss://localhost:{port}")
    index = KVIndex(redis, "test")
    await index.register(NodeRecord("a", 1, "prefill"), 10)
    assert set(await index.nodes()) == {"a"}
    process.use(secure(certs / "others"))
    stranger = connect(f"rediss://localhost:{port}?ssl_ca_certs={made / 'ca.pem'}")
    with pytest.raises((RedisError, OSError)):
        await stranger.ping()
    for client in (redis, stranger):
        await client.aclose()
    await server.kill()
