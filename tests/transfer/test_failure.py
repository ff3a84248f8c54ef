"""A peer that dies, stops or is cut off is a typed error in time, and memory is left alone after it."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import socket
import threading
import time
from collections.abc import Awaitable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runtime.options import TransferOptions
from tests.transfer.conftest import RemotePeer, StartPeer
from tests.transfer.peer_process import pattern
from transfer import (
    AgentClosed,
    DeadlineExceeded,
    Peer,
    PeerLost,
    Region,
    Span,
    StaleEpoch,
    TransferAgent,
    TransferError,
    TransferReport,
)
from transfer import agent as agent_module
from transfer.ucx.library import load_ucx

NBYTES = 32 << 20
# What an error may be late. A machine that is busy with other things gets more.
GRACE_S = 0.1 if not os.environ.get("CI") else 0.5


def choose(transport: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The transport's name; ucx-tcp: UCX is made to use TCP. Skips what is not installed."""
    name, _, variant = transport.partition("-")
    if name == "ucx" and load_ucx() is None:
        pytest.skip("there is no libucp: pip install moonpool[ucx]")
    if variant:
        monkeypatch.setenv("UCX_TLS", "tcp,self")
    return name


async def start_here(transports: str) -> TransferAgent:
    options = TransferOptions(transports=tuple(transports.split(",")))
    return await TransferAgent.start(options, agent_id="here", epoch=1)


async def outcome(batch: Awaitable[TransferReport]) -> tuple[TransferReport | BaseException, float]:
    """What a batch came to, and after how many seconds."""
    started = time.perf_counter()
    (result,) = await asyncio.gather(batch, return_exceptions=True)
    return result, time.perf_counter() - started


async def big_read(agent: TransferAgent, theirs: RemotePeer) -> tuple[Peer, Region, list[Span], list[Span]]:
    """A connected peer with a region of NBYTES, and one of ours; one read has gone well."""
    remote = (await theirs.do("allocate", nbytes=NBYTES, seed=1))["region"]
    peer = await agent.connect(theirs.descriptor)
    memory = agent.allocate(NBYTES, "memory")
    size = 1 << 20
    ours = [Span(memory.id, at, size) for at in range(0, NBYTES, size)]
    spans = [Span(remote, at, size) for at in range(0, NBYTES, size)]
    await peer.read(ours, spans, deadline_s=20)
    return peer, memory, ours, spans


@pytest.mark.parametrize("transport", ["shm", "tcp", "ucx", "ucx-tcp"])
@pytest.mark.parametrize("direction", ["read", "write"])
async def test_a_killed_peer_is_lost(
    start_peer: StartPeer, transport: str, direction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    transport = choose(transport, monkeypatch)
    theirs = start_peer(transport)
    async with await start_here(transport) as agent:
        peer, memory, ours, spans = await big_read(agent, theirs)
        move = getattr(peer, direction)
        batch = move(ours, spans, deadline_s=5)
        await asyncio.sleep(0)
        theirs.process.kill()
        result, seconds = await outcome(batch)
        # The batch that was under way may have been done first. The next cannot be.
        assert isinstance(result, PeerLost | TransferReport)
        result, more_seconds = await outcome(asyncio.ensure_future(again(move, ours, spans)))
        assert isinstance(result, PeerLost)
        assert seconds + more_seconds < 1
        memory.array[:] = 7
        with pytest.raises(PeerLost):
            await agent.connect(theirs.descriptor)
        assert peer.lost
        assert (memory.array == 7).all()


async def again(move: Any, ours: list[Span], spans: list[Span]) -> TransferReport:
    while True:
        await move(ours, spans, deadline_s=5)


@pytest.mark.parametrize(
    ("transport", "direction"),
    [("shm", "write"), ("tcp", "read"), ("tcp", "write"), ("ucx-tcp", "read"), ("ucx", "write")],
)
async def test_a_stopped_peer_is_past_the_deadline(
    start_peer: StartPeer, transport: str, direction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    transport = choose(transport, monkeypatch)
    theirs, other = start_peer(transport), start_peer(transport)
    async with await start_here(transport) as agent:
        peer, memory, ours, spans = await big_read(agent, theirs)
        memory.array[:] = 3
        theirs.signal(signal.SIGSTOP)
        result, seconds = await outcome(getattr(peer, direction)(ours, spans, deadline_s=0.3))
        assert isinstance(result, DeadlineExceeded)
        assert 0.25 < seconds < 0.3 + GRACE_S
        memory.array[:] = 9
        # Another peer is served meanwhile, and nobody can connect to the stopped one.
        await big_read(agent, other)
        async with await start_here(transport) as late:
            started = time.perf_counter()
            with pytest.raises(DeadlineExceeded):
                await late.connect(theirs.descriptor, deadline_s=0.2)
            assert time.perf_counter() - started < 0.2 + GRACE_S
        theirs.signal(signal.SIGCONT)
        # What had not been taken from our memory by then must not be taken now that it means something else.
        await peer.read(ours[:1], spans[:1], deadline_s=5)
        foreign = await theirs.do("num_foreign", region=spans[0].region, seed=1, value=3)
        assert foreign["num_foreign"] == 0
        assert (memory.array[1 << 20 :] == 9).all()


async def test_a_stopped_peer_can_be_read_on_the_same_host(start_peer: StartPeer) -> None:
    theirs = start_peer("shm")
    async with await start_here("shm") as agent:
        peer, memory, ours, spans = await big_read(agent, theirs)
        memory.array[:] = 0
        theirs.signal(signal.SIGSTOP)
        await peer.read(ours, spans, deadline_s=5)
        assert np.array_equal(memory.array, pattern(NBYTES, 1))


@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_a_restarted_peer_is_another_one(start_peer: StartPeer, transport: str) -> None:
    old = start_peer("shm,tcp", epoch=1)
    async with await start_here(transport) as agent:
        peer, _, ours, spans = await big_read(agent, old)
        old.kill()
        new = start_peer("shm,tcp", epoch=2, port=old.descriptor.tcp_port)
        assert new.descriptor.tcp_port == old.descriptor.tcp_port
        result, _ = await outcome(asyncio.ensure_future(again(peer.read, ours, spans)))
        assert isinstance(result, PeerLost | StaleEpoch)
        with pytest.raises(StaleEpoch if transport == "tcp" else PeerLost) as caught:
            await agent.connect(old.descriptor)
        if isinstance(caught.value, StaleEpoch):
            assert (caught.value.expected, caught.value.found) == (1, 2)
        await big_read(agent, new)


class Proxy:
    """Forwards TCP connections to ``port`` until told to hold everything back, as a cut cable does."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._held = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._sockets: list[socket.socket] = []
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def hold(self) -> None:
        self._held.set()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(("127.0.0.1", self._target))
                self._sockets += [near, far]
                for source, sink in ((near, far), (far, near)):
                    threading.Thread(target=self._forward, args=(source, sink), daemon=True).start()

    def _forward(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while (received := source.recv(1 << 16)) and not self._held.is_set():
                sink.sendall(received)
            if not self._held.is_set():
                sink.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        for sock in (self._listener, *self._sockets):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()


@pytest.fixture
def proxy(start_peer: StartPeer) -> Iterator[tuple[Proxy, RemotePeer]]:
    theirs = start_peer("tcp")
    proxy = Proxy(theirs.descriptor.tcp_port)
    theirs.descriptor = replace(theirs.descriptor, tcp_port=proxy.port)
    yield proxy, theirs
    proxy.close()


@pytest.mark.parametrize("direction", ["read", "write"])
async def test_a_cut_link_is_past_the_deadline(proxy: tuple[Proxy, RemotePeer], direction: str) -> None:
    link, theirs = proxy
    async with await start_here("tcp") as agent:
        peer, memory, ours, spans = await big_read(agent, theirs)
        batch = getattr(peer, direction)(ours, spans, deadline_s=0.4)
        await asyncio.sleep(0)
        link.hold()
        result, seconds = await outcome(batch)
        assert isinstance(result, DeadlineExceeded | TransferReport)
        result, seconds = await outcome(getattr(peer, direction)(ours, spans, deadline_s=0.3))
        assert isinstance(result, DeadlineExceeded)
        assert seconds < 0.3 + GRACE_S
        memory.array[:] = 9
        with pytest.raises(DeadlineExceeded):
            await peer.read(ours, spans, deadline_s=0.2)
        assert (memory.array == 9).all()


@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_a_peer_that_goes_while_we_connect_is_lost(
    start_peer: StartPeer, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = start_peer(transport)
    connect_peer = agent_module.connect_peer

    async def slow(*arguments: Any) -> Peer:
        peer = await connect_peer(*arguments)
        theirs.kill()
        while peer.link.open:  # noqa: ASYNC110
            await asyncio.sleep(0)
        return peer

    monkeypatch.setattr(agent_module, "connect_peer", slow)
    async with await start_here(transport) as agent:
        for _ in range(2):
            with pytest.raises(PeerLost):
                await agent.connect(theirs.descriptor)


async def test_closing_the_agent_ends_its_batches() -> None:
    theirs = await start_here("local,shm,tcp")
    agent = await start_here("local,shm,tcp")
    remote, memory = theirs.allocate(NBYTES, "theirs"), agent.allocate(NBYTES, "ours")
    peer = await agent.connect(theirs.describe())
    batch = peer.read([Span(memory.id, 0, NBYTES)], [Span(remote.id, 0, NBYTES)], deadline_s=5)
    await asyncio.sleep(0)
    await agent.close()
    result, _ = await outcome(batch)
    assert isinstance(result, AgentClosed | TransferReport)
    with pytest.raises(AgentClosed):
        peer.read([Span(memory.id, 0, 1)], [Span(remote.id, 0, 1)], deadline_s=5)
    with pytest.raises(AgentClosed):
        await agent.connect(theirs.describe())
    await theirs.close()
    await theirs.close()


async def test_a_lost_local_agent_is_lost() -> None:
    async with await start_here("local") as agent:
        theirs = await start_here("local")
        peer = await agent.connect(theirs.describe())
        await theirs.close()
        await asyncio.sleep(0)
        with pytest.raises(PeerLost):
            peer.notify(b"anybody there?")
        with pytest.raises(PeerLost):
            await agent.connect(theirs.describe())


def resources() -> tuple[int, int, int]:
    """Descriptors, threads, files in /dev/shm."""
    # A mapped memfd goes with the last array that shows it.
    gc.collect()
    return len(os.listdir("/proc/self/fd")), threading.active_count(), len(list(Path("/dev/shm").iterdir()))


@pytest.mark.parametrize("transport", ["local", "shm", "tcp", "ucx", "ucx-tcp"])
async def test_nothing_leaks(transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Agents come and go, some with batches cut short; nothing stays behind."""
    transport = choose(transport, monkeypatch)
    options = TransferOptions(transports=(transport,))

    async def cycle(turn: int) -> None:
        theirs = await TransferAgent.start(options, agent_id="peer", epoch=1)
        agent = await TransferAgent.start(options, agent_id="here", epoch=1)
        remote, memory = theirs.allocate(1 << 20, "theirs"), agent.allocate(1 << 20, "ours")
        spans = [Span(memory.id, 0, 1 << 20)], [Span(remote.id, 0, 1 << 20)]
        peer = await agent.connect(theirs.describe())
        await peer.write(*spans, deadline_s=5)
        batch = peer.read(*spans, deadline_s=5)
        if turn % 3 == 0:
            await batch
        elif turn % 3 == 1:
            batch.cancel()
        # In either order, and with a batch that is still running.
        for one in (agent, theirs) if turn % 2 else (theirs, agent):
            await one.close()
        with contextlib.suppress(TransferError, asyncio.CancelledError):
            await batch

    for turn in range(6):
        await cycle(turn)
    before = resources()
    for turn in range(60):
        await cycle(turn)
    assert resources() == before


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("transport", ["shm", "tcp", "ucx", "ucx-tcp"])
async def test_nothing_leaks_over_many_killed_peers(
    start_peer: StartPeer, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    transport = choose(transport, monkeypatch)
    async with await start_here(transport) as agent:
        before = (0, 0, 0)
        for turn in range(100):
            theirs = start_peer(transport)
            peer, memory, ours, spans = await big_read(agent, theirs)
            batch = (peer.read, peer.write)[turn % 2](ours, spans, deadline_s=5)
            await asyncio.sleep(0)
            theirs.kill()
            await outcome(batch)
            result, _ = await outcome(asyncio.ensure_future(again(peer.read, ours, spans)))
            assert isinstance(result, PeerLost)
            memory.close()
            if turn == 5:
                before = resources()
        assert resources() == before
