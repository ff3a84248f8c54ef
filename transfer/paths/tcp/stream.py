"""One data connection to a peer and the thread that drives it."""

from __future__ import annotations

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
from moonpool.transfer.errors import ChecksumMismatch, PathFailed, RegionError, SpanError, TransferError
from moonpool.transfer.memory.span import Spans
from moonpool.transfer.native.arrays import Index

# Requests sent before the first is answered: the server starts on the next while the last bytes are on their
# way.
_DEPTH = 2
# A request that follows an unanswered one must fit the server's smallest receive buffer: it may be busy
# sending what we are not receiving yet.
_MAX_AHEAD_NBYTES = 16 << 10


class Task:
    """One request and what to do with the reply."""

    def __init__(self, attempt: Attempt, chunk: int, op: Op) -> None:
        self.attempt = attempt
        self.chunk = chunk
        self.op = op
        self.written: Index = np.empty(0, np.intp)  # of a CHECKSUM or PULL_CHECKED: the spans to compare


class StreamOwner(Protocol):
    """What a stream needs of its path. Called on the stream's thread."""

    @property
    def name(self) -> str: ...

    def next_task(self, block: bool) -> Task | None:
        """None: nothing to do now, or, when it blocks, the end."""

    def cannot_pull(self) -> None:
        """The peer cannot read our memory."""

    def answered(self, stream: Stream) -> None:
        """Its other end is there."""

    def stream_ended(self, stream: Stream, tasks: list[Task], error: Exception) -> bool:
        """``tasks`` were not done. True: other streams do them; False: they come to ``error``."""


class Stream:
    """One connection and the thread that drives it."""

    def __init__(self, path: StreamOwner, stream: ByteStream, number: int) -> None:
        """number: what the peer knows the connection by."""
        self.bytes = stream
        self.number = number
        self._thread = threading.Thread(target=self._run, name=f"{path.name} stream", daemon=True)
        self._path = path
        self._sent: deque[Task] = deque()
        self._next: deque[Task] = deque()
        self._kicked = False

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """End the thread; what it was doing fails."""
        self.bytes.shut()
        self._thread.join()

    @property
    def kicked(self) -> bool:
        """It was cut by an attempt that ended, and may have been sound."""
        return self._kicked

    def carries(self, attempt: Attempt) -> bool:
        """Whether requests of it are under way here. From any thread."""
        return any(task.attempt is attempt for task in tuple(self._sent))

    def _kick(self) -> None:
        self._kicked = True
        self.bytes.shut()

    def _run(self) -> None:
        failure: Exception = PathFailed(self._path.name, "it was closed")
        try:
            while self._send_next():
                self._receive()
        except (OSError, WireError) as error:
            failure = PathFailed(self._path.name, str(error), interrupted=self._kicked)
        except Exception as error:
            # Our bug, not the path's: who awaits the batch must hear, and nobody else would.
            failure = error
        tasks = [*self._sent, *self._next]
        # First out of the path, so that an attempt that is started again does not meet us there.
        taken_over = self._path.stream_ended(self, tasks, failure)
        for task in tasks:
            task.attempt.leave(self._kick, error=None if taken_over else failure)
        self.bytes.close(reset=True)

    def _send_next(self) -> bool:
        """Keep requests on the way. False at the end."""
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
            if task.attempt.enter(self._kick):
                return task
        return None

    def _send(self, task: Task) -> None:
        attempt = task.attempt
        budget_ms = max(1, min(int(attempt.deadline_s() * 1000), (1 << 32) - 1))
        if task.op is Op.END:
            self.bytes.send(pack_end(attempt.left_behind, budget_ms))
            return
        rows = attempt.rows(task.chunk)
        if task.op is Op.CHECKSUM:
            spans = attempt.remote.take(task.written)
        else:
            spans = Spans(rows.region, rows.offset, rows.nbytes)
        request = Request(task.op, len(spans), budget_ms, spans.total_nbytes)
        if task.op is Op.WRITE:
            padding = self.bytes.padding(REQUEST_NBYTES + request.body_nbytes, request.nbytes)
            head = replace(request, padding=padding).pack() + pack_spans(spans) + bytes(padding)
        else:
            head = request.pack() + pack_spans(spans)
        if task.op in PULLS:
            head += pack_sources(attempt.local_spans(rows))
        while len(self._sent) > 1 and len(head) > _MAX_AHEAD_NBYTES:
            self._receive()
        if task.op is Op.WRITE:
            send(self.bytes, head, attempt.hold, rows.address, rows.nbytes)
        else:
            self.bytes.send(head)

    def _receive(self) -> None:
        """Take the reply to the oldest request."""
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
            task.attempt.leave(self._kick, chunks=0 if error else 1, error=error)
        else:
            self._next.append(task)

    def _accept(self, task: Task, reply: Reply) -> bool:
        """False when the task needs another request."""
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
            attempt.announce(task.written)
            return True
        if task.op is Op.READ:
            rows = attempt.rows(task.chunk)
            if reply.nbytes != rows.total_nbytes:
                raise WireError("it sent too few or too many bytes")
            receive(self.bytes, attempt.hold, rows.address, rows.nbytes)
            spans = attempt.arrived(task.chunk)
            attempt.verify_arrival(spans)
        else:
            spans = attempt.arrived(task.chunk)
            if attempt.verify_remote and len(spans):
                task.op, task.written = Op.CHECKSUM, spans
                return False
        attempt.announce(spans)
        return True

    def _refusal(self, task: Task, reply: Reply) -> TransferError:
        reason = self.bytes.receive(reply.nbytes).decode("utf-8", "replace")
        if reply.status is Status.BAD_REGION:
            return RegionError(reply.detail, f"the peer says it {reason}")
        if reply.status is Status.BAD_SPAN:
            return SpanError(task.attempt.span_at(task.chunk, reply.detail), f"the peer says: {reason}")
        if task.op in PULLS:
            self._path.cannot_pull()
            return PathFailed(self._path.name, reason, interrupted=True)
        return PathFailed(self._path.name, reason)
