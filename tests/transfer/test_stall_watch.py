"""A connection is stuck when nothing moves, not when this process stood still."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, cast

from moonpool.transfer.errors import PathFailed
from moonpool.transfer.peers.failover import StallWatch


class Connections:
    """A path of two that move nothing, and can only be dropped one at a time."""

    name = "tcp"

    def __init__(self) -> None:
        self.num_looks = 0
        self.dropped: list[object] = []

    def progress(self, attempt: object) -> Mapping[object, int]:
        self.num_looks += 1
        return {"a": 7, "b": 9}

    def drop(self, carriers: Sequence[object]) -> bool:
        self.dropped += carriers
        return False


async def test_nothing_is_stuck_because_this_process_stood_still() -> None:
    path, stopped = Connections(), list[Exception]()
    attempt = SimpleNamespace(request=SimpleNamespace(seconds_left=lambda: 0.0), stop=stopped.append)
    watch = StallWatch(cast(Any, path), cast(Any, attempt), untried=True)
    while not path.num_looks:  # noqa: ASYNC110 (a watch tells no one)
        await asyncio.sleep(0.001)
    time.sleep(3 * watch._every_s)  # noqa: ASYNC251 (that is the point)
    while path.num_looks < 2:  # noqa: ASYNC110
        await asyncio.sleep(0)
    assert not path.dropped and not stopped
    while not stopped:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    assert path.dropped == ["a", "b"]
    assert isinstance(stopped[0], PathFailed)
    watch.cancel()
