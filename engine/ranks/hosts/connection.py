"""The connection between a leader and a machine that runs ranks for it."""

from __future__ import annotations

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
_LOOK_S = 0.5
# What a side that has said goodbye waits for the other to hang up.
_LINGER_S = 1.0


class RelayConnection:
    """Frames both ways, from any thread, until one side says goodbye or is not heard of for ``timeout_s``.

    Has two threads, so that a step never waits for an event loop. One receives and calls ``on_frame``; the
    other sends posted frames and heartbeats and detects silence. ``on_end`` is called once, in any thread,
    with the reason; no frame comes after it. Nothing is sent or received before ``start``.
    """

    def __init__(self, sock: socket.socket, timeout_s: float) -> None:
        """``sock``: connected and non-blocking, with TLS or without; it is taken over."""
        self.on_frame: Callable[[Frame], None] = lambda frame: None
        self.on_end: Callable[[str], None] = lambda reason: None
        self.heartbeat: Callable[[], Frame] = lambda: Frame(FrameKind.HEARTBEATS, 0, b"")
        self.timeout_s = timeout_s
        # Of this machine, as the other one reaches it, and of that one, as we do.
        self.address = str(sock.getsockname()[0])
        self.peer = str(sock.getpeername()[0])
        self._sock = sock
        self._sending = threading.Lock()  # a frame at a time
        self._calling = threading.Lock()  # OpenSSL takes one call on a connection at a time
        self._posted: queue.SimpleQueue[Frame] = queue.SimpleQueue()
        self._ending = threading.Lock()
        self._ended = False
        self._heard = True

    def start(self) -> None:
        threading.Thread(target=self._receive, name="relay in", daemon=True).start()
        threading.Thread(target=self._send_posted, name="relay out", daemon=True).start()

    def post(self, frame: Frame) -> None:
        """Have it sent soon."""
        self._posted.put(frame)

    def send(self, frame: Frame) -> None:
        """Hand it to the kernel now. Returns also when the connection has ended."""
        with self._sending:
            self._send(frame.pack())

    def close(self, reason: str) -> None:
        """Say goodbye, without waiting for anything. Idempotent."""
        if self._end(reason) and self._sending.acquire(blocking=False):
            try:
                with self._calling:
                    send_now(self._sock, Frame(FrameKind.BYE, 0, reason.encode()).pack())
            except OSError:
                pass  # they see that we are gone
            finally:
                self._sending.release()
        self._shutdown(socket.SHUT_WR)

    # ------------------------------------------------------------------ threads

    def _receive(self) -> None:
        frames = FrameReader()
        try:
            while received := self._receive_some():
                self._heard = True
                for frame in frames.feed(received):
                    if frame.kind is FrameKind.BYE:
                        self._end(frame.payload.decode(errors="replace"))
                        return
                    if not self._ended:
                        self.on_frame(frame)
            self._end("it closed the connection: its process ended")
        except OSError as error:
            self._end(f"the connection broke ({error})")
        except FrameError as error:
            self._end(f"it sent {error}, which this version of Moonpool does not know")
        except Exception as error:
            log.exception("what came over a relay could not be used")
            self._end(f"{type(error).__name__}: {error}")
        finally:
            with self._sending, self._calling:
                self._sock.close()

    def _receive_some(self) -> bytes:
        """Empty at the stream's end, and when we have ended and they take long to."""
        readable = select.poll()
        readable.register(self._sock.fileno(), select.POLLIN)
        ended_s = 0.0
        while True:
            try:
                with self._calling:
                    return receive_now(self._sock, _RECEIVED_NBYTES)
            except BlockingIOError:
                readable.poll(1000 * _LOOK_S)
            if self._ended:
                ended_s = ended_s or time.monotonic()
                if time.monotonic() - ended_s > _LINGER_S:
                    return b""

    def _send_posted(self) -> None:
        tick_s = self.timeout_s / BEATS_PER_TIMEOUT
        beats_s = time.monotonic()
        silent = 0
        while not self._ended:
            with suppress(queue.Empty):
                self.send(self._posted.get(timeout=max(0.0, beats_s - time.monotonic())))
            if time.monotonic() < beats_s:
                continue
            beats_s = time.monotonic() + tick_s
            self.send(self.heartbeat())
            # Counted in looks: where it is we who did not run for a while they are no more silent.
            silent, self._heard = 0 if self._heard else silent + 1, False
            if silent > BEATS_PER_TIMEOUT:
                self._lose(f"it has been silent for {silent * tick_s:.1f} s: it is stopped, or cut off")

    def _send(self, message: bytes) -> None:
        began_s = time.monotonic()
        left = memoryview(message)
        while left and not self._ended:
            try:
                with self._calling:
                    left = left[send_now(self._sock, bytes(left)) :]
            except BlockingIOError:
                if time.monotonic() - began_s > self.timeout_s:
                    self._lose(f"it has taken nothing for {self.timeout_s:g} s: it is stopped, or cut off")
                    return
                writable = select.poll()
                writable.register(self._sock.fileno(), select.POLLOUT)
                writable.poll(1000 * _LOOK_S)
            except OSError as error:
                self._lose(f"the connection broke ({error})")

    def _lose(self, reason: str) -> None:
        self._end(reason)
        self._shutdown(socket.SHUT_RDWR)

    def _end(self, reason: str) -> bool:
        """False where it had ended before."""
        with self._ending:
            if self._ended:
                return False
            self._ended = True
        self.on_end(reason)
        return True

    def _shutdown(self, how: int) -> None:
        with suppress(OSError):  # it is gone already
            # Not SSLSocket's own, which goes back to plain text first.
            socket.socket.shutdown(self._sock, how)
