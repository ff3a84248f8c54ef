"""KV events beyond one machine: only subscribers with the cluster's key read them, and only encrypted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import numpy as np
import pytest
import zmq
import zmq.asyncio
from click.testing import CliRunner

from moonpool.commands.certs import certs
from moonpool.doctor.evidence import Evidence
from moonpool.doctor.index_state import _plain_events
from moonpool.kvstore.blocks.keys import BlockKey
from moonpool.kvstore.blocks.tier import Tier
from moonpool.kvstore.events.curve import PLAIN_EVENTS, EndpointInvalid, stays_here
from moonpool.kvstore.events.publisher import EventPublisher
from moonpool.kvstore.events.subscriber import EventSource
from moonpool.kvstore.index.redis.node_record import EXTERNAL_ROLE, NodeRecord
from moonpool.runtime.config.options import EventsOptions
from moonpool.runtime.config.security_options import SecurityOptions
from moonpool.runtime.errors import ConfigError
from moonpool.runtime.security import process
from moonpool.runtime.security.call_tokens import RoleKeys
from moonpool.runtime.security.roles import CLIENT, NODE, Caller

KEY = "a key of the cluster"
ANYWHERE = EventsOptions(zmq_endpoint="tcp://0.0.0.0:*", replay_endpoint="tcp://0.0.0.0:*", interval_s=0.001)


def identity(monkeypatch: pytest.MonkeyPatch, key: str, role: str = NODE) -> None:
    monkeypatch.setattr(
        process, "_current", process.Security(SecurityOptions(cluster_key=key), Caller(role, "n"))
    )


def beyond(endpoint: str) -> str:
    """The address by which another machine would connect."""
    return endpoint.replace("0.0.0.0", "127.0.0.1")


@pytest.fixture
async def publisher(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[EventPublisher]:
    identity(monkeypatch, KEY)
    publisher = EventPublisher(ANYWHERE, 4)
    await publisher.start()
    key = BlockKey(bytes(16))
    publisher.describe([key], np.arange(4, dtype=np.int32))
    publisher.stored(key, Tier.POOL)
    while publisher._pending:  # noqa: ASYNC110 (what is published before anybody subscribes is replayed)
        await asyncio.sleep(0.001)
    yield publisher
    await publisher.close()


def subscriber(
    publisher: EventPublisher,
    monkeypatch: pytest.MonkeyPatch,
    *,
    plain: bool = False,
    replay_timeout_s: float = 60.0,
) -> EventSource:
    # What is on loopback would be plain: here it stands for another machine.
    monkeypatch.setattr("moonpool.kvstore.events.curve.stays_here", lambda endpoint: False)
    return EventSource(
        beyond(publisher.endpoint),
        beyond(publisher.replay_endpoint),
        plain=plain,
        replay_timeout_s=replay_timeout_s,
    )


async def test_a_subscriber_with_the_key_reads_them(
    publisher: EventPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = subscriber(publisher, monkeypatch)
    try:
        async with asyncio.timeout(60):
            async for batch in source.batches():
                if any(
                    getattr(event, "token_ids", None) == [0, 1, 2, 3]
                    for event in getattr(batch, "events", ())
                ):
                    break
    finally:
        source.close()


@pytest.mark.parametrize("key", ["", "another cluster's key"], ids=["plain", "wrong"])
async def test_others_read_and_replay_nothing(
    publisher: EventPublisher, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    identity(monkeypatch, key or KEY)
    source = subscriber(publisher, monkeypatch, plain=not key, replay_timeout_s=0.3)
    try:
        assert await source._replay(0) == []
        reading = asyncio.ensure_future(anext(source.batches()))
        await asyncio.wait([reading], timeout=0.5)
        assert not reading.done()
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
    finally:
        source.close()


async def test_a_client_key_of_its_own_is_refused(publisher: EventPublisher) -> None:
    """Whoever knows the server's public key, which is no secret, cannot read without a client's key."""
    printed = CliRunner().invoke(certs, ["events", "--from", KEY]).output.split("\n")
    server_public, client_public, client_secret = (line.rpartition(" ")[2].encode() for line in printed[:3])
    context = zmq.asyncio.Context()
    try:
        for pair, allowed in ((zmq.curve_keypair(), False), ((client_public, client_secret), True)):
            socket = context.socket(zmq.DEALER)
            socket.curve_serverkey = server_public
            socket.curve_publickey, socket.curve_secretkey = pair
            socket.connect(beyond(publisher.replay_endpoint))
            await socket.send_multipart([b"", bytes(8)])
            assert bool(await socket.poll(60_000 if allowed else 400)) is allowed
    finally:
        context.destroy(linger=0)


async def test_without_a_key_only_this_machine_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    identity(monkeypatch, "")
    for endpoint in ("tcp://*:5557", "tcp://0.0.0.0:*", "tcp://eth0:5557", "tcp://[::]:5557", "ws://*:80"):
        assert not stays_here(endpoint)
        with pytest.raises(EndpointInvalid, match=r"in clear .* set security\.cluster_key, or use tcp://127"):
            await EventPublisher(EventsOptions(zmq_endpoint=endpoint), 4).start()
    for endpoint in ("tcp://127.0.0.1:*", "ipc://x", "inproc://x", "tcp://localhost:1", "tcp://[::1]:1"):
        assert stays_here(endpoint)
    with pytest.raises(EndpointInvalid, match=r"in clear .* \(--plain\)"):
        EventSource("tcp://10.0.0.7:5557")
    EventSource("tcp://10.0.0.7:5557", plain=True).close()


async def test_a_key_of_one_role_is_not_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    identity(monkeypatch, RoleKeys(KEY).text_of(CLIENT), CLIENT)
    with pytest.raises(ConfigError, match="the key of the cluster"):
        EventSource("tcp://10.0.0.7:5557")


def test_engines_without_curve_are_shown() -> None:
    plain = NodeRecord("vllm", 1, EXTERNAL_ROLE, extra={PLAIN_EVENTS: "tcp://10.0.0.7:5557"})
    records = {"vllm": NodeRecord.from_json(plain.to_json()), "ours": NodeRecord("ours", 1, "prefill")}
    (finding,) = _plain_events(Evidence({"nodes": []}, records=records))
    assert finding.what == "vllm"
    assert "in clear from tcp://10.0.0.7:5557" in finding.fact
