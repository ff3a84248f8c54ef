"""The leader's side of another machine with ranks of the group."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import numpy as np
import numpy.typing as npt

from moonpool.engine.collectives.board import SharedBoard
from moonpool.engine.ranks.hosts.connection import RelayConnection
from moonpool.engine.ranks.hosts.frames import (
    Frame,
    FrameKind,
    heartbeat_frame,
    post_done,
    step_frame,
    unpack_heartbeats,
)


class RemoteHost:
    """``name``: of its rank host, with its address. All its ranks end with the connection."""

    def __init__(self, name: str, connection: RelayConnection) -> None:
        self.name = f"{name} ({connection.peer})"
        self.connection = connection
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._channels: dict[int, RemoteChannel] = {}
        self._views: dict[int, SharedBoard] = {}
        # Rank 0 is alive as long as it can send.
        connection.start(self._on_frame, self._on_loop, lambda: heartbeat_frame({0: 0}))

    def start_rank(self, rank: int, threads: int) -> RemoteChannel:
        """Start a process for ``rank`` with ``threads`` compute threads."""
        channel = self._channels[rank] = RemoteChannel(self, rank)
        if self.ended.done():
            channel.end(f"its rank host is gone: {self.ended.result()}")
        self.connection.post(Frame(FrameKind.START, rank, json.dumps({"threads": threads}).encode()))
        return channel

    def open(self, board: SharedBoard, *, payload_nbytes: int, exchange_nbytes: int) -> None:
        """Connect ``board`` with a new board on that machine."""
        shape = {
            "world_size": board.world_size,
            "payload_nbytes": payload_nbytes,
            "exchange_nbytes": exchange_nbytes,
        }
        self.connection.post(Frame(FrameKind.OPEN, 0, json.dumps(shape).encode()))
        self._views = {rank: board.as_rank(rank) for rank in self._channels}

    def publish(self, step: int, batch: npt.NDArray[np.uint8]) -> None:
        """Send a published step, in the publishing thread."""
        self.connection.send(step_frame(step, batch.tobytes()))

    def close(self, reason: str) -> None:
        """End its ranks. Idempotent."""
        self.connection.close(reason)

    def _on_frame(self, frame: Frame) -> bool:
        """Process frames that a step waits for, in the connection's thread."""
        if frame.kind is FrameKind.DONE:
            post_done(frame, self._views[frame.rank])
        elif frame.kind is FrameKind.HEARTBEATS:
            for rank, age_ns in unpack_heartbeats(frame).items():
                if rank in self._views:
                    self._views[rank].beat(age_ns)
        else:
            return False
        return True

    def _on_loop(self, frame: Frame) -> None:
        channel = self._channels.get(frame.rank)
        if frame.kind is FrameKind.BYE:
            reason = frame.payload.decode(errors="replace")
            if not self.ended.done():
                self.ended.set_result(reason)
            for channel in self._channels.values():
                channel.end(f"its rank host is gone: {reason}")
        elif channel is None:
            return  # of an unknown rank
        elif frame.kind is FrameKind.LINE:
            channel.received.put_nowait(frame.payload)
        elif frame.kind is FrameKind.STARTED:
            channel.pid = int(frame.payload)
        elif frame.kind is FrameKind.ENDED:
            channel.end(frame.payload.decode(errors="replace"))


class RemoteChannel:
    """See ``RankChannel``. All ranks of a machine are killed together: the group ends with any of them."""

    def __init__(self, host: RemoteHost, rank: int) -> None:
        self.where = host.name
        self.pid = 0  # until STARTED arrives
        self.received: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._host = host
        self._rank = rank
        self._how: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def send(self, line: bytes) -> None:
        self._host.connection.post(Frame(FrameKind.LINE, self._rank, line))

    async def lines(self) -> AsyncIterator[bytes]:
        while (line := await self.received.get()) is not None:
            yield line

    async def wait(self) -> str:
        return await asyncio.shield(self._how)

    def kill(self) -> None:
        self._host.close("the leader ended its group")

    def end(self, how: str) -> None:
        """End the channel. Only the first call counts."""
        if not self._how.done():
            self._how.set_result(how)
            self.received.put_nowait(None)
