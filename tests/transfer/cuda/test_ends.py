"""Reads and writes of device memory that end early: cancelled, closed, cut, a peer that is gone."""

from __future__ import annotations

import asyncio
import signal
import time

import numpy as np
import pytest

from moonpool.transfer import (
    PeerLost,
    RegionError,
)
from moonpool.transfer.native.cuda import Cuda
from tests.transfer.conftest import StartPeer
from tests.transfer.cuda.memory import NBYTES, connected, counts, halves
from tests.transfer.device import DeviceRegion, use_stand_in
from tests.transfer.faults import GRACE_S, Proxy, late, outcome, settled, start_here
from tests.transfer.peer_process import pattern


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["cuda-ipc", "shm", "tcp"])
@pytest.mark.parametrize("direction", ["read", "write"])
async def test_a_killed_peer_is_lost_and_memory_left_alone(
    monkeypatch: pytest.MonkeyPatch, start_peer: StartPeer, transport: str, direction: str
) -> None:
    environment = use_stand_in(monkeypatch, COPY_US=20_000)
    theirs = start_peer(transport, **environment)
    imported = counts()["imported"]
    async with await start_here(transport) as agent:
        peer, remote = await connected(agent, theirs)
        memory = DeviceRegion(agent, NBYTES)
        move = getattr(peer, direction)
        await move(halves(memory), halves(remote), deadline_s=5)
        batch = move(halves(memory), halves(remote), deadline_s=20)
        await asyncio.sleep(0.01)
        theirs.kill()
        result, seconds = await outcome(batch)
        assert isinstance(result, PeerLost)
        assert seconds < 15  # long before the deadline
        memory.array[:] = 7
        assert peer.lost
        await settled(agent)
        assert (memory.array == 7).all()
        while counts()["imported"] != imported:  # noqa: ASYNC110
            await asyncio.sleep(0.001)


@pytest.mark.parametrize("transport", ["local", "cuda-ipc", "shm", "tcp"])
async def test_a_cancelled_read_has_ended_when_the_call_returns(
    monkeypatch: pytest.MonkeyPatch, start_peer: StartPeer, transport: str
) -> None:
    """Copies that were enqueued are waited for, slow as they are."""
    environment = use_stand_in(monkeypatch, COPY_US=50_000)
    async with await start_here(transport) as agent:
        memory = DeviceRegion(agent, NBYTES)
        if transport == "local":
            peer, remote = await agent.connect(agent.describe()), DeviceRegion(agent, NBYTES).id
        else:
            peer, remote = await connected(agent, start_peer(transport, **environment))
        for wait_s in (0.0, 0.02):
            batch = peer.read(halves(memory), halves(remote), deadline_s=5)
            await asyncio.sleep(wait_s)
            batch.cancel()
            with pytest.raises(asyncio.CancelledError):
                await batch
            memory.array[:] = 7
            await settled(agent)
            assert (memory.array == 7).all()


async def test_memory_that_is_mapped_stays_until_it_is_let_go(
    monkeypatch: pytest.MonkeyPatch, start_peer: StartPeer
) -> None:
    """Freed earlier, the stand-in would take it from under the copy: a bus error."""
    environment = use_stand_in(monkeypatch, COPY_US=50_000)
    theirs = start_peer("cuda-ipc", **environment)
    imported = counts()["imported"]
    async with await start_here("cuda-ipc") as agent:
        peer, remote = await connected(agent, theirs)
        memory = DeviceRegion(agent, NBYTES)
        batch = peer.read(halves(memory), halves(remote), deadline_s=5)
        while not agent.regions._holds:  # noqa: ASYNC110
            await asyncio.sleep(0)
        await asyncio.sleep(0.01)
        await theirs.do("close_region", region=remote)
        result, _ = await outcome(batch)
        assert isinstance(result, RegionError)
        while (  # noqa: ASYNC110
            await theirs.do("count_device_memory")
        )["allocations"] or counts()["imported"] != imported:
            await asyncio.sleep(0.001)


async def test_an_agent_that_closes_frees_nothing_that_is_being_read(
    monkeypatch: pytest.MonkeyPatch, start_peer: StartPeer
) -> None:
    environment = use_stand_in(monkeypatch, COPY_US=50_000)
    theirs = start_peer("cuda-ipc", **environment)
    async with await start_here("cuda-ipc") as agent:
        peer, remote = await connected(agent, theirs)
        memory = DeviceRegion(agent, NBYTES)
        await peer.read(halves(memory), halves(remote), deadline_s=5)
        batch = peer.read(halves(memory), halves(remote), deadline_s=5)
        while not agent.regions._holds:  # noqa: ASYNC110
            await asyncio.sleep(0)
        await asyncio.sleep(0.01)
        closing = asyncio.create_task(theirs.do("close_agent"))
        result, _ = await outcome(batch)
        assert isinstance(result, RegionError | PeerLost)
        await closing
        assert (await theirs.do("count_device_memory"))["allocations"] == 0


async def test_a_stopped_reader_keeps_nobody_from_closing(
    environment: dict[str, str], start_peer: StartPeer
) -> None:
    """What it has mapped is never freed."""
    reader = start_peer("cuda-ipc", **environment)
    async with await start_here("cuda-ipc") as agent:
        await connected(agent, reader)
        memory = DeviceRegion(agent, NBYTES)
        await reader.do("read_device", descriptor=agent.describe().pack().hex(), region=memory.id)
        reader.signal(signal.SIGSTOP)
        before = counts()["allocations"]
        started = time.monotonic()
        await agent.close()
        assert time.monotonic() - started < 10
        del memory
        assert counts()["allocations"] == before


async def test_a_cancelled_read_leaves_no_map_that_was_just_being_made(
    environment: dict[str, str], start_peer: StartPeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = asyncio.Event()
    loop, open_handle = asyncio.get_running_loop(), Cuda.open

    def slowly(self: Cuda, handle: bytes) -> int:
        loop.call_soon_threadsafe(begun.set)
        time.sleep(0.1)
        return open_handle(self, handle)

    monkeypatch.setattr(Cuda, "open", slowly)
    before = counts()["imported"]
    theirs = start_peer("cuda-ipc", **environment)
    async with await start_here("cuda-ipc") as agent:
        peer, remote = await connected(agent, theirs)
        memory = DeviceRegion(agent, NBYTES)
        batch = peer.read(halves(memory), halves(remote), deadline_s=5)
        await begun.wait()
        batch.cancel()
        batch.cancel()
        with pytest.raises(asyncio.CancelledError):
            await batch
        del batch
        assert counts()["imported"] == before
        await peer.read(halves(memory), halves(remote), deadline_s=5)
        assert np.array_equal(memory.array, pattern(NBYTES, 1))


async def test_a_link_that_is_cut_while_a_device_is_written_to(
    environment: dict[str, str], start_peer: StartPeer
) -> None:
    from dataclasses import replace

    theirs = start_peer("tcp", **environment)
    proxy = Proxy(theirs.descriptor.tcp_port)
    theirs.descriptor = replace(theirs.descriptor, tcp_port=proxy.port)
    async with await start_here("tcp") as agent:
        peer, remote = await connected(agent, theirs)
        memory = DeviceRegion(agent, NBYTES)
        await peer.read(halves(memory), halves(remote), deadline_s=5)
        proxy.hold()
        result, late_s = await late(peer.read(halves(memory), halves(remote), deadline_s=0.3), 0.3)
        assert type(result).__name__ == "DeadlineExceeded"
        assert late_s < GRACE_S
        memory.array[:] = 7
        proxy.release()
        await settled(agent)
        assert (memory.array == 7).all()
    proxy.close()
