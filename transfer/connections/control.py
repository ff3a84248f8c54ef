"""The control connection between two agents: notes and facts about regions. Its loss means a lost peer."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable
from typing import Protocol

from moonpool.runtime.network.sockets import receive_now, send_now
from moonpool.transfer.connections.handshake import Authenticated
from moonpool.transfer.connections.wire import (
    FRAME_HEADER,
    MAX_FRAME_NBYTES,
    REGION_ID,
    Frame,
    RegionInfo,
    WireError,
)
from moonpool.transfer.errors import TransferError

_MAX_NOTES_NBYTES = 4 << 20
# Facts about regions have room beyond unread notes. A peer that was stopped for longer than this lasts checks
# the lifeline after its reads.
_MAX_BACKLOG_NBYTES = 4 * _MAX_NOTES_NBYTES
_RECEIVE_NBYTES = 64 << 10


class ControlOwner(Protocol):
    """What a control connection needs of the agent behind it."""

    def region_info(self, region_id: int) -> RegionInfo: ...

    def region_released(self, control: Control, region_id: int) -> None:
        """The other side no longer reads a closed region of ours."""

    def peer_region_closed(self, control: Control, region_id: int) -> None:
        """The other side closed a region."""

    def note_received(self, control: Control, payload: bytes) -> None:
        """May call ``control.pause()``."""

    def control_lost(self, control: Control, reason: str) -> None:
        """Called once, not after ``close``."""


class Control:
    """One end of the connection. Both ends are alike. Belongs to the event loop's thread."""

    def __init__(self, sock: socket.socket, remote: Authenticated, owner: ControlOwner) -> None:
        """sock: non-blocking, after the handshake; closed by ``close``."""
        self.remote = remote
        self._sock = sock
        self._owner = owner
        self._loop = asyncio.get_running_loop()
        self._received = bytearray()
        self._backlog = bytearray()
        self._questions: dict[int, list[asyncio.Future[RegionInfo]]] = {}
        self._known: dict[int, RegionInfo] = {}
        self._on_region_closed: list[Callable[[int], None]] = []
        self._paused = False
        self.open = True
        self._loop.add_reader(sock.fileno(), self._readable)
        # Under TLS the handshake may have received data already.
        self._loop.call_soon(self._first)

    def _first(self) -> None:
        if self.open and not self._paused:
            self._readable()

    async def region(self, region_id: int) -> RegionInfo:
        """Ask the other side about its region, once. Raises TransferError when the connection breaks."""
        known = self._known.get(region_id)
        if known is not None:
            return known
        answer: asyncio.Future[RegionInfo] = self._loop.create_future()
        if region_id not in self._questions:
            self._send(Frame.ASK_REGION, REGION_ID.pack(region_id))
        self._questions.setdefault(region_id, []).append(answer)
        return await answer

    def known_region(self, region_id: int) -> RegionInfo | None:
        """The answer, unless the region was closed since."""
        return self._known.get(region_id)

    def note(self, payload: bytes) -> None:
        """Send a note. Raises TransferError: the connection is broken, or too many notes wait."""
        self._send(Frame.NOTE, payload, most_nbytes=_MAX_NOTES_NBYTES)

    def region_closed(self, region_id: int) -> None:
        """Tell the other side that a region of ours was closed. Does nothing on a broken connection."""
        if self.open:
            with contextlib.suppress(TransferError):
                self._send(Frame.REGION_CLOSED, REGION_ID.pack(region_id))

    def release_region(self, region_id: int) -> None:
        """Tell the other side that we no longer read a region it has closed."""
        if self.open:
            self._send(Frame.REGION_RELEASED, REGION_ID.pack(region_id))

    def on_region_closed(self, callback: Callable[[int], None]) -> None:
        """Call ``callback(region id)`` when the other side closes a region."""
        self._on_region_closed.append(callback)

    def pause(self) -> None:
        """Stop reading until ``resume``, so that the other side has to wait."""
        if self.open and not self._paused:
            self._paused = True
            self._loop.remove_reader(self._sock.fileno())

    def resume(self) -> None:
        if self.open and self._paused:
            self._paused = False
            self._loop.add_reader(self._sock.fileno(), self._readable)
            self._loop.call_soon(self._parse)

    def close(self) -> None:
        """Idempotent."""
        if not self.open:
            return
        self.open = False
        self._loop.remove_reader(self._sock.fileno())
        self._loop.remove_writer(self._sock.fileno())
        self._sock.close()
        for answers in self._questions.values():
            for answer in answers:
                if not answer.done():
                    answer.set_exception(TransferError("the control connection was closed"))
        self._questions.clear()

    def _lost(self, reason: str) -> None:
        if self.open:
            self.close()
            self._owner.control_lost(self, reason)

    def _send(self, frame: Frame, body: bytes, *, most_nbytes: int = _MAX_BACKLOG_NBYTES) -> None:
        if not self.open:
            raise TransferError("the control connection is closed")
        message = FRAME_HEADER.pack(len(body), frame) + body
        if self._backlog:
            if len(self._backlog) + len(message) > most_nbytes:
                raise TransferError(f"the peer has not taken {len(self._backlog)} bytes of notes")
            self._backlog += message
            return
        try:
            sent = send_now(self._sock, message)
        except BlockingIOError:
            sent = 0
        except OSError as error:
            self._lost(f"control connection: {error.strerror}")
            raise TransferError("the control connection is broken") from error
        if sent < len(message):
            self._backlog += message[sent:]
            self._loop.add_writer(self._sock.fileno(), self._writable)

    def _writable(self) -> None:
        try:
            sent = send_now(self._sock, self._backlog)
        except BlockingIOError:
            return
        except OSError as error:
            self._lost(f"control connection: {error.strerror}")
            return
        del self._backlog[:sent]
        if not self._backlog:
            self._loop.remove_writer(self._sock.fileno())

    def _readable(self) -> None:
        try:
            received = receive_now(self._sock, _RECEIVE_NBYTES)
        except BlockingIOError:
            return
        except OSError as error:
            self._lost(f"control connection: {error.strerror}")
            return
        if not received:
            self._lost("its process closed the control connection")
            return
        self._received += received
        self._parse()

    def _parse(self) -> None:
        position = 0
        while self.open and not self._paused and len(self._received) - position >= FRAME_HEADER.size:
            nbytes, frame = FRAME_HEADER.unpack_from(self._received, position)
            if nbytes > MAX_FRAME_NBYTES:
                self._lost(f"it sent a frame of {nbytes} bytes")
                return
            begin = position + FRAME_HEADER.size
            if len(self._received) < begin + nbytes:
                break
            position = begin + nbytes
            try:
                self._handle(frame, bytes(self._received[begin:position]))
            except TransferError as error:
                self._lost(str(error))
                return
        del self._received[:position]

    def _handle(self, frame: int, body: bytes) -> None:
        if frame == Frame.NOTE:
            self._owner.note_received(self, body)
        elif frame == Frame.REGION:
            self._answered(RegionInfo.unpack(body))
        elif frame in (Frame.ASK_REGION, Frame.REGION_CLOSED, Frame.REGION_RELEASED):
            if len(body) != REGION_ID.size:
                raise WireError("not a region id")
            (region_id,) = REGION_ID.unpack(body)
            if frame == Frame.ASK_REGION:
                self._send(Frame.REGION, self._owner.region_info(region_id).pack())
            elif frame == Frame.REGION_RELEASED:
                self._owner.region_released(self, region_id)
            else:
                self._peer_region_closed(region_id)
        else:
            raise WireError(f"it sent a frame of unknown kind {frame}")

    def _answered(self, info: RegionInfo) -> None:
        answers = self._questions.pop(info.id, None)
        if answers is None:
            raise WireError(f"it described region {info.id} without a question")
        if info.open:
            self._known[info.id] = info
        for answer in answers:
            if not answer.done():
                answer.set_result(info)

    def _peer_region_closed(self, region_id: int) -> None:
        self._owner.peer_region_closed(self, region_id)
        known = self._known.pop(region_id, None)
        if known is None:
            self.release_region(region_id)
            return
        for callback in self._on_region_closed:
            callback(region_id)
