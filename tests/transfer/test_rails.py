"""Several addresses of a peer: a batch is spread over them, and goes on over those that are left."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
from prometheus_client import REGISTRY

from moonpool.runtime.config.options import TcpOptions, TransferOptions
from moonpool.transfer import (
    AgentDescriptor,
    Batch,
    DeadlineExceeded,
    DescriptorError,
    Peer,
    Region,
    Span,
    TransferAgent,
)
from moonpool.transfer.connections.backoff import Backoff
from moonpool.transfer.copying.attempt import Attempt
from moonpool.transfer.copying.batch_request import Direction
from moonpool.transfer.memory.chunks import Chunking
from moonpool.transfer.paths.base import Path
from moonpool.transfer.paths.tcp.stream_path import StreamPath
from moonpool.transfer.peers import failover
from moonpool.transfer.peers.path_choice import PathChoice
from tests.transfer.cables import Cabled
from tests.transfer.conftest import StartPeer
from tests.transfer.faults import GRACE_S, Proxy, late, num_streams, settled
from tests.transfer.peer_process import pattern

NBYTES = 32 << 20
HOSTS = ("127.0.0.1", "127.0.0.2", "127.0.0.3")


@dataclass
class Railed:
    """An agent here, a peer with an address for each of ``cables``, and a region on either side."""

    agent: TransferAgent
    server: TransferAgent
    descriptor: AgentDescriptor
    peer: Peer
    cables: list[Proxy]
    ours: Region
    theirs: Region

    def move(self, direction: str, deadline_s: float) -> Batch:
        size = 1 << 20
        offsets = range(0, NBYTES, size)
        return getattr(self.peer, direction)(  # type: ignore[no-any-return]
            [Span(self.ours.id, at, size) for at in offsets],
            [Span(self.theirs.id, at, size) for at in offsets],
            deadline_s=deadline_s,
        )

    def fill(self, direction: str, seed: int) -> None:
        source, target = (self.theirs, self.ours) if direction == "read" else (self.ours, self.theirs)
        source.array[:], target.array[:] = pattern(NBYTES, seed), 0

    def arrived(self) -> bool:
        return np.array_equal(self.ours.array, self.theirs.array)

    def use(self, *paths: Path) -> None:
        self.peer.route = replace(self.peer.route, paths=PathChoice(paths))

    def num_streams(self, rail: int) -> int:
        (path,) = self.peer.paths
        assert isinstance(path, StreamPath)
        return path._rails[rail].num_streams

    def passed(self) -> list[int]:
        return [cable.passed_nbytes for cable in self.cables]

    async def cut_short(self, direction: str, seed: int, cable: Proxy, do: Callable[[], None]) -> None:
        """Move everything, while ``do`` happens to ``cable`` in the middle of a chunk that it carries."""
        cable.after(256 << 10, do)
        async with asyncio.timeout(60):
            # A batch that leaves this rail out is no use here.
            while cable.waits:
                self.fill(direction, seed)
                await self.move(direction, 20)
        assert self.arrived()

    async def late_bytes_have_come(self, held: list[tuple[Proxy, list[threading.Thread]]]) -> None:
        """Wait until what was held back has reached its end, and all that could take it has ended."""
        for cable, threads in held:
            await cable.drained(threads)
        await settled(self.agent)
        async with asyncio.timeout(60):
            while len(self.server._server) > num_streams(self.agent):  # noqa: ASYNC110
                await asyncio.sleep(0.001)

    async def joined(self) -> None:
        """Until all connections to all addresses are there."""
        (path,) = self.peer.paths
        assert isinstance(path, StreamPath)
        while len(path._streams) < 2 * len(self.cables):
            await self.move("read", 20)


@pytest.fixture
async def railed() -> AsyncIterator[Railed]:
    tcp = TcpOptions(host=HOSTS[0], rails=HOSTS[1:])
    options = TransferOptions(transports=("tcp",), tcp=tcp)
    async with (
        await TransferAgent.start(TransferOptions(transports=("tcp",)), agent_id="here", epoch=1) as agent,
        await TransferAgent.start(options, agent_id="peer", epoch=1) as other,
    ):
        addresses = other.describe().tcp_addresses
        cables = [Proxy(port, host=host) for host, port in addresses]
        first, *further = cables
        descriptor = replace(
            other.describe(),
            tcp_port=first.port,
            tcp_rails=tuple(f"{host}:{cable.port}" for host, cable in zip(HOSTS[1:], further, strict=True)),
        )
        ours, theirs = agent.allocate(NBYTES, "ours"), other.allocate(NBYTES, "theirs")
        other.allow_writes(theirs)
        railed = Railed(agent, other, descriptor, await agent.connect(descriptor), cables, ours, theirs)
        await railed.joined()
        yield railed
        for cable in cables:
            cable.close()


@pytest.mark.parametrize("direction", ["read", "write"])
async def test_a_large_batch_is_striped_over_all_rails(railed: Railed, direction: str) -> None:
    for turn in range(5):  # a rail whose threads get no processor for a while has five tries
        railed.fill(direction, turn)
        before = railed.passed()
        await railed.move(direction, 60)
        assert railed.arrived()
        carried = [after - earlier for after, earlier in zip(railed.passed(), before, strict=True)]
        assert sum(carried) >= NBYTES
        if all(nbytes > NBYTES // 20 for nbytes in carried):
            break
    assert all(nbytes > NBYTES // 20 for nbytes in carried), carried


@pytest.mark.alone  # it is compared with how long the same took just before
async def test_a_slow_rail_carries_less_and_does_not_hold_up_the_others(railed: Railed) -> None:
    usual_s = max((await railed.move("read", 10)).seconds, 0.05)
    # A third of the bytes, over its two connections, would take ten times what all of them take usually.
    nbytes_per_s = NBYTES / 3 / 2 / (10 * usual_s)
    railed.cables[1]._see = lambda received: time.sleep(len(received) / nbytes_per_s)
    for _ in range(5):  # a machine that stands still for a while has five tries
        before = railed.passed()
        report = await railed.move("read", 60)
        carried = [after - earlier for after, earlier in zip(railed.passed(), before, strict=True)]
        if carried[1] < min(carried[0], carried[2]) and report.seconds < 8 * usual_s:
            break
    assert carried[1] < min(carried[0], carried[2])
    assert report.seconds < 8 * usual_s


@pytest.mark.slow
@pytest.mark.parametrize("direction", ["read", "write"])
@pytest.mark.parametrize("number", [0, 2])
async def test_a_batch_goes_on_when_a_rail_is_cut_and_the_rail_comes_back(
    railed: Railed, direction: str, number: int
) -> None:
    """Silently, as a pulled cable; also the one that the control connection goes over."""
    cable = railed.cables[number]
    failures = REGISTRY.get_sample_value("moonpool_transfer_rail_failures_total", {"path": "tcp"}) or 0
    await railed.cut_short(direction, 2, cable, cable.hold)
    # The second batch ends connections that were idle; the third leaves the rail alone.
    await railed.move(direction, 8)
    assert railed.num_streams(number) == 0
    railed.fill(direction, 3)
    held = cable.passed_nbytes
    await railed.move(direction, 8)
    assert railed.arrived()
    assert cable.passed_nbytes == held
    counted = REGISTRY.get_sample_value("moonpool_transfer_rail_failures_total", {"path": "tcp"})
    assert counted is not None and counted > failures
    cable.release()
    async with asyncio.timeout(60):
        while cable.passed_nbytes < held + (1 << 20):
            await railed.move(direction, 8)
    await railed.joined()


async def test_a_rail_that_breaks_hands_its_chunks_to_the_others_at_once(
    railed: Railed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once, not when the stall is noticed: the watch is off here."""
    monkeypatch.setattr(failover, "_MIN_STALL_S", 3600.0)
    monkeypatch.setattr(failover, "_MAX_STALL_S", 3600.0)
    labels = {"path": "tcp", "direction": "read"}
    failed = REGISTRY.get_sample_value("moonpool_transfer_failed_attempts_total", labels)
    for turn in range(4):
        cable = railed.cables[1 + turn % 2]
        await railed.cut_short("read", turn, cable, cable.cut)
    # No batch began again.
    assert REGISTRY.get_sample_value("moonpool_transfer_failed_attempts_total", labels) == failed


@pytest.mark.slow
async def test_what_a_cut_rail_held_back_of_a_write_never_lands_after_it(railed: Railed) -> None:
    """The bytes went over another rail meanwhile; by then their place may mean something else."""
    for turn in range(3):
        cable = railed.cables[1 + turn % 2]
        await railed.cut_short("write", turn, cable, cable.hold)
        railed.theirs.array[:] = 9
        held = [(cable, cable.forwarding())]
        # Ends connections that were idle.
        while railed.num_streams(1 + turn % 2):
            await railed.move("read", 5)
        cable.release()
        await railed.late_bytes_have_come(held)
        assert (railed.theirs.array == 9).all()
        await railed.joined()


@pytest.mark.parametrize("direction", ["read", "write"])
async def test_when_all_rails_are_cut_the_deadline_ends_it(railed: Railed, direction: str) -> None:
    for cable in railed.cables:
        cable.hold()
    result, late_s = await late(railed.move(direction, 0.6), 0.6)
    assert isinstance(result, DeadlineExceeded)
    assert late_s < GRACE_S
    railed.ours.array[:] = 9
    held = [(cable, cable.forwarding()) for cable in railed.cables]
    railed.agent._peers.link_lost(railed.peer.link, "so that the control connection ends too")
    for cable in railed.cables:
        cable.release()
    await railed.late_bytes_have_come(held)
    assert (railed.ours.array == 9).all()


async def test_an_agent_is_found_by_any_of_its_addresses(railed: Railed) -> None:
    """The first is dead, the second takes no notice."""
    railed.cables[0].close()
    railed.cables[1].hold()
    options = TransferOptions(transports=("tcp",))
    async with await TransferAgent.start(options, agent_id="late", epoch=1) as late:
        peer = await late.connect(railed.descriptor)
        copy = late.allocate(NBYTES, "copy")
        railed.theirs.array[:] = pattern(NBYTES, 7)
        await peer.read([Span(copy.id, 0, NBYTES)], [Span(railed.theirs.id, 0, NBYTES)], deadline_s=60)
        assert np.array_equal(copy.array, pattern(NBYTES, 7))


@pytest.mark.parametrize("rails", [["127.0.0.2"], "127.0.0.2:1", [":1"], ["a:0"], ["a:65536"], ["a:1"] * 17])
def test_what_is_no_rail_is_refused(railed: Railed, rails: object) -> None:
    fields = json.loads(railed.descriptor.pack())
    assert AgentDescriptor.unpack(json.dumps(fields).encode()) == railed.descriptor
    with pytest.raises(DescriptorError, match="tcp_rails"):
        AgentDescriptor.unpack(json.dumps(fields | {"tcp_rails": rails}).encode())


class Stuck(Path):
    """A path on which nothing ever arrives, as over a link that was cut."""

    name = "stuck"
    networked = True

    def chunking(
        self, direction: Direction, nbytes: int, verified: bool, region_ids: Sequence[int]
    ) -> Chunking:
        return Chunking(1 << 20, 1024)

    def start(self, attempt: Attempt) -> None:
        """No thread enters, so it can be stopped at any time."""

    def progress(self, attempt: Attempt) -> dict[object, int]:
        return {self: attempt.chunks_left}


async def test_a_batch_leaves_a_path_that_is_stuck_in_time_for_the_next(railed: Railed) -> None:
    (tcp,) = railed.peer.paths
    assert isinstance(tcp, StreamPath)
    stuck = Stuck()
    railed.use(stuck, tcp)
    railed.fill("read", 5)
    report = await railed.move("read", 8)
    assert railed.arrived()
    assert report.transport == "tcp"
    # Where there is no other way, it is waited for until the end.
    railed.use(stuck)
    batch, began_s = railed.move("read", 0.5), time.perf_counter()
    result, late_s = await late(batch, 0.5)
    assert isinstance(result, DeadlineExceeded)
    assert time.perf_counter() - began_s > 0.45
    assert late_s < GRACE_S
    # The agent closes the paths that it finds there.
    railed.use(tcp)


def test_those_who_fail_together_count_once() -> None:
    now = [5.0]
    backoff = Backoff(lambda: now[0])
    for pause_s in (0.1, 0.2, 0.4):
        for _ in range(8):
            backoff.failed()
        assert backoff.paused_until == pytest.approx(now[0] + pause_s)
        assert not backoff.ready
        now[0] = backoff.paused_until
        assert backoff.ready
    backoff.succeeded()
    backoff.failed()
    assert backoff.paused_until == pytest.approx(now[0] + 0.1)


@pytest.mark.slow
@pytest.mark.alone  # other tests lay cables too
async def test_cables_are_pulled(cabled: Cabled, start_peer: StartPeer) -> None:
    """A peer in a network namespace of its own, by two cables: either will do, none is past the deadline."""
    theirs = start_peer("tcp", namespace=cabled.name, TCP_HOSTS=",".join(cabled.hosts))
    remote = (await theirs.do("allocate", nbytes=NBYTES, seed=6))["region"]
    async with await TransferAgent.start(
        TransferOptions(transports=("tcp",)), agent_id="here", epoch=1
    ) as agent:
        ours = agent.allocate(NBYTES, "ours")
        peer = await agent.connect(theirs.descriptor)
        spans = [Span(ours.id, 0, NBYTES)], [Span(remote, 0, NBYTES)]
        await peer.read(*spans, deadline_s=5)
        for cable in (1, 0):
            ours.array[:] = 0
            batch = peer.read(*spans, deadline_s=4)
            await asyncio.sleep(0)
            cabled.pull(cable)
            await batch
            assert np.array_equal(ours.array, pattern(NBYTES, 6))
            await peer.write(*spans, deadline_s=4)
            cabled.plug(cable)
            # Wait until it is used again, or the next one that is pulled is the last there was.
            (path,) = peer.paths
            assert isinstance(path, StreamPath)
            async with asyncio.timeout(60):
                while len(path._streams) < 4:
                    await peer.read(*spans, deadline_s=5)
        for cable in (0, 1):
            cabled.pull(cable)
        ours.array[:] = 9
        for move in (peer.read, peer.write):
            result, late_s = await late(move(*spans, deadline_s=0.5), 0.5)
            assert isinstance(result, DeadlineExceeded)
            assert late_s < GRACE_S
        for cable in (0, 1):
            cabled.plug(cable)
        # The control connection is the old one: no packet of it was lost.
        await peer.read(*spans, deadline_s=5)
        assert np.array_equal(ours.array, pattern(NBYTES, 6))
