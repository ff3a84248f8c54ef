"""The rank host's side of one connection to a leader: runs its ranks until the connection ends."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import logging
import queue
import threading
import time
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from moonpool.engine.collectives.board import BoardWord, SharedBoard, SharedMemory
from moonpool.engine.errors import RankLost
from moonpool.engine.ranks.hosts.channel import PipeChannel
from moonpool.engine.ranks.hosts.connection import RelayConnection
from moonpool.engine.ranks.hosts.frames import (
    Frame,
    FrameKind,
    done_frame,
    heartbeat_frame,
    unpack_heartbeats,
    unpack_step,
)
from moonpool.runtime.config.options import TransferOptions
from moonpool.runtime.security import process
from moonpool.runtime.service.vital import vital

log = logging.getLogger(__name__)


class DaemonSession:
    """Child processes with a local board and exchange memory, as beside their leader."""

    def __init__(self, connection: RelayConnection, transfer: TransferOptions) -> None:
        """``transfer``: options of this machine, for the agents of its ranks."""
        self._connection = connection
        self._transfer = _announced(transfer, connection)
        self._channels: dict[int, PipeChannel] = {}
        self._reading: list[asyncio.Task[None]] = []
        self._frames: asyncio.Queue[Frame] = asyncio.Queue()
        self._board: SharedBoard | None = None
        self._exchange: SharedMemory | None = None
        self._steps: queue.SimpleQueue[int] = queue.SimpleQueue()
        connection.start(self._on_frame, self._frames.put_nowait, self._heartbeat_frame)

    async def run(self) -> str:
        """Run until the connection ends; return the reason. All ranks have ended then, also after an
        error."""
        try:
            while (frame := await self._frames.get()).kind is not FrameKind.BYE:
                await self._execute(frame)
            return frame.payload.decode(errors="replace")
        finally:
            self._connection.close("its rank host is shutting down")
            await self._end_ranks()

    async def _end_ranks(self) -> None:
        self._drop_board()
        for channel in self._channels.values():
            channel.kill()
        if self._reading:
            await asyncio.wait(self._reading)

    def _drop_board(self) -> None:
        if self._board is not None:
            self._board.abort(0)
            self._steps.put(0)
            self._board.close()
        if self._exchange is not None:
            self._exchange.close()
        self._board = self._exchange = None

    def _on_frame(self, frame: Frame) -> bool:
        """Process frames that a step waits for, in the connection's thread."""
        board = self._board
        if frame.kind is FrameKind.STEP and board is not None:
            step, batch = unpack_step(frame)
            board.payload[: len(batch)] = np.frombuffer(batch, np.uint8)
            board.publish(step, len(batch))
            # No rank posts an empty step as done.
            self._steps.put(step if len(batch) else 0)
        elif frame.kind is FrameKind.HEARTBEATS and board is not None:
            board.beat(unpack_heartbeats(frame).get(0, 0))
        else:
            return False
        return True

    async def _execute(self, frame: Frame) -> None:
        if frame.kind is FrameKind.START:
            channel = await PipeChannel.start(frame.rank, json.loads(frame.payload)["threads"])
            self._channels[frame.rank] = channel
            self._connection.post(Frame(FrameKind.STARTED, frame.rank, str(channel.pid).encode()))
            self._reading.append(vital(self._read(frame.rank, channel), f"reports of rank {frame.rank}"))
        elif frame.kind is FrameKind.OPEN:
            self._open(**json.loads(frame.payload))
        elif frame.kind is FrameKind.LINE and frame.rank in self._channels:
            self._channels[frame.rank].send(self._localize(frame.payload))

    def _open(self, world_size: int, payload_nbytes: int, exchange_nbytes: int) -> None:
        self._drop_board()
        self._board = board = SharedBoard.create(world_size, payload_nbytes, self._connection.timeout_s)
        self._exchange = SharedMemory.create("exchange", exchange_nbytes)
        # Their ends must wake a thread, which sleeps in the kernel.
        board.remote_ranks = range(world_size)
        board.beat()
        self._steps = queue.SimpleQueue()
        threading.Thread(
            target=self._report_done, args=(board, self._steps, sorted(self._channels)), daemon=True
        ).start()

    def _localize(self, line: bytes) -> bytes:
        """Return the command with the addresses, paths and options of this machine."""
        command: dict[str, Any] = json.loads(line)
        match command:
            case {"load": words} if self._board is not None and self._exchange is not None:
                words["address"] = self._connection.address
                words["board"], words["exchange"] = self._board.path, self._exchange.path
            case {"agent": words}:
                words["options"] = asdict(self._transfer)
                words["security"] = asdict(process.current().options)
            case _:
                return line
        return json.dumps(command).encode() + b"\n"

    async def _read(self, rank: int, channel: PipeChannel) -> None:
        async for line in channel.lines():
            self._connection.post(Frame(FrameKind.LINE, rank, line))
        self._connection.post(Frame(FrameKind.ENDED, rank, (await channel.wait()).encode()))

    def _report_done(self, board: SharedBoard, steps: queue.SimpleQueue[int], ranks: list[int]) -> None:
        """Send the end of each step. Runs in a thread until the board is dropped."""
        try:
            while step := steps.get():
                for rank in ranks:
                    board.wait_done(rank, step)
                    self._connection.send(done_frame(board, rank, step))
        except RankLost:
            pass  # the leader learns it by the connection's end

    def _heartbeat_frame(self) -> Frame:
        board = self._board
        ages: dict[int, int] = {}
        if board is not None:
            now_ns = time.monotonic_ns()
            beats = {rank: board.count(rank, BoardWord.HEARTBEAT_NS) for rank in self._channels}
            ages = {rank: now_ns - beat_ns for rank, beat_ns in beats.items() if beat_ns}
        return heartbeat_frame(ages)


def _announced(transfer: TransferOptions, connection: RelayConnection) -> TransferOptions:
    """Return options with an address that other machines can reach; default: the one our leader reaches."""
    local_only = ipaddress.ip_address(connection.peer).is_loopback
    if local_only or transfer.tcp.host != TransferOptions().tcp.host:
        return transfer
    return replace(transfer, tcp=replace(transfer.tcp, host=connection.address))
