"""The connection to a decode node, with certificates that are renewed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import grpc.aio
import pytest

from moonpool.conductor.fleet.node_client import DecodeClient
from moonpool.protos import node_pb2, node_pb2_grpc
from moonpool.runtime import rpc
from moonpool.runtime.config.security_options import SecurityOptions
from moonpool.runtime.errors import NodeUnavailable
from moonpool.runtime.security import certificates, process, tls
from moonpool.runtime.security.process import Security
from moonpool.runtime.security.roles import Caller

_KEY = ("r", 1)
# Of an hour: in the tests that let it pass.
_SHORTER = 10_000


class Node(node_pb2_grpc.DecodeNodeServicer, node_pb2_grpc.NodeServicer):
    """Sends what is put into ``steps``."""

    def __init__(self) -> None:
        self.steps: asyncio.Queue[node_pb2.StepTokens] = asyncio.Queue()
        self.num_streams = 0

    async def Tokens(
        self, request: node_pb2.TokensRequest, context: object
    ) -> AsyncIterator[node_pb2.StepTokens]:
        self.num_streams += 1
        while True:
            yield await self.steps.get()

    async def Drain(self, request: node_pb2.DrainRequest, context: object) -> node_pb2.DrainReply:
        return node_pb2.DrainReply()

    def say(self, token_id: int) -> None:
        token = node_pb2.TokenOut(request_id=_KEY[0], attempt=_KEY[1], token_id=token_id)
        self.steps.put_nowait(node_pb2.StepTokens(tokens=[token]))


class Attempt:
    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.error: NodeUnavailable | None = None

    def put(self, token: node_pb2.TokenOut) -> None:
        self.token_ids.append(token.token_id)

    def fail(self, error: NodeUnavailable) -> None:
        self.error = error


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not true():  # noqa: ASYNC110 (gRPC and the client decide)
            await asyncio.sleep(0.01)


@pytest.fixture
def authority(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tls, "LOOK_AGAIN_S", 0.0)
    certificates.init(tmp_path, days=1)
    return tmp_path


def use(authority: Path, role: str) -> None:
    """Issue a certificate, in place of an earlier one, and be its owner."""
    me = Caller(role, "c")
    file = certificates.issue(authority, me, days=1)
    key, ca = file.with_suffix(".key"), authority / "ca.pem"
    process.use(Security(SecurityOptions(cert=str(file), key=str(key), ca=str(ca)), me))


@asynccontextmanager
async def following(authority: Path) -> AsyncIterator[tuple[Node, DecodeClient, Attempt]]:
    node, attempt = Node(), Attempt()
    use(authority, "node")
    add = node_pb2_grpc.add_DecodeNodeServicer_to_server, node_pb2_grpc.add_NodeServicer_to_server
    server, port = await rpc.serve([(each, node) for each in add], "127.0.0.1", 0)
    use(authority, "conductor")
    client = DecodeClient(
        "d", f"127.0.0.1:{port}", lambda: None, conductor_id="c", on_step=lambda step, count: None
    )
    client.attach(_KEY, attempt)
    client.start()
    try:
        await until(lambda: client.connected)
        yield node, client, attempt
    finally:
        await client.close()
        await server.stop(None)


class Hour:
    """Lets gRPC's channels wait ``_SHORTER`` times shorter for their calls when they close."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.began = self.passed = False
        kind = type(grpc.aio.insecure_channel("127.0.0.1:1"))
        close = kind.close

        async def shorter(channel: grpc.aio.Channel, grace: float | None = None) -> None:
            if grace:
                self.began = True
                asyncio.get_running_loop().call_later(3600 / _SHORTER, self._pass)
            await close(channel, grace and grace / _SHORTER)

        monkeypatch.setattr(kind, "close", shorter)

    def _pass(self) -> None:
        self.passed = True


async def test_a_renewed_certificate_ends_no_request_however_long_it_runs(
    authority: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with following(authority) as (node, client, attempt):
        node.say(1)
        await until(lambda: attempt.token_ids == [1])
        hour = Hour(monkeypatch)
        certificates.issue(authority, Caller("conductor", "c"), days=1)
        await client.drain()  # any call
        await until(lambda: hour.began)
        node.say(2)
        await until(lambda: attempt.token_ids == [1, 2])
        await until(lambda: hour.passed)
        await client.drain()
        node.say(3)
        await until(lambda: attempt.token_ids == [1, 2, 3] or attempt.error is not None)
        assert attempt.error is None
        assert (attempt.token_ids, node.num_streams) == ([1, 2, 3], 1)


async def test_a_stream_that_is_cancelled_in_this_process_is_opened_again(
    authority: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with following(authority) as (node, client, attempt):
        monkeypatch.setattr(rpc.client, "_OLD_CALLS_S", 0.01)
        certificates.issue(authority, Caller("conductor", "c"), days=1)
        await client.drain()
        await until(lambda: attempt.error is not None)
        await until(lambda: client.connected and node.num_streams == 2)
        assert attempt.error is not None and "cancelled here" in attempt.error.reason
        assert "a defect" not in caplog.text
