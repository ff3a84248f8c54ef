"""Which path is taken, and what becomes of one that fails."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from moonpool.runtime.config.options import TransferOptions
from moonpool.transfer import PathFailed, PeerLost, Span, TransferAgent
from moonpool.transfer.copying.attempt import Attempt
from moonpool.transfer.metrics import path_totals
from moonpool.transfer.peers.path_choice import PathChoice
from tests.transfer.conftest import StartPeer
from tests.transfer.peer_process import pattern


@dataclass
class Named:
    name: str


def choice(now: list[float]) -> tuple[PathChoice, Any, Any]:
    shm, tcp = Named("shm"), Named("tcp")
    return PathChoice([shm, tcp], lambda: now[0]), shm, tcp  # type: ignore[list-item]


def test_a_failing_path_is_left_alone_for_longer_each_time_and_then_tried_again() -> None:
    now = [100.0]
    paths, shm, tcp = choice(now)
    assert paths.ranked() == [shm, tcp]
    for pause in (0.1, 0.2, 0.4, 0.8):
        paths.failed(shm)
        assert paths.ranked() == [tcp, shm]
        now[0] += pause * 0.99
        assert paths.ranked() == [tcp, shm]
        now[0] += pause * 0.02
        assert paths.ranked() == [shm, tcp]
    for _ in range(20):
        paths.failed(shm)
    now[0] += 10.01
    assert paths.ranked() == [shm, tcp]
    paths.failed(shm)
    paths.failed(tcp)
    assert set(map(id, paths.ranked())) == {id(shm), id(tcp)}
    paths.succeeded(shm, 10, 1.0)
    assert paths.ranked() == [shm, tcp]


def test_a_path_that_is_clearly_faster_is_preferred() -> None:
    paths, shm, tcp = choice([0.0])
    for _ in range(30):
        paths.succeeded(shm, 4 << 20, 1e-3)
        paths.succeeded(tcp, 4 << 20, 0.9e-3)
    assert paths.ranked() == [shm, tcp]
    for _ in range(30):
        paths.succeeded(tcp, 4 << 20, 0.5e-3)
    assert paths.ranked() == [tcp, shm]
    assert paths.bandwidth["shm"] == pytest.approx((4 << 20) / 1e-3)
    # Neither does it say anything of other memory.
    assert paths.ranked((True, True)) == [shm, tcp]
    # Small ones say nothing about bandwidth.
    paths.succeeded(shm, 4096, 1.0)
    assert paths.bandwidth["shm"] == pytest.approx((4 << 20) / 1e-3)


async def test_a_batch_goes_on_over_the_next_path(start_peer: StartPeer) -> None:
    theirs = start_peer("shm,tcp")
    async with await TransferAgent.start(TransferOptions(), agent_id="here", epoch=1) as agent:
        remote = (await theirs.do("allocate", nbytes=1 << 20, seed=4))["region"]
        peer = await agent.connect(theirs.descriptor)
        # Its time stands still: however slow this machine is, a path that failed stays paused.
        peer.route = replace(peer.route, paths=PathChoice(list(peer.paths), lambda: 100.0))
        memory = agent.allocate(1 << 20, "memory")
        spans = [Span(memory.id, 0, 1 << 20)], [Span(remote, 0, 1 << 20)]
        assert (await peer.read(*spans, deadline_s=30)).transport == "shm"
        shm = peer.paths.ranked()[0]

        def broken(attempt: Attempt) -> None:
            attempt.stop(PathFailed("shm", "broken for the test"))

        shm.start = broken  # type: ignore[method-assign]
        shm.read_now = lambda *_: 0  # type: ignore[method-assign]
        before = path_totals()
        memory.array[:] = 0
        assert (await peer.read(*spans, deadline_s=30)).transport == "tcp"
        assert np.array_equal(memory.array, pattern(1 << 20, 4))
        # The next does not even try.
        assert [path.name for path in peer.paths.ranked()] == ["tcp", "shm"]
        tcp = peer.paths.ranked()[0]
        tcp.start = lambda attempt: attempt.stop(PathFailed("tcp", "this one, too"))  # type: ignore[method-assign]
        with pytest.raises(PeerLost, match="this one, too"):
            await peer.read(*spans, deadline_s=30)
        after = path_totals()

        def more(path: str, name: str) -> int:
            return int(after[path][name] - before.get(path, {}).get(name, 0))

        # shm is tried until it is given up, and every time another attempt follows; the last one has none.
        tries = more("shm", "failures") + more("tcp", "failures")
        assert more("shm", "retries") + more("tcp", "retries") == tries - 1
        assert (more("tcp", "batches"), more("tcp", "nbytes"), more("shm", "batches")) == (1, 1 << 20, 0)
        assert after["shm"]["in_flight"] == after["tcp"]["in_flight"] == 0
        bounds, counts = zip(*after["tcp"]["buckets"], strict=True)
        assert list(bounds) == sorted(bounds)
        assert list(counts) == sorted(counts)
