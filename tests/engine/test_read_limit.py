"""The limit on reads from peers: all together, one after the other, and none that would be too late."""

from __future__ import annotations

import asyncio
import time

import pytest

from moonpool.engine.prefix_cache.read_limit import ReadLimit
from moonpool.transfer import DeadlineExceeded


async def test_reads_together_take_as_long_as_their_bytes() -> None:
    limit = ReadLimit(1_000_000)
    began_s = time.monotonic()
    waits = await asyncio.gather(*(limit.turn("n", 50_000, 5.0) for _ in range(3)))
    assert time.monotonic() - began_s >= 0.149
    assert waits == sorted(waits)


async def test_a_read_that_would_end_too_late_waits_not_at_all_and_delays_no_other() -> None:
    limit = ReadLimit(1_000_000)
    with pytest.raises(DeadlineExceeded, match=r"10000000 bytes within transfer\.read_nbytes_per_s"):
        await limit.turn("n", 10_000_000, 5.0)
    assert await limit.turn("n", 1_000, 5.0) < 0.1


async def test_without_a_limit_nothing_waits() -> None:
    assert await ReadLimit(0).turn("n", 1 << 40, 0.0) == 0.0
