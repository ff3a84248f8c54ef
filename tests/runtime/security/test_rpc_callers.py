"""Real gRPC servers and channels: who is admitted with keys, with certificates, and with neither."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path

import grpc.aio
import pytest

from moonpool.protos import node_pb2, node_pb2_grpc
from moonpool.runtime import rpc
from moonpool.runtime.config.security_options import SecurityOptions
from moonpool.runtime.errors import ConfigError, NodeUnavailable, RemoteError
from moonpool.runtime.security import certificates, process, revocation, tls
from moonpool.runtime.security.call_tokens import RoleKeys
from moonpool.runtime.security.local_key import local_key
from moonpool.runtime.security.process import Security
from moonpool.runtime.security.roles import Caller

KEY = SecurityOptions(cluster_key="0123456789abcdef")


class Node(node_pb2_grpc.NodeServicer):
    def __init__(self) -> None:
        self.callers: list[Caller | None] = []

    async def Drain(self, request: node_pb2.DrainRequest, context: object) -> node_pb2.DrainReply:
        self.callers.append(process.caller.get())
        return node_pb2.DrainReply()


@asynccontextmanager
async def serving(options: SecurityOptions) -> AsyncIterator[tuple[Node, str]]:
    node = Node()
    process.use(Security(options, Caller("node", "n")))
    server, port = await rpc.serve([(node_pb2_grpc.add_NodeServicer_to_server, node)], "127.0.0.1", 0)
    try:
        yield node, f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


async def drain(address: str, options: SecurityOptions, role: str = "operator") -> None:
    process.use(Security(options, Caller(role, "me")))
    async with rpc.channel(address) as channel:
        with rpc.node_errors("n"):
            await node_pb2_grpc.NodeStub(channel).Drain(node_pb2.DrainRequest(), timeout=10)


async def test_without_a_key_nothing_is_demanded() -> None:
    async with serving(SecurityOptions()) as (node, address):
        await drain(address, SecurityOptions())
        assert node.callers == [None]


async def test_a_call_needs_the_key_of_the_cluster_and_a_role_that_may_make_it() -> None:
    async with serving(KEY) as (node, address):
        with pytest.raises(RemoteError, match="no token"):
            await drain(address, SecurityOptions())
        with pytest.raises(RemoteError, match="another cluster key"):
            await drain(address, SecurityOptions(cluster_key="fedcba9876543210"))
        with pytest.raises(RemoteError, match="not for the role client"):
            await drain(address, KEY, role="client")
        assert node.callers == []
        await drain(address, KEY)
        assert node.callers == [Caller("operator", "me")]


async def test_a_captured_call_is_refused_when_it_is_sent_again() -> None:
    async with serving(KEY) as (node, address):
        captured = Security(KEY, Caller("operator", "me")).metadata("Node/Drain")
        async with grpc.aio.insecure_channel(address) as channel:
            stub = node_pb2_grpc.NodeStub(channel)
            await stub.Drain(node_pb2.DrainRequest(), metadata=captured)
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await stub.Drain(node_pb2.DrainRequest(), metadata=captured)
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert len(node.callers) == 1


async def test_a_process_without_an_identity_signs_as_an_operator_and_demands_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    key = local_key()
    monkeypatch.setattr(process, "_current", None)
    assert process.current().metadata("Node/Drain")
    assert process.current().admit("Node/Drain", "", dict) is None
    async with serving(SecurityOptions(cluster_key=key)) as (node, address):
        monkeypatch.setattr(process, "_current", None)
        async with rpc.channel(address) as channel:
            await node_pb2_grpc.NodeStub(channel).Drain(node_pb2.DrainRequest(), timeout=10)
        assert [caller.role for caller in node.callers if caller] == ["operator"]


def issue(directory: Path, role: str, name: str, days: int = 1) -> SecurityOptions:
    file = certificates.issue(directory, Caller(role, name), days=days)
    return SecurityOptions(cert=str(file), key=str(file.with_suffix(".key")), ca=str(directory / "ca.pem"))


@pytest.fixture
def authority(tmp_path: Path) -> Path:
    certificates.init(tmp_path / "ours", days=1)
    return tmp_path / "ours"


async def test_certificates_of_the_authority_are_admitted_by_their_role(authority: Path) -> None:
    async with serving(issue(authority, "node", "n")) as (node, address):
        await drain(address, issue(authority, "operator", "me"))
        assert node.callers == [Caller("operator", "me")]
        with pytest.raises(RemoteError, match="not for the role client"):
            await drain(address, issue(authority, "client", "reader"))


async def test_strangers_are_refused_by_the_handshake(authority: Path, tmp_path: Path) -> None:
    certificates.init(tmp_path / "other", days=1)
    async with serving(issue(authority, "node", "n")) as (node, address):
        with pytest.raises(NodeUnavailable):
            await drain(address, SecurityOptions())
        with pytest.raises(NodeUnavailable):
            await drain(address, issue(tmp_path / "other", "operator", "me"))
        with pytest.raises(NodeUnavailable):
            await drain(address, issue(authority, "operator", "late", days=0))
        assert node.callers == []


async def test_a_client_does_not_talk_to_a_server_with_a_clients_certificate(authority: Path) -> None:
    async with serving(issue(authority, "client", "pretender")) as (node, address):
        with pytest.raises(NodeUnavailable):
            await drain(address, issue(authority, "operator", "me"))
        assert node.callers == []


async def test_changed_files_are_used_and_a_running_call_goes_on(
    authority: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tls, "LOOK_AGAIN_S", 0.0)
    mine = issue(authority, "operator", "me")
    async with serving(issue(authority, "node", "n")) as (node, address):
        process.use(Security(mine, Caller("operator", "me")))
        async with rpc.channel(address) as channel:
            stub = node_pb2_grpc.NodeStub(channel)
            await stub.Drain(node_pb2.DrainRequest(), timeout=10)
            # Another authority for all: only processes that read the new files understand each other.
            for file in ("ca.pem", "ca.key"):
                (authority / file).unlink()
            certificates.init(authority, days=1)
            issue(authority, "node", "n")
            issue(authority, "operator", "me")
            async with asyncio.timeout(20):
                while len(node.callers) < 2:
                    try:
                        await stub.Drain(node_pb2.DrainRequest(), timeout=10)
                    except grpc.aio.AioRpcError as error:
                        if error.code() is not grpc.StatusCode.UNAVAILABLE:
                            raise


def test_a_missing_file_is_told_before_the_first_call(tmp_path: Path) -> None:
    options = SecurityOptions(cert="/none/c.pem", key="/none/c.key", ca="/none/ca.pem")
    with pytest.raises(ConfigError, match=r"/none/ca\.pem cannot be read"):
        Security(options, Caller("node", "n"))


def test_the_key_of_local_clusters_is_one_file_only_the_user_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    key = local_key()
    assert key == local_key()
    assert len(key) == 64
    file = tmp_path / "moonpool" / "cluster_key"
    assert file.stat().st_mode & 0o777 == 0o600
    assert list(file.parent.iterdir()) == [file]
    monkeypatch.setenv("XDG_STATE_HOME", "/proc/none")
    assert len(local_key()) == 64


def test_an_empty_file_of_that_key_is_replaced_and_one_that_cannot_be_read_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power loss can leave it empty. Without a key, calls would neither be signed nor checked."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    file = tmp_path / "moonpool" / "cluster_key"
    file.parent.mkdir()
    file.write_text("\n")
    with ThreadPoolExecutor(8) as several:
        made = set(several.map(lambda _: local_key(), range(8)))
    assert made == {local_key()} == {file.read_text()}
    assert len(local_key()) == 64
    assert file.stat().st_mode & 0o777 == 0o600
    assert list(file.parent.iterdir()) == [file]
    file.unlink()
    file.mkdir()
    assert len(local_key()) == 64
    assert list(file.parent.iterdir()) == [file]


async def test_a_revoked_certificate_is_refused_with_its_reason_at_once(
    authority: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tls, "LOOK_AGAIN_S", 0.0)
    async with serving(issue(authority, "node", "n")) as (node, address):
        stolen = issue(authority, "operator", "stolen")
        process.use(Security(stolen, Caller("operator", "stolen")))
        async with rpc.channel(address) as channel:
            stub = node_pb2_grpc.NodeStub(channel)
            await stub.Drain(node_pb2.DrainRequest(), timeout=10)
            revocation.revoke(authority, Caller("operator", "stolen"), "key-compromise")
            refused = pytest.raises(RemoteError, match=r"operator stolen .* was revoked: key-compromise")
            with refused, rpc.node_errors("n"):
                await stub.Drain(node_pb2.DrainRequest(), timeout=10)
        assert len(node.callers) == 1
        await drain(address, issue(authority, "operator", "other"))


def test_commands_have_the_identity_of_the_environment(
    authority: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "_current", None)
    monkeypatch.setenv("MOONPOOL_CLUSTER_KEY", KEY.cluster_key)
    assert process.current().me.role == "operator" and process.current().demands_key
    monkeypatch.setenv("MOONPOOL_CLUSTER_KEY", RoleKeys(KEY.cluster_key).text_of("client"))
    assert process.current().me.role == "client"
    given = issue(authority, "client", "reader")
    for name, value in (("CERT", given.cert), ("KEY", given.key), ("CA", given.ca)):
        monkeypatch.setenv(f"MOONPOOL_{name}", value)
    assert process.current().me == Caller("client", "reader")
    assert process.current().tls is not None
    monkeypatch.delenv("MOONPOOL_KEY")
    with pytest.raises(ConfigError, match="together"):
        process.current()
