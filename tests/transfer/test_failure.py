"""A peer that dies, stops or is cut off: a typed error in time, after which memory does not change."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from moonpool.transfer import (
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
from moonpool.transfer.connections.notification import MAX_WAITING_NBYTES
from moonpool.transfer.connections.wire import MAX_FRAME_NBYTES
from moonpool.transfer.copying.memcpy import copy_here
from moonpool.transfer.native.arrays import U64
from moonpool.transfer.native.compiled_copy import NEVER, Stop
from moonpool.transfer.paths import local
from moonpool.transfer.peers.dialer import Dialer
from tests.transfer.cables import Cabled
from tests.transfer.conftest import RemotePeer, StartPeer
from tests.transfer.faults import (
    GRACE_S,
    Proxy,
    again,
    choose,
    late,
    num_streams,
    outcome,
    settled,
    start_here,
)
from tests.transfer.peer_process import pattern

NBYTES = 32 << 20


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


async def is_served(agent: TransferAgent, other: RemotePeer) -> None:
    """Whatever became of one peer, ``other`` is read as ever."""
    with (await big_read(agent, other))[1] as memory:
        assert np.array_equal(memory.array, pattern(NBYTES, 1))
    await other.do("close_regions")


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shm", "tcp", "ucx", "ucx-tcp"])
@pytest.mark.parametrize("direction", ["read", "write"])
async def test_a_killed_peer_is_lost(
    start_peer: StartPeer, transport: str, direction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    transport = choose(transport, monkeypatch)
    theirs, other = start_peer(transport), start_peer(transport)
    async with await start_here(transport) as agent:
        peer, memory, ours, spans = await big_read(agent, theirs)
        await is_served(agent, other)
        move = getattr(peer, direction)
        batch = move(ours, spans, deadline_s=20)
        await asyncio.sleep(0)
        theirs.process.kill()
        result, seconds = await outcome(batch)
        # The batch that was under way may have been done first. The next cannot be.
        assert isinstance(result, PeerLost | TransferReport)
        result, more_seconds = await outcome(asyncio.ensure_future(again(move, ours, spans)))
        assert isinstance(result, PeerLost)
        # Long before a deadline: by the end of its connection, not by its silence.
        assert seconds + more_seconds < 15
        memory.array[:] = 7
        with pytest.raises(PeerLost):
            await agent.connect(theirs.descriptor)
        assert peer.lost
        await is_served(agent, other)
        await settled(agent)
        assert (memory.array == 7).all()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("transport", "direction"),
    [
        ("shm", "write"),
        ("tcp", "read"),
        ("tcp", "write"),
        ("ucx", "write"),
        ("ucx-tcp", "read"),
        ("ucx-tcp", "write"),
    ],
)
async def test_a_stopped_peer_is_past_the_deadline(
    start_peer: StartPeer, transport: str, direction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    transport = choose(transport, monkeypatch)
    theirs, other = start_peer(transport), start_peer(transport)
    async with await start_here(transport) as agent:
        peer, memory, ours, spans = await big_read(agent, theirs)
        # Makes the connections, so that the next batch is stopped and not its handshake.
        await getattr(peer, direction)(ours, spans, deadline_s=20)
        memory.array[:] = 3
        theirs.signal(signal.SIGSTOP)
        batch, began_s = getattr(peer, direction)(ours, spans, deadline_s=0.3), time.perf_counter()
        result, late_s = await late(batch, 0.3)
        assert isinstance(result, DeadlineExceeded)
        assert time.perf_counter() - began_s > 0.25
        assert late_s < GRACE_S
        memory.array[:] = 9
        # Another peer is served meanwhile, and connections to the stopped one fail.
        await is_served(agent, other)
        async with await start_here(transport) as another:
            result, late_s = await late(another.connect(theirs.descriptor, deadline_s=0.2), 0.2)
            assert isinstance(result, DeadlineExceeded)
            assert late_s < GRACE_S
        theirs.signal(signal.SIGCONT)
        # What had not been taken from our memory by then must not be taken now that it means something else.
        await peer.read(ours[:1], spans[:1], deadline_s=5)
        await settled(agent)
        await theirs.do("drained", num_streams=num_streams(agent))
        foreign = await theirs.do("num_foreign", region=spans[0].region, seed=1, value=3)
        assert foreign["num_foreign"] == 0
        assert (memory.array[1 << 20 :] == 9).all()


async def test_a_region_is_closed_though_a_peer_has_just_died(start_peer: StartPeer) -> None:
    """Before the loop has come to see that it has."""
    theirs = start_peer("shm")
    async with await start_here("shm") as agent:
        peer, memory, _, _ = await big_read(agent, theirs)
        theirs.kill()
        memory.close()
        assert memory.closed
        result, _ = await outcome(asyncio.ensure_future(peer.link.region(999)))
        assert isinstance(result, TransferError)


async def test_a_path_that_fails_to_start_releases_the_regions(
    start_peer: StartPeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = start_peer("shm")
    async with await start_here("shm") as agent:
        peer, memory, ours, spans = await big_read(agent, theirs)

        def fail(*_: object) -> None:
            raise KeyError("a defect")

        monkeypatch.setattr(peer.paths.ranked()[0], "start", fail)
        result, _ = await outcome(peer.read(ours, spans, deadline_s=5))
        assert isinstance(result, KeyError)
        assert not agent.regions._holds
        memory.close()


@pytest.mark.parametrize("transport", ["shm", "ucx"])
async def test_a_stopped_peer_can_be_read_on_the_same_host(
    start_peer: StartPeer, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From its memory, without its help."""
    transport = choose(transport, monkeypatch)
    theirs = start_peer(transport)
    async with await start_here(transport) as agent:
        peer, memory, ours, spans = await big_read(agent, theirs)
        memory.array[:] = 0
        theirs.signal(signal.SIGSTOP)
        await peer.read(ours, spans, deadline_s=5)
        assert np.array_equal(memory.array, pattern(NBYTES, 1))


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shm", "tcp", "ucx", "ucx-tcp"])
async def test_a_restarted_peer_is_another_one(
    start_peer: StartPeer, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    transport = choose(transport, monkeypatch)
    offered = f"tcp,{transport}" if transport != "tcp" else transport
    old, other = start_peer(offered, epoch=1), start_peer(transport)
    async with await start_here(transport) as agent:
        peer, _, ours, spans = await big_read(agent, old)
        old.kill()
        new = start_peer(offered, epoch=2, port=old.descriptor.tcp_port)
        assert new.descriptor.tcp_port == old.descriptor.tcp_port
        result, _ = await outcome(asyncio.ensure_future(again(peer.read, ours, spans)))
        assert isinstance(result, PeerLost | StaleEpoch)
        # The name of its Unix socket went with it; the port is taken by another.
        with pytest.raises(PeerLost if transport == "shm" else StaleEpoch) as caught:
            await agent.connect(old.descriptor)
        if isinstance(caught.value, StaleEpoch):
            assert (caught.value.expected, caught.value.found) == (1, 2)
        await is_served(agent, other)
        await is_served(agent, new)


@pytest.fixture
def proxy(start_peer: StartPeer) -> Iterator[tuple[Proxy, RemotePeer]]:
    theirs = start_peer("tcp")
    proxy = Proxy(theirs.descriptor.tcp_port)
    theirs.descriptor = replace(theirs.descriptor, tcp_port=proxy.port)
    yield proxy, theirs
    proxy.close()


@pytest.mark.slow
@pytest.mark.parametrize("direction", ["read", "write"])
async def test_a_cut_link_is_past_the_deadline(
    proxy: tuple[Proxy, RemotePeer], direction: str, start_peer: StartPeer
) -> None:
    link, theirs = proxy
    other = start_peer("tcp")
    async with await start_here("tcp") as agent:
        peer, memory, ours, spans = await big_read(agent, theirs)
        batch = getattr(peer, direction)(ours, spans, deadline_s=0.4)
        await asyncio.sleep(0)
        link.hold()
        result, _ = await outcome(batch)
        assert isinstance(result, DeadlineExceeded | TransferReport)
        result, late_s = await late(getattr(peer, direction)(ours, spans, deadline_s=0.3), 0.3)
        assert isinstance(result, DeadlineExceeded)
        assert late_s < GRACE_S
        memory.array[:] = 9
        with pytest.raises(DeadlineExceeded):
            await peer.read(ours, spans, deadline_s=0.2)
        await is_served(agent, other)
        assert (memory.array == 9).all()
        # The bytes that were held back arrive late, and must be dropped.
        link.release()
        await peer.read(ours[:1], spans[:1], deadline_s=5)
        await settled(agent)
        assert (memory.array[len(ours[:1]) * ours[0].nbytes :] == 9).all()


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.parametrize("direction", ["read", "write"])
async def test_a_pulled_cable_under_ucx_is_past_the_deadline(
    start_peer: StartPeer, cabled: Cabled, direction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two other processes: UCX remembers for good which networks there were at first."""
    transport = choose("ucx-tcp", monkeypatch)
    near, far = cabled.ends(0)
    there, other = (
        start_peer(transport, namespace=cabled.name, TCP_HOSTS=cabled.hosts[0], UCX_NET_DEVICES=far),
        start_peer(transport),
    )
    here = start_peer(transport, UCX_NET_DEVICES=f"lo,{near}")
    local, remote, others = [
        (await peer.do("allocate", nbytes=NBYTES, seed=seed))["region"]
        for seed, peer in enumerate((here, there, other))
    ]

    async def move(peer: RemotePeer, region: int, nbytes: int, deadline_s: float) -> dict[str, Any]:
        descriptor = peer.descriptor.pack().hex()
        return await here.do(
            "move",
            descriptor=descriptor,
            direction=direction,
            local=local,
            remote=region,
            nbytes=nbytes,
            deadline_s=deadline_s,
        )

    async def tail() -> dict[str, Any]:
        """Of where it is moved to, all but the first MiB."""
        peer, region = (here, local) if direction == "read" else (there, remote)
        return await peer.do("checksum", region=region, offset=1 << 20, nbytes=NBYTES - (1 << 20))

    assert (await move(there, remote, NBYTES, 20))["outcome"] == "done"
    cabled.pull(0)
    result = await move(there, remote, NBYTES, 0.4)
    assert result["outcome"] == "DeadlineExceeded"
    assert result["seconds"] < 0.4 + GRACE_S
    assert (await move(other, others, NBYTES, 20))["outcome"] == "done"
    before = await tail()
    cabled.plug(0)
    # What was on its way when the cable was pulled comes now, and must go nowhere.
    assert (await move(there, remote, 1 << 20, 8))["outcome"] == "done"
    assert await tail() == before


@pytest.mark.alone
async def test_a_read_over_ucx_goes_on_over_tcp_when_its_cable_is_pulled(
    start_peer: StartPeer, cabled: Cabled, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has a cable of its own. Nothing tells of it but that nothing moves."""
    choose("ucx-tcp", monkeypatch)
    near, far = cabled.ends(1)
    there = start_peer("ucx,tcp", namespace=cabled.name, TCP_HOSTS=cabled.hosts[0], UCX_NET_DEVICES=far)
    here = start_peer("ucx,tcp", UCX_NET_DEVICES=near)
    local, remote = [
        (await peer.do("allocate", nbytes=NBYTES, seed=seed))["region"]
        for seed, peer in ((2, here), (1, there))
    ]
    transports = []
    for deadline_s in (20, 10, 10):
        result = await here.do(
            "move",
            descriptor=there.descriptor.pack().hex(),
            direction="read",
            local=local,
            remote=remote,
            nbytes=NBYTES,
            deadline_s=deadline_s,
        )
        transports.append(result.get("transport", result["outcome"]))
        cabled.pull(1)
    assert transports == ["ucx", "tcp", "tcp"]
    copied = await here.do("checksum", region=local, offset=0, nbytes=NBYTES)
    assert copied == await there.do("checksum", region=remote, offset=0, nbytes=NBYTES)


@pytest.mark.parametrize("ours", [True, False])
async def test_a_batch_goes_on_where_the_system_has_no_thread_for_a_connection(
    monkeypatch: pytest.MonkeyPatch, ours: bool
) -> None:
    """Neither here, for the connection that is made, nor at the peer, for the one that it accepts."""
    refused: list[str] = []
    start = threading.Thread.start

    def refuse_one(thread: threading.Thread) -> None:
        if not refused and (thread.name.endswith(" stream") if ours else thread.name.startswith("serve ")):
            refused.append(thread.name)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse_one)
    async with await start_here("shm,tcp") as theirs, await start_here("shm,tcp") as agent:
        remote, memory = theirs.allocate(2 << 20, "theirs"), agent.allocate(2 << 20, "ours")
        theirs.allow_writes(remote)
        memory.array[:] = pattern(2 << 20, 1)
        peer = await agent.connect(theirs.describe())
        for _ in range(2):
            remote.array[:] = 0
            report, seconds = await outcome(
                peer.write([Span(memory.id, 0, 2 << 20)], [Span(remote.id, 0, 2 << 20)], deadline_s=20)
            )
            assert isinstance(report, TransferReport)
            assert seconds < 10
            assert np.array_equal(remote.array, memory.array)
        assert len(refused) == 1


@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_a_peer_that_goes_while_we_connect_is_lost(
    start_peer: StartPeer, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = start_peer(transport)
    connect = Dialer.connect

    async def slow(*arguments: Any) -> Peer:
        peer = await connect(*arguments)
        theirs.kill()
        while peer.link.open:  # noqa: ASYNC110
            await asyncio.sleep(0)
        return peer

    monkeypatch.setattr(Dialer, "connect", slow)
    async with await start_here(transport) as agent:
        for _ in range(2):
            with pytest.raises(PeerLost):
                await agent.connect(theirs.descriptor)


class SlowCopy:
    """``copy_here`` after ``gate``. As a long system call, it does not see that it was stopped."""

    def __init__(self) -> None:
        self.inside, self.gate = threading.Event(), threading.Event()

    def __call__(self, to: U64, source: U64, nbytes: U64, stop: Stop, digests: U64 | None) -> bool:
        self.inside.set()
        assert self.gate.wait(20)
        return copy_here(to, source, nbytes, NEVER, digests)


@pytest.mark.parametrize("end", ["cancel", "close"])
async def test_a_batch_that_is_stopped_waits_for_the_copy_in_progress(
    end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = SlowCopy()
    monkeypatch.setattr(local, "copy_here", slow)
    async with await start_here("local") as agent:
        remote, memory = agent.allocate(4 << 20, "theirs"), agent.allocate(4 << 20, "ours")
        peer = await agent.connect(agent.describe())
        spans = [Span(memory.id, 0, 4 << 20)], [Span(remote.id, 0, 4 << 20)]
        batch = peer.read(*spans, deadline_s=20)
        assert await asyncio.to_thread(slow.inside.wait, 20)
        threading.Timer(0.2, slow.gate.set).start()
        array = memory.array
        if end == "cancel":
            batch.cancel()
            with pytest.raises(asyncio.CancelledError):
                await batch
        else:
            memory.close()
        array[:] = 9
        assert slow.gate.is_set(), "it did not wait"
        await settled(agent)
        assert (array == 9).all()


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


async def test_notes_that_a_peer_leaves_unread_hold_up_no_facts_about_regions() -> None:
    async with await start_here("tcp") as agent, await start_here("tcp") as theirs:
        memory, remote, other = (one.allocate(64, "memory") for one in (agent, theirs, theirs))
        peer = await agent.connect(theirs.describe())
        (control,) = theirs._controls
        async with asyncio.timeout(60):
            while not theirs.notes.full:
                with contextlib.suppress(TransferError):
                    peer.notify(bytes(MAX_FRAME_NBYTES))
                await asyncio.sleep(0)
        for nbytes in (MAX_FRAME_NBYTES, 0):
            with pytest.raises(TransferError, match="has not taken"):
                while True:
                    peer.notify(bytes(nbytes))
        asked = peer.read([Span(memory.id, 0, 64)], [Span(remote.id, 0, 64)], deadline_s=20)
        other.close()
        control.note(b"it is closed")
        while not agent.notes._waiting and not peer.lost:  # noqa: ASYNC110
            await asyncio.sleep(0)
        assert not peer.lost and not asked.done()
        async with asyncio.timeout(60):
            for _ in range(MAX_WAITING_NBYTES // MAX_FRAME_NBYTES):
                await anext(theirs.notifications())
        assert (await asked).nbytes == 64
