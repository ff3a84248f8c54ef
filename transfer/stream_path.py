"""Bytes through stream sockets: several connections to the peer that share the chunks of a batch."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import socket
import threading
from collections.abc import Awaitable, Callable, Sequence

from transfer.attempt import Attempt, Direction
from transfer.errors import PathFailed
from transfer.stream import Stream, Task
from transfer.tls import byte_stream
from transfer.wire import MAX_REQUEST_SPANS, Op

# A chunk costs two turns of the GIL on either side, so as few as possible; small ones where each is verified
# or followed, while it is in the cache.
_MIN_CHUNK_NBYTES = 1 << 20
_MAX_CHUNK_NBYTES = 32 << 20
_OBSERVED_CHUNK_NBYTES = 4 << 20
_MAX_PULL_NBYTES = 64 << 20


class StreamPath:
    """A ``Path`` through data connections, over TCP or a Unix socket."""

    def __init__(
        self,
        name: str,
        connect: Callable[[], Awaitable[socket.socket]],
        *,
        streams: int,
        slice_nbytes: int,
        write_op: Op = Op.WRITE,
    ) -> None:
        """``connect`` gives a socket after its handshake. ``write_op``: WRITE, or PULL or FETCH
        where the peer can reach us.
        """
        self.name = name
        self.networked = name == "tcp"
        self.write_op = write_op
        self._connect = connect
        self._num_streams = streams
        self._slice_nbytes = slice_nbytes
        self._lock = threading.Lock()
        self._streams: set[Stream] = set()
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._num_idle = 0
        self._opening = asyncio.Lock()

    def chunking(self, direction: Direction, nbytes: int, observed: bool) -> tuple[int, int]:
        if direction == "write" and self.write_op in (Op.PULL, Op.FETCH):
            return _MAX_PULL_NBYTES, MAX_REQUEST_SPANS
        share = -(-nbytes // self._num_streams)
        most = min(_OBSERVED_CHUNK_NBYTES, _MAX_CHUNK_NBYTES) if observed else _MAX_CHUNK_NBYTES
        return min(max(share, _MIN_CHUNK_NBYTES), most), MAX_REQUEST_SPANS

    async def open(self, direction: Direction, region_ids: Sequence[int]) -> None:
        if len(self._streams) == self._num_streams:
            return
        async with self._opening:
            while len(self._streams) < self._num_streams:
                try:
                    sock = await self._connect()
                except OSError as error:
                    if self._streams:
                        return
                    raise PathFailed(self.name, f"cannot connect: {error}") from error
                stream = Stream(self, byte_stream(sock, self._slice_nbytes))
                with self._lock:
                    self._streams.add(stream)
                stream.start()

    def start(self, attempt: Attempt) -> None:
        op = Op.READ if attempt.direction == "read" else self.write_op
        # A span that had to be cut in pieces is in no chunk as a whole.
        if op is Op.PULL and attempt.verify_remote and len(attempt.plan.rows) == len(attempt.local):
            op = Op.PULL_CHECKED
        with self._lock:
            if self._streams:
                for chunk in range(len(attempt.plan.chunks)):
                    self._tasks.put(Task(attempt, chunk, op))
                return
        attempt.stop(PathFailed(self.name, "its connections broke"))

    async def close(self) -> None:
        with self._lock:
            streams = list(self._streams)
        for _ in streams:
            self._tasks.put(None)
        for stream in streams:
            stream.close()

    def next_task(self, block: bool) -> Task | None:
        if not block:
            # Leave to each connection that has nothing to do the task it is about to take.
            if self._tasks.qsize() <= self._num_idle:
                return None
            with contextlib.suppress(queue.Empty):
                return self._tasks.get_nowait()
            return None
        with self._lock:
            self._num_idle += 1
        task = self._tasks.get()
        with self._lock:
            self._num_idle -= 1
        return task

    def cannot_pull(self) -> None:
        # Then we send it the bytes.
        self.write_op = Op.WRITE

    def stream_ended(self, stream: Stream, error: Exception) -> None:
        with self._lock:
            self._streams.discard(stream)
            if self._streams:
                return
            orphans = []
            while not self._tasks.empty():
                task = self._tasks.get()
                if task is not None:
                    orphans.append(task)
        for task in orphans:
            task.attempt.stop(error)
