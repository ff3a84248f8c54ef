"""Attacks on the gRPC ports: strangers, wrong roles, replays, garbage and floods."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from dataclasses import replace
from pathlib import Path

import grpc.aio
import hypothesis
import hypothesis.strategies as st
import pytest
from google.protobuf.empty_pb2 import Empty

from moonpool.runtime.config.options import SecurityOptions
from moonpool.runtime.security import certificates, revocation
from moonpool.runtime.security.call_tokens import RoleKeys, TokenSigner
from moonpool.runtime.security.process import TOKEN
from moonpool.runtime.security.roles import PERMITTED, ROLES, Caller
from tests.attack.conftest import KEY, Target, channel_as, issued
from tests.cluster.conftest import eventually


def _reply(data: bytes | None) -> Empty:
    return Empty.FromString(data or b"")  # None: the call ended without one


async def call(channel: grpc.aio.Channel, method: str, request: bytes = b"", timeout_s: float = 20) -> str:
    """The status of one call, as a name; OK where it was served."""
    made = channel.unary_unary(f"/moonpool.{method}", response_deserializer=_reply)
    try:
        await made(request, timeout=timeout_s)
    except grpc.aio.AioRpcError as error:
        return error.code().name
    return "OK"


# What somebody has who does not belong to the cluster.
STRANGERS = [
    ("by_key", "none"),
    ("by_key", "wrong"),
    *(("by_certificates", what) for what in ("none", "wrong", "expired")),
]
BY_KEY = pytest.mark.parametrize("target", ["by_key"], indirect=True)


@pytest.fixture
def stranger(request: pytest.FixtureRequest, target: Target, tmp_path: Path) -> SecurityOptions:
    if request.param == "none":
        return SecurityOptions()
    if not target.has_tls:
        return SecurityOptions(cluster_key="the key of another cluster")
    if request.param == "expired":
        return target.proof("operator", days=0)
    certificates.init(tmp_path / "other", days=1)
    return issued(tmp_path / "other", "operator")


@pytest.mark.parametrize(("target", "stranger"), STRANGERS, indirect=True)
async def test_a_stranger_calls_no_method_of_any_port(target: Target, stranger: SecurityOptions) -> None:
    for address in (await target.rpc_addresses()).values():
        async with channel_as(address, stranger, "operator") as channel:
            # A handshake that fails is tried again until the time limit: all at once.
            timeout_s = 2 if target.has_tls else 20
            found = await asyncio.gather(
                *(call(channel, method, timeout_s=timeout_s) for method in PERMITTED)
            )
        if target.has_tls:
            assert set(found) <= {"UNAVAILABLE", "DEADLINE_EXCEEDED"}
        else:
            assert set(found) == {"UNAUTHENTICATED", "UNIMPLEMENTED"}
    if not target.has_tls:
        await target.logged(event="refused", what="Node/Drain", why="the call")
    await target.serves()


@pytest.mark.parametrize("role", ROLES)
async def test_a_role_calls_only_what_it_may(target: Target, role: str) -> None:
    proof = target.proof(role)
    for address in (await target.rpc_addresses()).values():
        async with channel_as(address, proof, role) as channel:
            for method, roles in PERMITTED.items():
                if role not in roles:
                    assert await call(channel, method) in ("PERMISSION_DENIED", "UNIMPLEMENTED"), method
    if role != "conductor":
        await target.logged(event="refused", what="Decode", why="is not for the role", who=role)
    await target.serves()


@BY_KEY
async def test_a_call_is_not_replayed_nor_made_from_old_tokens(target: Target) -> None:
    """TLS keeps calls from being captured."""
    keys, me = RoleKeys(KEY), Caller("operator", "a captured one")
    address = (await target.rpc_addresses())["prefill-0"]
    async with grpc.aio.insecure_channel(address) as channel:
        status = channel.unary_unary("/moonpool.Node/Status")
        drain = channel.unary_unary("/moonpool.Node/Drain")
        token = TokenSigner(keys, me).token("Node/Status")
        await status(b"", metadata=((TOKEN, token),))
        old = TokenSigner(keys, me, clock=lambda: time.time() - 60).token("Node/Drain")
        early = TokenSigner(keys, me, clock=lambda: time.time() + 60).token("Node/Drain")
        forged = token.replace("operator", "conductor")
        for method, captured, why in (
            (status, token, "was used before"),
            (drain, token, "for another method"),
            (drain, old, "s old"),
            (drain, early, "compare the clocks"),
            (drain, forged, "another cluster key"),
            (drain, "x" * 6000, "malformed"),
            (drain, " ".join("operator") * 50, "malformed"),
            (drain, "operator a b 1 " + "9" * 400 + " x", "malformed"),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await method(b"", metadata=((TOKEN, captured),))
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
            assert why in (refused.value.details() or "")
    await target.logged(event="refused", why="was used before")
    await target.serves()


@pytest.mark.slow
def test_any_bytes_are_refused_as_a_message_or_served(target: Target) -> None:
    """From somebody who has the key: no process ends."""
    channels: dict[tuple[str, str], grpc.aio.Channel] = {}

    async def send(addresses: dict[str, str], method: str, body: bytes) -> None:
        role = sorted(PERMITTED[method])[0]
        for address in addresses.values():
            if (channel := channels.get((address, role))) is None:
                channel = channels[address, role] = channel_as(address, target.proof(role), role)
            made = channel.unary_unary(f"/moonpool.{method}", response_deserializer=_reply)
            with contextlib.suppress(grpc.aio.AioRpcError):
                await made(body, timeout=5)
        assert all(child.returncode is None for child in target.cluster.children.values())

    async def close() -> None:
        await asyncio.gather(*(channel.close() for channel in channels.values()))

    # Draining would be served.
    methods = st.sampled_from(sorted(PERMITTED.keys() - {"Node/Drain"}))
    with asyncio.Runner() as runner:
        addresses = runner.run(target.rpc_addresses())

        @hypothesis.settings(max_examples=25, deadline=None)
        @hypothesis.given(method=methods, body=st.binary(max_size=200))
        def is_survived(method: str, body: bytes) -> None:
            runner.run(send(addresses, method, body))

        is_survived()
        runner.run(close())


async def test_frames_that_are_not_http2(target: Target) -> None:
    """Garbage, slow garbage, half a preface, and a preface with endless settings."""
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    settings = b"\x00\x00\x06\x04\x00\x00\x00\x00\x00" + os.urandom(6)
    silent: list[asyncio.StreamWriter] = []
    for address in (await target.rpc_addresses()).values():
        host, _, port = address.rpartition(":")
        for data in (os.urandom(4096), preface[:10], preface + settings * 2000, b"GET / HTTP/1.1\r\n\r\n"):
            _, writer = await asyncio.open_connection(host, int(port))
            writer.write(data)
            silent.append(writer)
        for _ in range(50):
            _, writer = await asyncio.open_connection(host, int(port))
            silent.append(writer)
    await target.serves()
    for writer in silent:
        writer.close()


@pytest.mark.parametrize("target", ["by_certificates"], indirect=True)
async def test_a_revoked_certificate_is_refused_with_its_reason(target: Target) -> None:
    assert target.authority is not None
    thief = Caller("operator", "who left")
    certificates.issue(target.authority, thief, days=1)
    file = certificates.file_of(target.authority, thief)
    proof = replace(target.proof("operator"), cert=str(file), key=str(file.with_suffix(".key")))
    address = (await target.rpc_addresses())["prefill-0"]
    async with channel_as(address, proof, "operator") as channel:
        assert await call(channel, "Node/Status") == "OK"
        revocation.revoke(target.authority, thief, "key-compromise")

        async def refused() -> bool:
            # Also on the connection that was there before.
            return await call(channel, "Node/Status") == "UNAUTHENTICATED"

        await eventually(refused)
    await target.logged(event="refused", process="prefill-0", why="revoked")
    await target.serves()


@BY_KEY
async def test_a_flood_of_refused_calls_fills_no_disk_and_stops_nobody(target: Target) -> None:
    address = (await target.rpc_addresses())["decode-0"]
    audit = Path(target.cluster.config.audit.path) / "audit-decode-0.jsonl"
    before = audit.stat().st_size if audit.exists() else 0
    async with channel_as(address, SecurityOptions(), "operator") as channel:

        async def flood() -> None:
            for _ in range(100):
                assert await call(channel, "Node/Drain") == "UNAUTHENTICATED"

        async with asyncio.TaskGroup() as group:
            for _ in range(20):
                group.create_task(flood())
            group.create_task(target.serves())
    assert audit.stat().st_size - before < 100_000
