"""Another machine that runs ranks of a group, as the group's leader sees it."""

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
    """``name``: its rank host's, and the machine's address. When the connection ends, so do all its ranks."""

    def __init__(self, name: str, connection: RelayConnection) -> None:
        self.name = f"{name} ({connection.peer})"
        self.connection = connection
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._loop = asyncio.get_running_loop()
        self._channels: dict[int, RemoteChannel] = {}
        self._views: dict[int, SharedBoard] = {}
        connection.on_frame = self._on_frame
        connection.on_end = lambda reason: self._post_to_loop(Frame(FrameKind.BYE, 0, reason.encode()))
        connection.heartbeat = self._heartbeat_frame
        connection.start()

    def start_rank(self, rank: int, threads: int) -> RemoteChannel:
        """Have a process for ``rank`` there, of ``threads`` compute threads."""
        channel = self._channels[rank] = RemoteChannel(self, rank)
        if self.ended.done():
            channel.end(f"its rank host is gone: {self.ended.result()}")
        self.connection.post(Frame(FrameKind.START, rank, json.dumps({"threads": threads}).encode()))
        return channel

    def open(self, board: SharedBoard, *, payload_nbytes: int, exchange_nbytes: int) -> None:
        """From now on what its ranks do is told on ``board``, and what that is told is theirs to do."""
        shape = {
            "world_size": board.world_size,
            "payload_nbytes": payload_nbytes,
            "exchange_nbytes": exchange_nbytes,
        }
        self.connection.post(Frame(FrameKind.OPEN, 0, json.dumps(shape).encode()))
        self._views = {rank: board.as_rank(rank) for rank in self._channels}

    def publish(self, step: int, batch: npt.NDArray[np.uint8]) -> None:
        """Of a step that has been published. In the thread that did."""
        self.connection.send(step_frame(step, batch.tobytes()))

    def close(self, reason: str) -> None:
        """Its ranks are ended. Idempotent."""
        self.connection.close(reason)

    @staticmethod
    def _heartbeat_frame() -> Frame:
        # That we can say anything is our heart's beat.
        return heartbeat_frame({0: 0})

    def _on_frame(self, frame: Frame) -> None:
        """In the connection's thread: what a step waits for is done here, the rest on the loop."""
        if frame.kind is FrameKind.DONE:
            post_done(frame, self._views[frame.rank])
        elif frame.kind is FrameKind.HEARTBEATS:
            for rank, age_ns in unpack_heartbeats(frame).items():
                if rank in self._views:
                    self._views[rank].beat(age_ns)
        else:
            self._post_to_loop(frame)

    def _post_to_loop(self, frame: Frame) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._deliver, frame)

    def _deliver(self, frame: Frame) -> None:
        channel = self._channels.get(frame.rank)
        if frame.kind is FrameKind.BYE:
            reason = frame.payload.decode(errors="replace")
            if not self.ended.done():
                self.ended.set_result(reason)
            for channel in self._channels.values():
                channel.end(f"its rank host is gone: {reason}")
        elif channel is None:
            return  # of a rank that was never asked for
        elif frame.kind is FrameKind.LINE:
            channel.received.put_nowait(frame.payload)
        elif frame.kind is FrameKind.STARTED:
            channel.pid = int(frame.payload)
        elif frame.kind is FrameKind.ENDED:
            channel.end(frame.payload.decode(errors="replace"))


class RemoteChannel:
    """See ``RankChannel``. Its machine's ranks are killed together, as the group ends with any of them."""

    def __init__(self, host: RemoteHost, rank: int) -> None:
        self.where = host.name
        self.pid = 0  # until it has started
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
        """It is gone. Only the first time counts."""
        if not self._how.done():
            self._how.set_result(how)
            self.received.put_nowait(None)
