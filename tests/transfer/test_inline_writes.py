"""Small writes that are done when they are posted: like batches in everything but time, and never late."""

from __future__ import annotations

import asyncio
import signal
from typing import Any

import numpy as np
import pytest

from moonpool.runtime.config.options import TransferOptions
from moonpool.runtime.errors import MoonpoolError
from moonpool.transfer import (
    ChecksumMismatch,
    GrantLapsed,
    Peer,
    Region,
    RegionError,
    Span,
    SpanError,
    TransferAgent,
    checksum,
)
from moonpool.transfer.connections.byte_stream import ByteStream
from moonpool.transfer.connections.wire import Op
from moonpool.transfer.native.compiled_copy import Reply, compiled_copy
from moonpool.transfer.native.ucx import load_ucx
from moonpool.transfer.paths.base import NOT_WRITTEN
from moonpool.transfer.paths.tcp import stream, stream_path
from moonpool.transfer.paths.tcp.stream_path import StreamPath
from tests.transfer.conftest import RemotePeer, StartPeer
from tests.transfer.peer_process import pattern
from tests.transfer.test_inline_reads import MIB, NBYTES
from tests.transfer.test_metrics import sample

pytestmark = pytest.mark.skipif(compiled_copy() is None, reason="there is no compiler")


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with other work must not make a write that is done at once a batch."""
    monkeypatch.setattr(stream, "_NOW_S", 20.0)
    monkeypatch.setattr(stream_path, "_QUICK_S", 30.0)


# The largest write that is done at once.
MOST_NBYTES = {"shm": MIB, "tcp": stream.MAX_WRITE_NOW_NBYTES, "ucx": stream.MAX_WRITE_NOW_NBYTES}


@pytest.fixture(params=sorted(MOST_NBYTES))
def transport(request: pytest.FixtureRequest) -> str:
    if request.param == "ucx" and load_ucx() is None:
        pytest.skip("there is no libucp: pip install moonpool[ucx]")
    return str(request.param)


def start(agent_id: str, transport: str) -> Any:
    return TransferAgent.start(TransferOptions(transports=(transport,)), agent_id=agent_id, epoch=1)


class Writer:
    """An agent here with ``memory`` of ``pattern(NBYTES, 9)``, and a peer in another process."""

    def __init__(self, agent: TransferAgent, theirs: RemotePeer, peer: Peer, remote: int) -> None:
        self.agent, self.theirs, self.peer, self.remote = agent, theirs, peer, remote
        self.memory: Region = agent.allocate(NBYTES, "ours")
        self.memory.array[:] = pattern(NBYTES, 9)

    @classmethod
    async def of(cls, agent: TransferAgent, theirs: RemotePeer) -> Writer:
        remote = (await theirs.do("allocate", nbytes=NBYTES, seed=1))["region"]
        writer = cls(agent, theirs, await agent.connect(theirs.descriptor), remote)
        await writer.write(64)
        async with asyncio.timeout(60):
            # The thread of the connection may not be idle again yet. One that is a batch occupies it too.
            while not (batch := writer.write(64)).done():
                await batch
                await asyncio.sleep(0.001)
        return writer

    def write(self, nbytes: int, count: int = 1, **more: Any) -> Any:
        """``count`` blocks in reverse order."""
        here = [Span(self.memory.id, at * nbytes, nbytes) for at in reversed(range(count))]
        there = [Span(self.remote, at * nbytes, nbytes) for at in range(count)]
        return self.peer.write(here, there, deadline_s=30, **more)

    async def sum_there(self, nbytes: int) -> int:
        return (await self.theirs.do("checksum", region=self.remote, offset=0, nbytes=nbytes))["checksum"]  # type: ignore[no-any-return]


async def test_small_writes_are_done_when_they_are_posted(start_peer: StartPeer, transport: str) -> None:
    theirs = start_peer(transport)
    async with await start("here", transport) as agent:
        writer = await Writer.of(agent, theirs)
        most = MOST_NBYTES[transport]
        for nbytes, count in ((1, 1), (4096, 1), (most // 16, 16), (most // 256, 256), (most, 1)):
            for verified in (False, True):
                await theirs.do("poke", region=writer.remote, offset=0, value=77)
                blocks = pattern(NBYTES, 9)[: nbytes * count].reshape(count, nbytes)[::-1]
                sums = [checksum(np.ascontiguousarray(block)) for block in blocks]
                before = sample("bytes_total", path=transport, direction="write")
                batch = writer.write(nbytes, count, checksums=sums if verified else None)
                assert batch.done()
                report = await batch
                assert (report.nbytes, report.transport) == (nbytes * count, transport)
                assert sample("bytes_total", path=transport, direction="write") == before + nbytes * count
                assert await writer.sum_there(nbytes * count) == checksum(np.ascontiguousarray(blocks))


@pytest.mark.parametrize("transport", ["tcp", "ucx"], indirect=True)
async def test_without_checksums_a_write_over_a_network_is_verified_against_our_bytes(
    start_peer: StartPeer, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The batch that follows repairs what was spoilt on the way."""
    theirs = start_peer(transport)
    async with await start("here", transport) as agent:
        writer = await Writer.of(agent, theirs)
        ask_now, spoilt = ByteStream.ask_now, 0

        def spoil(stream: ByteStream, request: bytes, reply: Reply, wait_s: float) -> bytes | None:
            nonlocal spoilt
            if request[4] == Op.WRITE:
                spoilt += 1
                request = request[:-1] + bytes([request[-1] ^ 1])
            return ask_now(stream, request, reply, wait_s)

        monkeypatch.setattr(ByteStream, "ask_now", spoil)
        while not spoilt:
            await writer.write(4096)
        assert await writer.sum_there(4096) == checksum(writer.memory.array[:4096])


async def test_what_is_larger_or_unusual_is_a_batch(start_peer: StartPeer, transport: str) -> None:
    theirs = start_peer(transport)
    async with await start("here", transport) as agent:
        writer = await Writer.of(agent, theirs)
        for nbytes, count, more in (
            (MOST_NBYTES[transport] + 1, 1, {}),
            (64, 257, {}),
            (64, 1, {"notify": b"note"}),
        ):
            batch = writer.write(nbytes, count, **more)
            assert not batch.done()
            await batch


async def test_they_are_refused_like_batches(
    start_peer: StartPeer, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = start_peer(transport)
    async with await start("here", transport) as agent:
        writer = await Writer.of(agent, theirs)
        read_only = (await theirs.do("register", nbytes=4096, seed=2, writable=False))["region"]
        ours, remote = writer.memory.id, writer.remote
        good, there = Span(ours, 0, 64), Span(remote, 0, 64)
        far = (1 << 64) - 8
        writes: list[tuple[list[Span], list[Span], dict[str, Any]]] = [
            ([Span(ours, NBYTES - 8, 16)], [Span(remote, 0, 16)], {}),
            ([Span(ours, far, 16)], [Span(remote, 0, 16)], {}),
            ([Span(ours, 0, 16)], [Span(remote, NBYTES - 8, 16)], {}),
            ([Span(ours, 0, 16)], [Span(remote, far, 16)], {}),
            ([good, good], [there, Span(remote, 32, 64)], {}),
            ([good], [Span(remote, 0, 65)], {}),
            ([good], [Span(read_only, 0, 64)], {}),
            ([good], [Span(remote + 7, 0, 64)], {}),
            ([Span(ours + 7, 0, 64)], [there], {}),
            ([good, Span(ours + 7, 0, 64)], [there, Span(remote, 64, 64)], {}),
            ([good], [there], {"grant": 12345}),
            ([good], [there], {"checksums": [1]}),
            ([good], [there], {"checksums": [1, 2]}),
            ([], [], {}),
        ]
        found: list[list[tuple[type, str]]] = []
        for at_once in (True, False):
            if not at_once:
                monkeypatch.setattr(StreamPath, "write_now", lambda *_: NOT_WRITTEN)
            errors = []
            for local, to, more in writes:
                with pytest.raises((MoonpoolError, ValueError)) as caught:
                    await writer.peer.write(local, to, deadline_s=30, **more)
                errors.append((caught.type, str(caught.value)))
            found.append(errors)
        assert found[0] == found[1]
        assert {kind for kind, _ in found[0]} == {SpanError, RegionError, ChecksumMismatch, GrantLapsed}


async def test_a_write_to_a_stopped_peer_is_a_batch_and_its_bytes_are_not_taken_later(
    start_peer: StartPeer, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The peer finds the first request when it goes on. The batch is done only when that cannot copy."""
    theirs = start_peer(transport)
    async with await start("here", transport) as agent:
        writer = await Writer.of(agent, theirs)
        monkeypatch.setattr(stream, "_NOW_S", 1e-4)
        nbytes = MOST_NBYTES[transport] // 256
        for value in range(1, 6):
            writer.memory.array[:MIB] = value
            theirs.signal(signal.SIGSTOP)
            batch = writer.write(nbytes, 256)
            assert not batch.done()
            theirs.signal(signal.SIGCONT)
            await batch
            writer.memory.array[:MIB] = 0
            assert await writer.sum_there(256 * nbytes) == checksum(np.full(256 * nbytes, value, np.uint8))
        agent.regions.check_integrity()


async def test_a_closed_region_is_not_written(start_peer: StartPeer, transport: str) -> None:
    theirs = start_peer(transport)
    async with await start("here", transport) as agent:
        writer = await Writer.of(agent, theirs)
        # Blocks the event loop, so that it cannot be told.
        theirs._do({"do": "close_region", "region": writer.remote})
        batch = writer.write(64)
        assert not batch.done()
        with pytest.raises(RegionError):
            await batch


async def test_a_revoked_grant_is_not_used_and_a_region_closed_here_not_read(transport: str) -> None:
    async with await start("here", transport) as agent, await start("peer", transport) as theirs:
        target, ours = theirs.allocate(NBYTES, "theirs"), agent.allocate(NBYTES, "ours")
        peer = await agent.connect(theirs.describe())
        grant = theirs.grant_writes([Span(target.id, 0, 4096)])
        here, there = [Span(ours.id, 0, 64)], [Span(target.id, 64, 64)]
        for turn in range(20):
            ours.array[:64] = turn + 1
            await peer.write(here, there, deadline_s=30, grant=grant.id)
            assert (target.array[64:128] == turn + 1).all()
        assert not target.array[128:].any()
        with pytest.raises(SpanError):
            await peer.write(here, [Span(target.id, 4090, 64)], deadline_s=30, grant=grant.id)
        await grant.end()
        ours.array[:64] = 99
        with pytest.raises(GrantLapsed):
            await peer.write(here, there, deadline_s=30, grant=grant.id)
        assert (target.array[64:128] == 20).all()
        theirs.allow_writes(target)
        await peer.write(here, there, deadline_s=30)
        ours.close()
        with pytest.raises(SpanError):
            await peer.write(here, there, deadline_s=30)
        # The peer is told of the end before what it wrote to is released.
        async with asyncio.timeout(60):
            while theirs.regions._holds:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        theirs.regions.check_integrity()
        theirs.grants.check_integrity()
