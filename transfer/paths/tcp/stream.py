"""One data connection to a peer, and its thread."""

from __future__ import annotations

import contextlib
import ctypes
import struct
import threading
from collections import deque
from dataclasses import replace
from typing import Protocol

import numpy as np

from moonpool.transfer.connections.byte_stream import ByteStream
from moonpool.transfer.connections.wire import (
    PULLS,
    REPLY_NBYTES,
    REQUEST_NBYTES,
    WRITES,
    Op,
    Reply,
    Request,
    Status,
    WireError,
    pack_end,
    pack_sources,
    pack_spans,
)
from moonpool.transfer.copying.attempt import Attempt
from moonpool.transfer.copying.device import receive, send
from moonpool.transfer.errors import (
    ChecksumMismatch,
    GrantLapsed,
    PathFailed,
    RegionError,
    SpanError,
    TransferError,
)
from moonpool.transfer.memory.chunks import Rows
from moonpool.transfer.memory.span import Spans
from moonpool.transfer.native.arrays import Index
from moonpool.transfer.paths.base import WrittenNow

# Requests sent before the first is answered: the server starts the next while the last bytes travel.
_DEPTH = 2
# A request that follows an unanswered one must fit the server's smallest receive buffer: the server may be
# blocked sending what we do not receive yet. After a read its payload counts too.
_MAX_AHEAD_NBYTES = 16 << 10
# The longest wait for a peer's reply on the caller's thread.
_NOW_S = 2e-3
MAX_READ_NOW_NBYTES = 64 << 10
# A new connection's buffer takes so much at once.
MAX_WRITE_NOW_NBYTES = 32 << 10
_DONE = Reply(Status.OK, 0, 0).pack()


class Task:
    """A request for one chunk. written: of CHECKSUM and PULL_CHECKED, the spans to verify."""

    def __init__(self, attempt: Attempt, chunk: int, op: Op) -> None:
        self.attempt = attempt
        self.chunk = chunk
        self.op = op
        self.written: Index = np.empty(0, np.intp)


class StreamOwner(Protocol):
    """What a stream needs of its path. Called on the stream's thread."""

    @property
    def name(self) -> str: ...

    def next_task(self, block: bool) -> Task | None:
        """None: there is no task now, or, if it blocks, the stream must end."""

    def cannot_pull(self) -> None:
        """The peer could not read our memory."""

    def answered(self, stream: Stream) -> None:
        """The peer has replied on it."""

    def stream_ended(self, stream: Stream, tasks: list[Task], error: Exception) -> bool:
        """``tasks`` were not done. True: other streams do them; False: they fail with ``error``."""


class Stream:
    """interrupted: cut by an attempt that ended, so the connection itself may be sound."""

    def __init__(self, path: StreamOwner, stream: ByteStream, number: int) -> None:
        """number: identifies the connection to the peer."""
        self.bytes = stream
        self.number = number
        self._thread = threading.Thread(target=self._run, name=f"{path.name} stream", daemon=True)
        self._path = path
        self._sent: deque[Task] = deque()
        self._next: deque[Task] = deque()
        self._reply = ctypes.create_string_buffer(REPLY_NBYTES + MAX_READ_NOW_NBYTES)
        self.interrupted = False

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """End the thread. Its tasks fail."""
        self.bytes.shut()
        self._thread.join()

    def carries(self, attempt: Attempt) -> bool:
        """Whether requests of ``attempt`` are in progress here. From any thread."""
        return any(task.attempt is attempt for task in tuple(self._sent))

    def pull_now(self, local: Spans, remote: Spans, checksums: bytes, grant: int) -> WrittenNow:
        """``Path.write_now``: ask the peer to copy ``local`` to ``remote``. If it takes too long the
        connection is cut, as it may still be copying."""
        op = Op.PULL_CHECKED if checksums else Op.PULL
        found = self._ask(op, remote, pack_sources(local), grant)
        if found is None:
            return WrittenNow(0, (self.number,) if self.interrupted else ())
        return WrittenNow(sum(remote.nbytes.tolist()) if found == checksums else 0)

    def send_now(self, remote: Spans, payload: bytes, checksums: bytes, grant: int) -> WrittenNow:
        """``Path.write_now``: send the bytes of ``remote``, joined. Cut as in ``pull_now``."""
        found = self._ask(Op.WRITE, remote, payload, grant)
        if found is not None and checksums:
            found = self._ask(Op.CHECKSUM, remote, b"", 0)
        if found is None and self.interrupted:
            return WrittenNow(0, (self.number,))
        return WrittenNow(len(payload) if found == checksums else 0)

    def read_now(self, remote: Spans) -> bytes | None:
        """The bytes of ``remote``, joined. None: it did not work at once."""
        return self._ask(Op.READ, remote, b"", 0)

    def _ask(self, op: Op, spans: Spans, more: bytes, grant: int) -> bytes | None:
        """Make a request on an idle stream, and return what the reply carries. None: it was refused, or was
        not made; if ``interrupted`` it took too long, and a late reply would be taken for another one."""
        request = Request(op, len(spans), int(_NOW_S * 1000) + 1, sum(spans.nbytes.tolist()), grant=grant)
        came = self.bytes.ask_now(request.pack() + pack_spans(spans) + more, self._reply, _NOW_S)
        if came is None:
            return None
        if came == _DONE:
            return b""
        with contextlib.suppress(WireError, struct.error):
            reply, found = Reply.unpack(came[:REPLY_NBYTES]), came[REPLY_NBYTES:]
            if len(found) == reply.nbytes and not reply.padding:
                return found if reply.status is Status.OK else None
        self._interrupt()
        return None

    def _interrupt(self) -> None:
        self.interrupted = True
        self.bytes.shut()

    def _run(self) -> None:
        failure: Exception = PathFailed(self._path.name, "it was closed")
        try:
            while self._send_next():
                self._receive()
        except (OSError, WireError) as error:
            failure = PathFailed(self._path.name, str(error), interrupted=self.interrupted)
        except Exception as error:
            # A bug of ours. It must end the batch: otherwise its waiter would never be told.
            failure = error
        tasks = [*self._sent, *self._next]
        # Leave the path first: an attempt that starts again must not find this stream there.
        taken_over = self._path.stream_ended(self, tasks, failure)
        for task in tasks:
            task.attempt.leave(self._interrupt, error=None if taken_over else failure)
        self.bytes.close(reset=True)

    def _send_next(self) -> bool:
        """Send until enough requests are unanswered. False: the stream must end."""
        while len(self._sent) < _DEPTH:
            task = self._take()
            if task is None:
                break
            self._sent.append(task)
            self._send(task)
        return bool(self._sent)

    def _take(self) -> Task | None:
        if self._next:
            return self._next.popleft()
        while task := self._path.next_task(block=not self._sent):
            if task.attempt.enter(self._interrupt):
                return task
        return None

    def _send(self, task: Task) -> None:
        attempt = task.attempt
        budget_ms = max(1, min(int(attempt.request.seconds_left() * 1000), (1 << 32) - 1))
        if task.op is Op.END:
            self.bytes.send(pack_end(attempt.unfinished_streams, budget_ms))
            return
        rows = attempt.rows(task.chunk)
        if task.op is Op.CHECKSUM:
            spans = attempt.request.remote.take(task.written)
        else:
            spans = rows.remote_spans
        grant = attempt.request.grant if task.op in WRITES else 0
        request = Request(task.op, len(spans), budget_ms, spans.total_nbytes, grant=grant)
        if task.op is Op.WRITE:
            padding = self.bytes.padding(REQUEST_NBYTES + request.body_nbytes, request.nbytes)
            head = replace(request, padding=padding).pack() + pack_spans(spans) + bytes(padding)
        else:
            head = request.pack() + pack_spans(spans)
        if task.op in PULLS:
            head += pack_sources(attempt.local_spans(rows))
        while len(self._sent) > 1 and self._ahead_nbytes(task, len(head), rows) > _MAX_AHEAD_NBYTES:
            self._receive()
        if task.op is Op.WRITE:
            send(self.bytes, head, attempt.hold, rows.address, rows.nbytes)
        else:
            self.bytes.send(head)

    def _ahead_nbytes(self, task: Task, head_nbytes: int, rows: Rows) -> int:
        """Bytes of ``task``'s request that may have to wait in the server's receive buffer.

        A reply to anything but a read fits our receive buffer: the server goes on and takes the payload.
        """
        reads = any(sent.op is Op.READ for sent in self._sent if sent is not task)
        return head_nbytes + (rows.total_nbytes if reads and task.op is Op.WRITE else 0)

    def _receive(self) -> None:
        """Receive the reply to the oldest request."""
        task = self._sent[0]
        reply = Reply.unpack(self.bytes.receive(REPLY_NBYTES))
        self.bytes.receive(reply.padding)
        self._path.answered(self)
        error: TransferError | None = None
        over = True
        if reply.status is Status.OK:
            try:
                over = self._accept(task, reply)
            except ChecksumMismatch as mismatch:
                error = mismatch
        else:
            error = self._refusal(task, reply)
        self._sent.popleft()
        if over:
            task.attempt.leave(self._interrupt, chunks=0 if error else 1, error=error)
        else:
            self._next.append(task)

    def _accept(self, task: Task, reply: Reply) -> bool:
        """False: the task needs another request."""
        attempt = task.attempt
        if task.op is Op.END:
            return True
        if task.op is Op.PULL_CHECKED:
            task.written = attempt.arrived(task.chunk)
        if task.op in (Op.CHECKSUM, Op.PULL_CHECKED):
            if reply.nbytes != 8 * len(task.written):
                raise WireError("it sent too few or too many checksums")
            found = np.frombuffer(self.bytes.receive(reply.nbytes), np.uint64)
            attempt.verify_delivery(task.written, found)
            return True
        if task.op is Op.READ:
            rows = attempt.rows(task.chunk)
            if reply.nbytes != rows.total_nbytes:
                raise WireError("it sent too few or too many bytes")
            receive(self.bytes, attempt.hold, rows.address, rows.nbytes)
            attempt.verify_arrival(attempt.arrived(task.chunk))
        else:
            spans = attempt.arrived(task.chunk)
            if attempt.verify_remote and len(spans):
                task.op, task.written = Op.CHECKSUM, spans
                return False
        return True

    def _refusal(self, task: Task, reply: Reply) -> TransferError:
        reason = self.bytes.receive(reply.nbytes).decode("utf-8", "replace")
        if reply.status is Status.BAD_REGION:
            return RegionError(reply.detail, f"the peer says it {reason}")
        if reply.status is Status.BAD_GRANT:
            return GrantLapsed(f"the peer says: {reason}")
        if reply.status is Status.BAD_SPAN:
            return SpanError(task.attempt.span_at(task.chunk, reply.detail), f"the peer says: {reason}")
        if task.op in PULLS:
            self._path.cannot_pull()
            return PathFailed(self._path.name, reason, interrupted=True)
        return PathFailed(self._path.name, reason)
