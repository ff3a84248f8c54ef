"""Small reads over TCP that are done when they are posted, on an idle connection."""

from __future__ import annotations

import asyncio
import signal

import numpy as np
import pytest

from moonpool.runtime.config.options import TransferOptions
from moonpool.runtime.errors import MoonpoolError
from moonpool.transfer import Peer, Region, Span, TransferAgent, checksum
from moonpool.transfer.native.compiled_copy import compiled_copy
from moonpool.transfer.paths.tcp import stream, stream_path
from moonpool.transfer.paths.tcp.stream_path import StreamPath
from tests.transfer.conftest import StartPeer
from tests.transfer.peer_process import pattern

NBYTES = 1 << 20

pytestmark = pytest.mark.skipif(compiled_copy() is None, reason="there is no compiler")


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "_NOW_S", 20.0)
    monkeypatch.setattr(stream_path, "_QUICK_S", 30.0)


async def start() -> TransferAgent:
    return await TransferAgent.start(TransferOptions(transports=("tcp",)), agent_id="here", epoch=1)


def spans(region: int, nbytes: int, count: int) -> list[Span]:
    return [Span(region, at * nbytes, nbytes) for at in range(count)]


async def idle(peer: Peer, memory: Region, remote: int) -> None:
    """Wait until the connections are there, and their threads have nothing to do."""
    async with asyncio.timeout(60):
        while True:
            batch = peer.read(spans(memory.id, 64, 1), spans(remote, 64, 1), deadline_s=30)
            if batch.done():
                return
            await batch


async def test_small_reads_are_done_when_they_are_posted(start_peer: StartPeer) -> None:
    theirs, source = start_peer("tcp"), pattern(NBYTES, 1)
    async with await start() as agent:
        remote = (await theirs.do("allocate", nbytes=NBYTES, seed=1))["region"]
        peer, memory = await agent.connect(theirs.descriptor), agent.allocate(NBYTES, "ours")
        for nbytes, count in ((1, 1), (4096, 1), (4096, 16), (65536, 1)):
            await idle(peer, memory, remote)
            for verified in (False, True):
                sums = [checksum(source[at * nbytes : (at + 1) * nbytes]) for at in range(count)]
                memory.array[:] = 0
                here, there = spans(memory.id, nbytes, count)[::-1], spans(remote, nbytes, count)
                batch = peer.read(here, there, deadline_s=30, checksums=sums if verified else None)
                assert batch.done()
                assert (await batch).transport == "tcp"
                expected = source[: nbytes * count].reshape(count, nbytes)[::-1].reshape(-1)
                assert np.array_equal(memory.array[: nbytes * count], expected)
                assert not memory.array[nbytes * count :].any()
        for nbytes, count in ((65537, 1), (4096, 17)):
            await idle(peer, memory, remote)
            batch = peer.read(spans(memory.id, nbytes, count), spans(remote, nbytes, count), deadline_s=30)
            assert not batch.done()
            await batch
        agent.regions.check_integrity()


async def test_they_are_refused_like_batches(start_peer: StartPeer, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = start_peer("tcp")
    async with await start() as agent:
        remote = (await theirs.do("allocate", nbytes=NBYTES, seed=1))["region"]
        peer, memory = await agent.connect(theirs.descriptor), agent.allocate(NBYTES, "ours")
        good, there = Span(memory.id, 0, 64), Span(remote, 0, 64)
        far = (1 << 64) - 8
        reads = [
            ([Span(memory.id, NBYTES - 8, 16)], [Span(remote, 0, 16)], None),
            ([Span(memory.id, far, 16)], [Span(remote, 0, 16)], None),
            ([Span(memory.id, 0, 16)], [Span(remote, NBYTES - 8, 16)], None),
            ([good, Span(memory.id, 32, 64)], [there, there], None),
            ([good], [Span(remote, 0, 65)], None),
            ([good], [Span(remote + 7, 0, 64)], None),
            ([good], [there], [1]),
        ]
        found = []
        for at_once in (True, False):
            if not at_once:
                monkeypatch.setattr(StreamPath, "read_now", lambda *_: 0)
            else:
                await idle(peer, memory, remote)
            errors = []
            for local, what, sums in reads:
                with pytest.raises(MoonpoolError) as caught:
                    await peer.read(local, what, deadline_s=30, checksums=sums)
                errors.append((caught.type, str(caught.value)))
            found.append(errors)
        assert found[0] == found[1]


async def test_a_late_reply_is_not_taken_for_another(
    start_peer: StartPeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = start_peer("tcp")
    async with await start() as agent:
        remote = (await theirs.do("allocate", nbytes=NBYTES, seed=1))["region"]
        peer, memory = await agent.connect(theirs.descriptor), agent.allocate(NBYTES, "ours")
        await idle(peer, memory, remote)
        monkeypatch.setattr(stream, "_NOW_S", 1e-3)
        theirs.signal(signal.SIGSTOP)
        first = peer.read([Span(memory.id, 0, 4096)], [Span(remote, 0, 4096)], deadline_s=30)
        assert not first.done()
        second = peer.read([Span(memory.id, 4096, 4096)], [Span(remote, 8192, 4096)], deadline_s=30)
        theirs.signal(signal.SIGCONT)
        await first
        await second
        assert np.array_equal(memory.array[:4096], pattern(NBYTES, 1)[:4096])
        assert np.array_equal(memory.array[4096:8192], pattern(NBYTES, 1)[8192:12288])
        agent.regions.check_integrity()
