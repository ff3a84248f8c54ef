"""Answers that are garbage, too short or far too long end in a retry or a typed error."""

from __future__ import annotations

import asyncio
import random
import struct
import threading
from dataclasses import replace

import numpy as np
import psutil
import pytest

from moonpool.runtime.config.options import TransferOptions
from moonpool.transfer import Span, TransferAgent, TransferError, TransferReport, checksum
from moonpool.transfer.connections.wire import Frame
from tests.transfer.faults import GRACE_S, Proxy, late
from tests.transfer.peer_process import pattern

NBYTES = 1 << 20
DEADLINE_S = 1.0


class Garble:
    """Spoils one answer, the way ``seed`` says."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self.done = False

    def __call__(self, answered: bytes) -> bytes:
        with self._lock:
            if self.done:
                return answered
            self.done = True
        # Heads are where the harm is, and they come first.
        at = self._random.choice((self._random.randrange(min(len(answered), 24)), len(answered) // 2))
        garbage = self._random.choice(
            (self._random.randbytes(16), b"\xff" * 8, bytes(8), b"", answered[at:] + answered[at:])
        )
        return answered[:at] + garbage + answered[at + len(garbage) :]


@pytest.mark.parametrize("direction", ["read", "write"])
async def test_garbled_answers_cost_a_retry_or_end_in_time(direction: str) -> None:
    options = TransferOptions(transports=("tcp",))
    async with (
        await TransferAgent.start(options, agent_id="here", epoch=1) as agent,
        await TransferAgent.start(options, agent_id="peer", epoch=1) as theirs,
    ):
        ours, remote = agent.allocate(NBYTES, "ours"), theirs.allocate(NBYTES, "theirs")
        theirs.allow_writes(remote)
        source, target = (remote, ours) if direction == "read" else (ours, remote)
        source.array[:] = pattern(NBYTES, 1)
        sums = [checksum(source.buffer)]
        cable = Proxy(theirs.describe().tcp_port)
        descriptor = replace(theirs.describe(), tcp_port=cable.port)
        spans = [Span(ours.id, 0, NBYTES)], [Span(remote.id, 0, NBYTES)]
        before = psutil.Process().memory_info().rss
        outcomes = []
        for seed in range(40):
            # The control connection may be what is spoilt; then the peer is lost, and connected anew.
            move = getattr(await agent.connect(descriptor), direction)
            await move(*spans, deadline_s=10)
            target.array[:] = 0
            cable.change = Garble(seed)
            result, late_s = await late(move(*spans, deadline_s=DEADLINE_S, checksums=sums), DEADLINE_S)
            assert isinstance(result, TransferReport | TransferError), repr(result)
            assert late_s < GRACE_S
            if isinstance(result, TransferReport):
                assert np.array_equal(ours.array, remote.array)
            outcomes.append(type(result).__name__)
            cable.change = lambda answered: answered
        assert "TransferReport" in outcomes
        assert psutil.Process().memory_info().rss - before < 64 << 20
        cable.close()


async def test_garbled_control_frames_lose_that_peer_only() -> None:
    """Frames that are too long, of unknown kind, or answer no question."""
    options = TransferOptions(transports=("tcp",))
    async with (
        await TransferAgent.start(options, agent_id="here", epoch=1) as agent,
        await TransferAgent.start(options, agent_id="peer", epoch=1) as theirs,
        await TransferAgent.start(options, agent_id="other", epoch=1) as other,
    ):
        ours = agent.allocate(NBYTES, "ours")
        cable = Proxy(theirs.describe().tcp_port)
        descriptor = replace(theirs.describe(), tcp_port=cable.port)
        well = await agent.connect(other.describe())
        elsewhere = other.allocate(NBYTES, "elsewhere")
        for frame in (
            struct.pack("<IB", 1 << 31, Frame.NOTE),
            struct.pack("<IB", 4, 200) + bytes(4),
            struct.pack("<IB", 3, Frame.REGION) + bytes(3),
            struct.pack("<IB", 2, Frame.REGION_CLOSED) + bytes(2),
        ):
            peer = await agent.connect(descriptor)
            remote = theirs.allocate(NBYTES, "theirs")
            cable.change = lambda answered, frame=frame: frame  # type: ignore[misc]
            spans = [Span(ours.id, 0, NBYTES)], [Span(remote.id, 0, NBYTES)]
            result, late_s = await late(peer.read(*spans, deadline_s=DEADLINE_S), DEADLINE_S)
            assert isinstance(result, TransferError)
            assert late_s < GRACE_S
            async with asyncio.timeout(60):
                while not peer.lost:  # noqa: ASYNC110 (its frame may not have been read yet)
                    await asyncio.sleep(0.001)
            cable.change = lambda answered: answered
            await well.read(spans[0], [Span(elsewhere.id, 0, NBYTES)], deadline_s=5)
            await (await agent.connect(descriptor)).read(*spans, deadline_s=5)
        cable.close()
