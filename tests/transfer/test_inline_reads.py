"""Small reads that are done when they are posted: like batches in everything but time, and never stale."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from moonpool.runtime.config.options import TransferOptions
from moonpool.runtime.errors import MoonpoolError
from moonpool.transfer import (
    ChecksumMismatch,
    Peer,
    PeerLost,
    Region,
    RegionError,
    Span,
    SpanError,
    Spans,
    TransferAgent,
    checksum,
)
from moonpool.transfer.copying import peer_memory
from moonpool.transfer.copying.joint_read import JointRead
from moonpool.transfer.native.compiled_copy import compiled_copy
from moonpool.transfer.paths.shm import ShmPath
from tests.transfer.conftest import RemotePeer, StartPeer
from tests.transfer.peer_process import pattern
from tests.transfer.test_conformance import scattered
from tests.transfer.test_metrics import sample

NBYTES = 8 << 20
MIB = 1 << 20

pytestmark = pytest.mark.skipif(compiled_copy() is None, reason="there is no compiler")


def start(agent_id: str) -> Any:
    return TransferAgent.start(TransferOptions(transports=("shm",)), agent_id=agent_id, epoch=1)


@dataclass
class Pair:
    """An agent here with ``memory``, and a peer with the region ``remote`` of ``pattern(NBYTES, 1)``."""

    agent: TransferAgent
    peer: Peer
    memory: Region
    remote: int

    def spans(self, nbytes: int, count: int = 1, region: int = 0) -> tuple[Spans, Spans]:
        """``count`` blocks of ``nbytes`` in reverse order, from the first ones in order."""
        at = np.arange(count) * nbytes
        return (
            Spans.blocks(self.memory.id, at[::-1], nbytes),
            Spans.blocks(region or self.remote, at, nbytes),
        )

    def read(self, nbytes: int, count: int = 1, region: int = 0, **more: Any) -> Any:
        return self.peer.read(*self.spans(nbytes, count, region), deadline_s=30, **more)


@pytest.fixture(params=["readable", "mapped"])
async def pair(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Pair]:
    """Two agents of this process; mapped: neither may read the other's memory, so memfds are sent."""
    if request.param == "mapped":
        monkeypatch.setattr(peer_memory, "readable_process", lambda *_: None)
    async with await start("here") as agent, await start("peer") as theirs:
        remote = theirs.allocate(NBYTES, "theirs")
        remote.array[:] = pattern(NBYTES, 1)
        peer = await agent.connect(theirs.describe())
        found = Pair(agent, peer, agent.allocate(NBYTES, "ours"), remote.id)
        await found.read(64)
        yield found
        agent.regions.check_integrity()


async def remote_pair(agent: TransferAgent, theirs: RemotePeer) -> Pair:
    """A peer in another process, from which a small read is done at once."""
    remote = (await theirs.do("allocate", nbytes=NBYTES, seed=1))["region"]
    found = Pair(agent, await agent.connect(theirs.descriptor), agent.allocate(NBYTES, "ours"), remote)
    await found.read(4096)
    assert found.read(4096).done()
    return found


async def test_small_reads_are_done_when_they_are_posted(pair: Pair) -> None:
    for nbytes, count in ((1, 1), (4096, 1), (65536, 16), (4096, 256), (MIB, 1)):
        pair.memory.array[:] = 0
        batch = pair.read(nbytes, count)
        assert batch.done()
        expected = pattern(NBYTES, 1)[: nbytes * count].reshape(count, nbytes)[::-1].reshape(-1)
        assert np.array_equal(pair.memory.array[: nbytes * count], expected)
        assert not pair.memory.array[nbytes * count :].any()
        report = await batch
        assert (report.nbytes, report.transport) == (nbytes * count, "shm")
        assert await batch == report


@pytest.mark.parametrize("seed", range(5))
async def test_only_the_named_bytes_change(pair: Pair, seed: int) -> None:
    """Spans of any size and order; verified where their checksums are computed in the same call."""
    spans = [span for span in scattered(300, seed)[0] if span[2] < 65536][: 200 + seed]
    source, expected = pattern(NBYTES, 1), np.zeros(NBYTES, np.uint8)
    for verified in (False, True):
        if verified:
            spans = [span for span in spans if span[2] > 240]
        pair.memory.array[:] = expected[:] = 0
        for here, there, nbytes in spans:
            expected[here : here + nbytes] = source[there : there + nbytes]
        sums = [checksum(source[there : there + nbytes]) for _, there, nbytes in spans]
        ours = [Span(pair.memory.id, here, nbytes) for here, _, nbytes in spans]
        theirs = [Span(pair.remote, there, nbytes) for _, there, nbytes in spans]
        assert pair.peer.read(ours, theirs, deadline_s=30, checksums=sums if verified else None).done()
        assert np.array_equal(pair.memory.array, expected)


async def test_what_is_larger_or_unusual_is_a_batch(pair: Pair) -> None:
    joint = JointRead(pair.memory, [0], 4096, [checksum(pattern(NBYTES, 1)[:4096])], 1)
    reads: list[tuple[int, int, dict[str, Any]]] = [
        (MIB + 1, 1, {}),
        (1024, 257, {}),
        (4096, 1, {"joint": joint}),
        (240, 1, {"checksums": [checksum(pattern(NBYTES, 1)[:240])]}),
    ]
    for nbytes, count, more in reads:
        batch = pair.read(nbytes, count, **more)
        assert not batch.done()
        await batch
    pair.peer.paths.failed(pair.peer.paths.ranked()[0])
    batch = pair.read(4096)
    assert not batch.done()
    await batch
    assert pair.read(4096).done()


NAMES = ("bytes_total", "spans_total", "batch_seconds_count", "batch_seconds_sum", "attempts")


def counted() -> dict[str, float]:
    of = {"path": "shm", "direction": "read"}
    return {
        **{name: sample(name, **of) for name in NAMES},
        "in_flight": sample("in_flight_bytes", direction="read"),
        "mismatches": sample("checksum_mismatches_total", direction="read"),
        "failed": sample("failures_total", direction="read", cause="ChecksumMismatch"),
        "attempts_failed": sample("failed_attempts_total", **of),
    }


async def test_they_are_counted_like_batches(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes, spans, seconds, errors and the bandwidth of the path."""
    found = []
    for at_once in (True, False):
        if not at_once:
            monkeypatch.setattr(ShmPath, "read_now", lambda *_: 0)
        before, bandwidth = counted(), pair.peer.bandwidth.get("shm", 0.0)
        seconds = 0.0
        for nbytes, count in ((4096, 3), (65536, 16)):
            batch = pair.read(nbytes, count)
            assert batch.done() == at_once
            seconds += (await batch).seconds
        with pytest.raises(ChecksumMismatch):
            await pair.read(4096, checksums=[1])
        assert pair.peer.bandwidth["shm"] != bandwidth
        change = {name: value - before[name] for name, value in counted().items()}
        assert change.pop("batch_seconds_sum") == pytest.approx(seconds)
        found.append(change)
    assert found[0] == found[1]
    assert found[0]["bytes_total"] == 3 * 4096 + MIB
    assert found[0]["mismatches"] == found[0]["failed"] == found[0]["attempts_failed"] == 1


def column(*values: float, dtype: type = np.uint64) -> Any:
    return np.array(values, dtype)


def bad_reads(pair: Pair) -> list[tuple[Any, Any, dict[str, Any]]]:
    """(local, remote, more arguments) of reads that must be refused."""
    ours, remote = pair.memory.id, pair.remote
    one, closed = column(1, dtype=np.uint32), pair.agent.allocate(8, "closed")
    closed.close()
    read_only = pair.agent.register(bytes(4096), writable=False).id
    good, theirs = Span(ours, 0, 4096), Span(remote, 0, 4096)
    far = (1 << 64) - 8
    return [
        ([good, Span(ours, NBYTES - 8, 16)], [theirs, Span(remote, 0, 16)], {}),
        ([good, Span(ours, far, 16)], [theirs, Span(remote, 0, 16)], {}),
        ([good, Span(ours, 8192, far)], [theirs, Span(remote, 0, far)], {}),
        ([good, Span(ours, 8192, 0)], [theirs, Span(remote, 0, 0)], {}),
        ([good, Span(ours, 8192, 8)], [theirs, Span(remote, 0, 9)], {}),
        ([good, Span(ours, 4088, 16)], [theirs, Span(remote, 0, 16)], {}),
        ([Span(ours, 4088, 16), good], [Span(remote, 0, 16), theirs], {}),
        ([good, Span(ours, 8192, 16)], [theirs, Span(remote, NBYTES - 15, 16)], {}),
        ([good, Span(ours, 8192, 16)], [theirs, Span(remote, far, 16)], {}),
        ([good, Span(closed.id, 0, 8)], [theirs, Span(remote, 0, 8)], {}),
        ([Span(closed.id, 0, 8)], [Span(remote, 0, 8)], {}),
        ([Span(read_only, 0, 8)], [Span(remote, 0, 8)], {}),
        ([good, good], [theirs], {}),
        ([], [], {}),
        ([good], [Span(remote + 7, 0, 4096)], {}),
        ([good, Span(ours, 8192, 8)], [theirs, Span(remote + 7, 0, 8)], {}),
        ([good], [theirs], {"checksums": [1]}),
        ([good], [theirs], {"checksums": [-1]}),
        ([good], [theirs], {"checksums": []}),
        ([good], [theirs], {"checksums": [1, 2]}),
        ([good], [theirs], {"deadline_s": 0.0}),
        ([good], [theirs], {"deadline_s": float("nan")}),
        (Spans(one * ours, column(0.0, dtype=float), column(8)), [Span(remote, 0, 8)], {}),  # type: ignore[arg-type]
        (Spans(one * ours, column(-8, dtype=np.int64), column(8)), [Span(remote, 0, 8)], {}),  # type: ignore[arg-type]
        (Spans((one * ours)[None], column(0)[None], column(8)[None]), [Span(remote, 0, 8)], {}),
    ]


async def test_they_are_refused_like_batches(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    reads = bad_reads(pair)
    found: list[list[tuple[type, str]]] = []
    for at_once in (True, False):
        if not at_once:
            monkeypatch.setattr(ShmPath, "read_now", lambda *_: 0)
        errors = []
        for local, remote, more in reads:
            pair.memory.array[:] = 3
            with pytest.raises((MoonpoolError, ValueError)) as caught:
                await pair.peer.read(local, remote, **{"deadline_s": 5.0, **more})
            errors.append((caught.type, str(caught.value)))
            if not isinstance(caught.value, ChecksumMismatch):
                assert (pair.memory.array == 3).all()
        found.append(errors)
    assert found[0] == found[1]
    assert {kind for kind, _ in found[0]} == {SpanError, RegionError, ChecksumMismatch, ValueError}


async def test_the_bytes_of_a_killed_process_are_not_read(start_peer: StartPeer) -> None:
    """Its memory is still mapped, and the event loop has not been told."""
    theirs = start_peer("shm")
    async with await start("here") as agent:
        pair = await remote_pair(agent, theirs)
        theirs.kill()
        assert not pair.peer.lost
        batch = pair.read(4096)
        assert not batch.done()
        with pytest.raises(PeerLost):
            await batch
        assert pair.peer.lost
        with pytest.raises(PeerLost):
            pair.read(4096)


async def test_reads_at_the_moment_of_a_kill_end_with_an_error(start_peer: StartPeer) -> None:
    """Reads without a pause: each one is whole, or it is the last."""
    theirs = start_peer("shm")
    async with await start("here") as agent:
        pair, expected = await remote_pair(agent, theirs), pattern(NBYTES, 1)[:4096]
        killing: asyncio.Task[None] | None = None
        done = 0
        with pytest.raises(PeerLost):
            while True:
                pair.memory.array[:4096] = 0
                await pair.read(4096)
                assert np.array_equal(pair.memory.array[:4096], expected)
                done += 1
                if done == 100:
                    killing = asyncio.create_task(asyncio.to_thread(theirs.kill))
        assert killing is not None
        await killing


async def test_the_bytes_of_a_restarted_process_come_from_its_new_regions(start_peer: StartPeer) -> None:
    old = start_peer("shm", epoch=1)
    async with await start("here") as agent:
        pair = await remote_pair(agent, old)
        old.kill()
        new = start_peer("shm", epoch=2)
        region = (await new.do("allocate", nbytes=NBYTES, seed=2))["region"]
        assert region == pair.remote
        with pytest.raises(PeerLost):
            await pair.read(4096)
        peer = await agent.connect(new.descriptor)
        for _ in range(2):
            await peer.read(*pair.spans(4096), deadline_s=30)
            assert np.array_equal(pair.memory.array[:4096], pattern(NBYTES, 2)[:4096])


@pytest.mark.parametrize("what", ["close_region", "close_agent"])
async def test_a_region_given_back_is_not_read(start_peer: StartPeer, what: str) -> None:
    """Before the event loop has been told, and afterwards; neither is a later region in its place."""
    theirs = start_peer("shm")
    async with await start("here") as agent:
        pair = await remote_pair(agent, theirs)
        # Blocks the event loop, so that it cannot be told.
        theirs._do({"do": what, **({"region": pair.remote} if what == "close_region" else {})})
        if what == "close_region":
            theirs._do({"do": "allocate", "nbytes": NBYTES, "seed": 2})
        for _ in range(2):
            batch = pair.read(4096)
            assert not batch.done()
            with pytest.raises(RegionError if what == "close_region" else (PeerLost, RegionError)):
                await batch
            if pair.peer.lost:
                break


async def test_a_stopped_process_is_read(start_peer: StartPeer) -> None:
    theirs = start_peer("shm")
    async with await start("here") as agent:
        pair = await remote_pair(agent, theirs)
        theirs.signal(signal.SIGSTOP)
        pair.memory.array[:] = 0
        assert pair.read(4096).done()
        assert np.array_equal(pair.memory.array[:4096], pattern(NBYTES, 1)[:4096])


async def test_a_closed_agent_reads_nothing(start_peer: StartPeer) -> None:
    theirs = start_peer("shm")
    agent = await start("here")
    pair = await remote_pair(agent, theirs)
    await agent.close()
    with pytest.raises(MoonpoolError):
        pair.read(4096)


async def test_a_task_of_small_reads_lets_others_run(pair: Pair) -> None:
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    running = asyncio.create_task(other())
    for _ in range(2000):
        await pair.read(4096)
    running.cancel()
    # 2,000 reads take more than 2 ms, and each 50 µs of them are followed by a turn of the loop.
    assert turns > 20
