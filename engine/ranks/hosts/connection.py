"""The connection between a leader and a rank host on another machine."""

from __future__ import annotations

import asyncio
import logging
import queue
import select
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from moonpool.engine.ranks.hosts.frames import Frame, FrameError, FrameKind, FrameReader
from moonpool.runtime.network.sockets import receive_now, send_now
from moonpool.runtime.service.heartbeat import BEATS_PER_TIMEOUT

log = logging.getLogger(__name__)

_RECEIVED_NBYTES = 1 << 20
_POLL_S = 0.5
# After its own BYE a side waits this long for the other to close.
_LINGER_S = 1.0


class RelayConnection:
    """Frames both ways, from any thread, until one side ends it or is silent for ``timeout_s``.

    Has two threads, so that a step never waits for an event loop. One receives; the other sends posted frames
    and heartbeats and detects silence. Nothing is sent or received before ``start``.
    """

    def __init__(self, sock: socket.socket, timeout_s: float) -> None:
        """Take over ``sock``: connected and non-blocking, with TLS or without."""
        self.timeout_s = timeout_s
        # Of this machine and of the other one, as each reaches the other.
        self.address = str(sock.getsockname()[0])
        self.peer = str(sock.getpeername()[0])
        self._sock = sock
        self._sending = threading.Lock()  # a frame at a time
        self._calling = threading.Lock()  # OpenSSL allows one call on a connection at a time
        self._posted: queue.SimpleQueue[Frame] = queue.SimpleQueue()
        self._ending = threading.Lock()
        self._ended = False
        self._received = True  # since the last heartbeat

    def start(
        self,
        on_frame: Callable[[Frame], bool],
        on_loop: Callable[[Frame], None],
        heartbeat: Callable[[], Frame],
    ) -> None:
        """``on_frame`` is called in a thread for each frame; where it returns False ``on_loop`` is called
        on the running loop. At the end ``on_loop`` gets a BYE with the reason, once, as the last frame."""
        self._on_frame, self._on_loop, self._heartbeat = on_frame, on_loop, heartbeat
        self._loop = asyncio.get_running_loop()
        threading.Thread(target=self._receive, name="relay in", daemon=True).start()
        threading.Thread(target=self._send_posted, name="relay out", daemon=True).start()

    def post(self, frame: Frame) -> None:
        """Queue a frame for the sending thread."""
        self._posted.put(frame)

    def send(self, frame: Frame) -> None:
        """Hand a frame to the kernel now. Does nothing when the connection has ended."""
        with self._sending:
            self._send(frame.pack())

    def close(self, reason: str) -> None:
        """Send BYE without waiting. Idempotent."""
        if self._end(reason) and self._sending.acquire(blocking=False):
            try:
                with self._calling:
                    send_now(self._sock, Frame(FrameKind.BYE, 0, reason.encode()).pack())
            except OSError:
                pass  # the other side sees the end of the connection
            finally:
                self._sending.release()
        self._shutdown(socket.SHUT_WR)

    def _receive(self) -> None:
        frames = FrameReader()
        try:
            while received := self._receive_some():
                self._received = True
                for frame in frames.feed(received):
                    if frame.kind is FrameKind.BYE:
                        self._end(frame.payload.decode(errors="replace"))
                        return
                    if not self._ended and not self._on_frame(frame):
                        self._post_to_loop(frame)
            self._end("it closed the connection: its process ended")
        except OSError as error:
            self._end(f"the connection broke ({error})")
        except FrameError as error:
            self._end(f"it sent {error}, which this version of Moonpool cannot read")
        except Exception as error:
            log.exception("a received frame could not be processed")
            self._end(f"{type(error).__name__}: {error}")
        finally:
            with self._sending, self._calling:
                self._sock.close()

    def _receive_some(self) -> bytes:
        """Return b"" at the end of the stream, or _LINGER_S after our own end."""
        readable = select.poll()
        readable.register(self._sock.fileno(), select.POLLIN)
        ended_s = 0.0
        while True:
            try:
                with self._calling:
                    return receive_now(self._sock, _RECEIVED_NBYTES)
            except BlockingIOError:
                readable.poll(1000 * _POLL_S)
            if self._ended:
                ended_s = ended_s or time.monotonic()
                if time.monotonic() - ended_s > _LINGER_S:
                    return b""

    def _send_posted(self) -> None:
        tick_s = self.timeout_s / BEATS_PER_TIMEOUT
        next_s = time.monotonic()
        silent = 0
        while not self._ended:
            with suppress(queue.Empty):
                self.send(self._posted.get(timeout=max(0.0, next_s - time.monotonic())))
            if time.monotonic() < next_s:
                continue
            next_s = time.monotonic() + tick_s
            self.send(self._heartbeat())
            # Counted in ticks: if this process did not run for a while, the other was not silent.
            silent, self._received = 0 if self._received else silent + 1, False
            if silent > BEATS_PER_TIMEOUT:
                self._break(f"it has been silent for {silent * tick_s:.1f} s: it is stopped, or cut off")

    def _send(self, message: bytes) -> None:
        began_s = time.monotonic()
        left = memoryview(message)
        while left and not self._ended:
            try:
                with self._calling:
                    left = left[send_now(self._sock, bytes(left)) :]
            except BlockingIOError:
                if time.monotonic() - began_s > self.timeout_s:
                    self._break(f"it has read nothing for {self.timeout_s:g} s: it is stopped, or cut off")
                    return
                writable = select.poll()
                writable.register(self._sock.fileno(), select.POLLOUT)
                writable.poll(1000 * _POLL_S)
            except OSError as error:
                self._break(f"the connection broke ({error})")

    def _break(self, reason: str) -> None:
        self._end(reason)
        self._shutdown(socket.SHUT_RDWR)

    def _end(self, reason: str) -> bool:
        """End the connection. Return False if it has ended before."""
        with self._ending:
            if self._ended:
                return False
            self._ended = True
        self._post_to_loop(Frame(FrameKind.BYE, 0, reason.encode()))
        return True

    def _post_to_loop(self, frame: Frame) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._on_loop, frame)

    def _shutdown(self, how: int) -> None:
        with suppress(OSError):  # closed already
            # Not SSLSocket.shutdown, which returns to plain text first.
            socket.socket.shutdown(self._sock, how)
