"""What is UCX's own: writes are read by the target, and what becomes of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from moonpool.runtime.config.options import TransferOptions
from moonpool.transfer import PathFailed, Peer, Region, RegionError, Span, TransferAgent
from moonpool.transfer.connections.wire import Op
from moonpool.transfer.copying.attempt import Attempt
from moonpool.transfer.native.ucx import load_ucx
from moonpool.transfer.paths.ucx.rma_path import UcxPath
from moonpool.transfer.peers.dialer import Dialer
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
    def write_op(self) -> Op:
        path = self.peer.paths.ranked()[0]
        assert isinstance(path, UcxPath)
        assert path._writes is not None
        return path._writes.write_op

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
    connect_back = Dialer.connect_back

    def unreachable(*arguments: Any) -> Peer:
        writer = connect_back(*arguments)

        def fail(attempt: Attempt) -> None:
            attempt.stop(PathFailed("ucx", "no way back"))

        for path in writer.paths:
            path.start = fail  # type: ignore[method-assign]
        return writer

    monkeypatch.setattr(Dialer, "connect_back", unreachable)
    await pair.write(pair.ours)
    assert pair.write_op is Op.WRITE
    assert not pair.peer.lost
    await pair.write(pair.ours)
