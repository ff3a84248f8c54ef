"""What is UCX's own: writes are read by the target, and what becomes of them."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from moonpool.runtime.config.options import TransferOptions
from moonpool.transfer import DeadlineExceeded, PathFailed, Peer, Region, RegionError, Span, TransferAgent
from moonpool.transfer.connections.backoff import Backoff
from moonpool.transfer.connections.wire import Op
from moonpool.transfer.copying.attempt import Attempt
from moonpool.transfer.native.ucx import load_ucx
from moonpool.transfer.paths.tcp.stream_path import StreamPath
from moonpool.transfer.paths.ucx import rma_read
from moonpool.transfer.paths.ucx.endpoint import Endpoint
from moonpool.transfer.paths.ucx.rma_path import UcxPath
from moonpool.transfer.paths.ucx.rma_read import Read
from moonpool.transfer.peers import failover
from moonpool.transfer.peers.dialer import Dialer
from tests.transfer.conftest import RemotePeer, StartPeer
from tests.transfer.faults import choose, outcome, settled, start_here
from tests.transfer.peer_process import pattern

NBYTES = 4 << 20
pytestmark = pytest.mark.skipif(load_ucx() is None, reason="there is no libucp: pip install moonpool[ucx]")


@dataclass
class Pair:
    """Two agents, ours and theirs, that have nothing but UCX; in one process, which UCX does not mind."""

    agent: TransferAgent
    other: TransferAgent
    peer: Peer
    ours: Region
    theirs: Region

    @property
    def writes(self) -> StreamPath:
        path = self.peer.paths.ranked()[0]
        assert isinstance(path, UcxPath)
        assert path._writes is not None
        return path._writes

    @property
    def write_op(self) -> Op:
        return self.writes.write_op

    async def write(self, region: Region) -> None:
        size = 1 << 16
        spans = [[Span(one.id, at, size) for at in range(0, NBYTES, size)] for one in (region, self.theirs)]
        await self.peer.write(*spans, deadline_s=10)
        assert np.array_equal(region.array, self.theirs.array)


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    options = TransferOptions(transports=("ucx",))
    async with (
        await TransferAgent.start(options, agent_id="here", epoch=1) as agent,
        await TransferAgent.start(options, agent_id="peer", epoch=1) as other,
    ):
        peer = await agent.connect(other.describe())
        ours = agent.allocate(NBYTES, "ours")
        ours.array[:] = pattern(NBYTES, 1)
        theirs = other.allocate(NBYTES, "theirs")
        other.allow_writes(theirs)
        yield Pair(agent, other, peer, ours, theirs)
        # A server thread releases its hold just after its reply.
        while other.regions._holds:  # noqa: ASYNC110
            await asyncio.sleep(0)
        agent.regions.check_integrity()
        other.regions.check_integrity()


async def test_a_write_is_read_by_the_target(pair: Pair) -> None:
    await pair.write(pair.ours)
    assert pair.write_op is Op.FETCH


async def test_regions_that_touch_are_told_apart(pair: Pair) -> None:
    """Neighbours in memory, but each has a key of its own."""
    memory = pattern(NBYTES, 2)
    first, second = pair.agent.register(memory[: NBYTES // 2]), pair.agent.register(memory[NBYTES // 2 :])
    local = [Span(first.id, 0, NBYTES // 2), Span(second.id, 0, NBYTES // 2)]
    remote = [Span(pair.theirs.id, 0, NBYTES // 2), Span(pair.theirs.id, NBYTES // 2, NBYTES // 2)]
    await pair.peer.write(local, remote, deadline_s=10)
    assert np.array_equal(memory, pair.theirs.array)
    assert pair.write_op is Op.FETCH


async def test_a_region_written_from_is_unmapped_once_the_target_has_released_it(pair: Pair) -> None:
    for seed in range(5):
        with pair.agent.allocate(NBYTES, "short-lived") as region:
            region.array[:] = pattern(NBYTES, seed)
            await pair.write(region)
    assert pair.agent.memory.ucx is not None
    await pair.write(pair.ours)
    # The answers came before that of the last write.
    assert len(pair.agent.memory.ucx) == 1
    pair.theirs.close()
    with pytest.raises(RegionError):
        await pair.peer.write([Span(pair.ours.id, 0, 8)], [Span(pair.theirs.id, 0, 8)], deadline_s=5)


async def test_where_the_target_cannot_reach_us_the_bytes_are_sent(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is asked again after a pause, which is longer if it fails again."""
    connect_back = Dialer.connect_back
    num_failures = 0

    def unreachable_twice(*arguments: Any) -> Peer:
        writer = connect_back(*arguments)
        (path,) = writer.paths
        start = path.start

        def fail(attempt: Attempt) -> None:
            nonlocal num_failures
            if num_failures == 2:
                start(attempt)
                return
            num_failures += 1
            attempt.stop(PathFailed("ucx", "no way back"))

        path.start = fail  # type: ignore[method-assign]
        return writer

    monkeypatch.setattr(Dialer, "connect_back", unreachable_twice)
    # The target tries its path to us once a write.
    monkeypatch.setattr(failover, "_MAX_TRIES_A_PATH", 1)
    now = [5.0]
    monkeypatch.setattr(pair.writes, "_pulls", Backoff(lambda: now[0]), raising=False)
    for failures, pause_s in ((1, 0.1), (2, 0.2)):
        assert pair.write_op is Op.FETCH
        await pair.write(pair.ours)
        assert num_failures == failures
        assert pair.write_op is Op.WRITE
        await pair.write(pair.ours)
        assert not pair.peer.lost
        now[0] += pause_s + 0.001
    assert pair.write_op is Op.FETCH
    await pair.write(pair.ours)
    assert num_failures == 2
    assert pair.write_op is Op.FETCH


async def test_a_read_that_is_slow_stays_on_its_path(
    start_peer: StartPeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes several times as long as one without progress may, and a chunk arrives now and then."""
    choose("ucx", monkeypatch)
    monkeypatch.setattr(failover, "_MAX_STALL_S", 2.0)
    monkeypatch.setattr(rma_read, "_CHUNKS_IN_FLIGHT", 1)
    post = Read._post
    posted_s = [0.0]

    def post_later(read: Read, endpoint: Endpoint) -> bool:
        if not read._in_flight and time.monotonic() < posted_s[0] + 0.4:
            read._worker.wake()
            return False
        posted_s[0] = time.monotonic()
        return post(read, endpoint)

    monkeypatch.setattr(Read, "_post", post_later)
    nbytes, size = 16 << 20, 1 << 20
    theirs = start_peer("ucx,tcp")
    async with await start_here("ucx,tcp") as agent:
        remote = (await theirs.do("allocate", nbytes=nbytes, seed=1))["region"]
        peer, memory = await agent.connect(theirs.descriptor), agent.allocate(nbytes, "memory")
        ours, spans = (
            [Span(each, at, size) for at in range(0, nbytes, size)] for each in (memory.id, remote)
        )
        report = await peer.read(ours, spans, deadline_s=60)
        assert report.transport == "ucx"
        assert np.array_equal(memory.array, pattern(nbytes, 1))


@dataclass
class Stuck:
    """Requests that libucp says are not complete, though they may be, while ``held``. The rest is real.
    every: hold those to come, too."""

    agent: TransferAgent
    held: bool = True
    every: bool = False
    requests: set[int] = field(default_factory=set)

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        library = load_ucx()
        assert library is not None
        real: Callable[[int], int] = library.quick.ucp_request_check_status

        def check(request: int) -> int:
            return 1 if self.held and (self.every or request in self.requests) else real(request)

        monkeypatch.setattr(library.quick, "ucp_request_check_status", check)

    async def take(self) -> None:
        """Wait for a read with posted requests, and hold these."""
        assert self.agent.memory.ucx is not None
        worker = self.agent.memory.ucx.worker

        def posted() -> set[int]:
            reads = [task for task in worker._tasks if isinstance(task, Read)]
            found = [each for read in reads for each in read._in_flight if each.flush]
            return {request for each in found for request in (*each.gets, each.flush)}

        while not self.requests:
            self.requests = await worker.run(posted)


async def test_a_connection_ends_after_what_the_target_reads_for_it(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the target says that a connection has ended, none of its bytes can arrive any more."""
    await pair.write(pair.ours)
    num_served = len(pair.other._server)
    stuck = Stuck(pair.other, every=True)
    stuck.install(monkeypatch)
    writing = asyncio.ensure_future(pair.write(pair.ours))
    await stuck.take()
    writing.cancel()
    await outcome(writing)
    (path,) = pair.other._peers.writer(pair.agent.identity).paths
    assert isinstance(path, UcxPath)
    while path._endpoint is None or not path._endpoint.closed:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    assert len(pair.other._server) == num_served
    stuck.held = False
    while len(pair.other._server) == num_served:  # noqa: ASYNC110
        await asyncio.sleep(0.001)


async def stopped_read(
    agent: TransferAgent, theirs: RemotePeer, deadline_s: float
) -> tuple[Peer, Region, asyncio.Future[Any], Callable[[], Any]]:
    """A read from a peer that is stopped: the peer, our region, the batch, and the same read once more."""
    remote = (await theirs.do("allocate", nbytes=NBYTES, seed=1))["region"]
    peer, memory = await agent.connect(theirs.descriptor), agent.allocate(NBYTES, "memory")
    size = 1 << 16
    ours, spans = ([Span(each, at, size) for at in range(0, NBYTES, size)] for each in (memory.id, remote))
    await peer.read(ours, spans, deadline_s=20)
    theirs.signal(signal.SIGSTOP)
    batch = peer.read(ours, spans, deadline_s=deadline_s)
    return peer, memory, asyncio.ensure_future(batch), lambda: peer.read(ours, spans, deadline_s=20)


@pytest.mark.parametrize("cancelled", [True, False])
async def test_spans_are_given_back_when_their_requests_are_complete(
    start_peer: StartPeer, monkeypatch: pytest.MonkeyPatch, cancelled: bool
) -> None:
    choose("ucx-tcp", monkeypatch)
    # Longer than a busy machine takes to connect to the other peer.
    monkeypatch.setattr(rma_read, "_GIVE_UP_S", 60.0)
    theirs, other = start_peer("ucx"), start_peer("ucx")
    async with await start_here("ucx") as agent:
        stuck = Stuck(agent)
        stuck.install(monkeypatch)
        peer, memory, batch, again = await stopped_read(agent, theirs, 60 if cancelled else 0.5)
        await stuck.take()
        if cancelled:
            batch.cancel()
        (path,) = [path for path in peer.paths if isinstance(path, UcxPath)]
        while path._endpoint is None or not path._endpoint.closed:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        # Others are read meanwhile: their thread does not wait.
        remote = (await other.do("allocate", nbytes=8, seed=1))["region"]
        another = await agent.connect(other.descriptor)
        with agent.allocate(8, "eight bytes") as eight:
            await another.read([Span(eight.id, 0, 8)], [Span(remote, 0, 8)], deadline_s=20)
        assert not batch.done()
        stuck.held = False
        result, _ = await outcome(batch)
        assert isinstance(result, asyncio.CancelledError if cancelled else DeadlineExceeded)
        memory.array[:] = 9
        theirs.signal(signal.SIGCONT)
        await settled(agent)
        await theirs.do("drained", num_streams=0)
        assert (memory.array == 9).all()
        await again()
        assert np.array_equal(memory.array, pattern(NBYTES, 1))


async def test_requests_that_never_end_cost_the_worker_and_no_byte(
    start_peer: StartPeer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    choose("ucx-tcp", monkeypatch)
    monkeypatch.setattr(rma_read, "_GIVE_UP_S", 0.2)
    monkeypatch.setattr(failover, "_MIN_STALL_S", 1.0)  # the deadline comes before the other path is tried
    theirs = start_peer("ucx,tcp")
    async with await start_here("ucx,tcp") as agent:
        stuck = Stuck(agent)
        stuck.install(monkeypatch)
        _, memory, batch, again = await stopped_read(agent, theirs, 0.5)
        await stuck.take()
        result, _ = await outcome(batch)
        assert isinstance(result, DeadlineExceeded)
        memory.array[:] = 9
        assert agent.memory.ucx is not None
        assert agent.memory.ucx.worker.stopped
        assert "UCX is not used any more" in caplog.text
        theirs.signal(signal.SIGCONT)
        await theirs.do("drained", num_streams=0)
        assert (memory.array == 9).all()
        report = await again()
        assert report.transport == "tcp"
        assert np.array_equal(memory.array, pattern(NBYTES, 1))
