"""Blocks that several peers hold in parts: whole and verified when their reads have ended, or an error."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import numpy as np
import pytest

from moonpool.transfer import (
    Batch,
    ChecksumMismatch,
    JointRead,
    Peer,
    PeerLost,
    Region,
    RegionError,
    Spans,
    TransferAgent,
    checksum,
)
from moonpool.transfer.copying import joint_read
from moonpool.transfer.native.compiled_copy import compiled_copy
from tests.transfer.conftest import RemotePeer, StartPeer
from tests.transfer.peer_process import pattern

NUM_BLOCKS = 24
# One block after another is filled where another one lies, so that order is not place.
PLACES = np.random.default_rng(3).permutation(NUM_BLOCKS)


class Halves:
    """Two sources of one half of every block each, in runs that alternate."""

    def __init__(self, agent: TransferAgent, run_nbytes: int, num_runs: int = 8) -> None:
        self.agent = agent
        self.run_nbytes = run_nbytes
        self.num_runs = num_runs  # of both
        self.block_nbytes = run_nbytes * num_runs
        self.half_nbytes = NUM_BLOCKS * self.block_nbytes // 2
        self.pool = agent.allocate(NUM_BLOCKS * self.block_nbytes, "pool")
        self.peers: list[Peer] = []
        self.regions: list[int] = []
        whole = np.empty((NUM_BLOCKS, num_runs, run_nbytes), np.uint8)
        for half in range(2):
            whole[:, half::2] = pattern(self.half_nbytes, half).reshape(NUM_BLOCKS, -1, run_nbytes)
        self.expected = whole.reshape(NUM_BLOCKS, -1)

    async def connect(self, *remotes: RemotePeer) -> Halves:
        for half, remote in enumerate(remotes):
            self.regions.append((await remote.do("allocate", nbytes=self.half_nbytes, seed=half))["region"])
            self.peers.append(await self.agent.connect(remote.descriptor))
        return self

    def joint(self) -> JointRead:
        checksums = [checksum(block) for block in self.expected]
        return JointRead(self.pool, (PLACES * self.block_nbytes).tolist(), self.block_nbytes, checksums, 2)

    def read(self, half: int, joint: JointRead) -> Batch:
        runs, size = np.arange(half, self.num_runs, 2), self.run_nbytes
        here = (PLACES[:, None] * self.block_nbytes + runs * size).reshape(-1)
        local = Spans.blocks(self.pool.id, here, size)
        remote = Spans.blocks(self.regions[half], np.arange(len(here)) * size, size)
        return self.peers[half].read(local, remote, deadline_s=60, joint=joint)

    def arrived(self) -> bool:
        return np.array_equal(self.pool.array.reshape(NUM_BLOCKS, -1)[PLACES], self.expected)


@pytest.fixture
def pair(shared_peer: StartPeer) -> tuple[RemotePeer, RemotePeer]:
    return shared_peer("shm", epoch=1), shared_peer("shm", epoch=2)


# With runs of whole stripes, of 30 KB so that threads copy them, and of no stripes.
@pytest.mark.parametrize("run_nbytes", [512, 30 << 10, 1000])
async def test_two_peers_fill_blocks_in_one_verified_pass(
    agent: TransferAgent, pair: tuple[RemotePeer, RemotePeer], run_nbytes: int
) -> None:
    halves = await Halves(agent, run_nbytes).connect(*pair)
    joint = halves.joint()
    await asyncio.gather(halves.read(0, joint), halves.read(1, joint))
    assert joint.verified == (compiled_copy() is not None)
    assert halves.arrived()


async def test_a_block_that_is_not_what_was_promised_is_named(
    agent: TransferAgent, pair: tuple[RemotePeer, RemotePeer]
) -> None:
    halves = await Halves(agent, 4096).connect(*pair)
    joint = halves.joint()
    changed = 7 * halves.block_nbytes // 2 + 5
    value = int(pattern(halves.half_nbytes, 1)[changed]) ^ 1
    await pair[1].do("poke", region=halves.regions[1], offset=changed, value=value)
    batches = [halves.read(0, joint), halves.read(1, joint)]
    results = await asyncio.gather(*batches, return_exceptions=True)
    (mismatch,) = [result for result in results if isinstance(result, BaseException)]
    assert isinstance(mismatch, ChecksumMismatch)
    assert mismatch.index == 7
    assert not joint.verified


async def test_where_one_of_them_comes_over_a_network_each_goes_its_own_way(
    agent: TransferAgent, shared_peer: StartPeer
) -> None:
    halves = await Halves(agent, 4096).connect(shared_peer("shm", epoch=1), shared_peer("tcp"))
    joint = halves.joint()
    first, second = await asyncio.gather(halves.read(0, joint), halves.read(1, joint))
    assert (first.transport, second.transport) == ("shm", "tcp")
    assert not joint.verified
    assert halves.arrived()


async def test_without_a_compiler_each_goes_its_own_way(
    agent: TransferAgent,
    pair: tuple[RemotePeer, RemotePeer],
    fresh_compiled_copy: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MOONPOOL_TRANSFER", "plain")
    compiled_copy.cache_clear()
    halves = await Halves(agent, 4096).connect(*pair)
    joint = halves.joint()
    await asyncio.gather(halves.read(0, joint), halves.read(1, joint))
    assert not joint.verified
    assert halves.arrived()


async def test_who_is_not_joined_is_not_waited_for(
    agent: TransferAgent, pair: tuple[RemotePeer, RemotePeer]
) -> None:
    halves = await Halves(agent, 4096).connect(*pair)
    region, halves.regions[1] = halves.regions[1], 4095  # which is not open
    joint = halves.joint()
    first, second = halves.read(0, joint), halves.read(1, joint)
    with pytest.raises(RegionError, match="4095: is not open"):
        await second
    await first
    assert not joint.verified
    halves.regions[1] = region


class Slow:
    """Copies that wait on the way until ``go``, or until they are stopped."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.go = threading.Event(), threading.Event()
        move_runs = joint_read.move_runs

        def move(*arguments: Any, stop: Any, **words: Any) -> bool:
            self.begun.set()
            while not self.go.wait(0.001):
                if stop[0]:
                    return False
            return move_runs(*arguments, stop=stop, **words)

        monkeypatch.setattr(joint_read, "move_runs", move)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Slow:
    return Slow(monkeypatch)


BIG = 30 << 10


@pytest.mark.parametrize("end", ["cancelled", "region closed", "killed"])
async def test_when_one_is_stopped_on_the_way_the_other_goes_on_alone(
    agent: TransferAgent, start_peer: StartPeer, slow: Slow, end: str
) -> None:
    remotes = start_peer("shm"), start_peer("shm", epoch=2)
    halves = await Halves(agent, BIG).connect(*remotes)
    joint = halves.joint()
    first, second = halves.read(0, joint), halves.read(1, joint)
    await asyncio.to_thread(slow.begun.wait, 60)
    if end == "cancelled":
        second.cancel()
        with pytest.raises(asyncio.CancelledError):
            await second
    elif end == "region closed":
        await remotes[1].do("close_region", region=halves.regions[1])
        with pytest.raises(RegionError, match="closed by its owner"):
            await second
    else:
        remotes[1].kill()
        with pytest.raises(PeerLost):
            await second
    await first
    assert not joint.verified
    ours = halves.pool.array.reshape(NUM_BLOCKS, halves.num_runs, -1)[PLACES, 0::2]
    assert np.array_equal(ours, halves.expected.reshape(NUM_BLOCKS, halves.num_runs, -1)[:, 0::2])


async def test_memory_that_outlives_its_process_does_not_pass_for_its_blocks(
    agent: TransferAgent, start_peer: StartPeer, slow: Slow
) -> None:
    """It stays mapped here: the copy comes to its end, and only then it is seen that the peer had not."""
    remotes = start_peer("shm"), start_peer("shm", epoch=2)
    halves = await Halves(agent, BIG).connect(*remotes)
    joint = halves.joint()
    batches = [halves.read(0, joint), halves.read(1, joint)]
    await asyncio.to_thread(slow.begun.wait, 60)
    remotes[0].kill()  # before the event loop hears of it
    slow.go.set()
    dead, alive = await asyncio.gather(*batches, return_exceptions=True)
    assert isinstance(dead, PeerLost)
    assert not isinstance(alive, BaseException)


async def test_our_own_region_is_closed_on_the_way(
    agent: TransferAgent, pair: tuple[RemotePeer, RemotePeer], slow: Slow
) -> None:
    halves = await Halves(agent, BIG).connect(*pair)
    joint = halves.joint()
    batches = [halves.read(0, joint), halves.read(1, joint)]
    await asyncio.to_thread(slow.begun.wait, 60)
    pool: Region = halves.pool
    pool.close()
    results = await asyncio.gather(*batches, return_exceptions=True)
    assert [type(result) for result in results] == [RegionError, RegionError]
