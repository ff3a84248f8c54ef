"""The path over stream sockets: several connections to the peer share the chunks of a batch."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import itertools
import queue
import socket
import threading
import time
from array import array
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field

from moonpool.transfer import metrics
from moonpool.transfer.connections.backoff import Backoff
from moonpool.transfer.connections.byte_stream import byte_stream
from moonpool.transfer.connections.wire import MAX_REQUEST_SPANS, WRITES, Op
from moonpool.transfer.copying.attempt import Attempt
from moonpool.transfer.copying.batch_request import Direction
from moonpool.transfer.errors import PathFailed, PeerBusy, TransferError
from moonpool.transfer.memory.checksum import checksum
from moonpool.transfer.memory.chunks import Chunking
from moonpool.transfer.memory.region import Region
from moonpool.transfer.memory.span import Spans, plain_columns
from moonpool.transfer.paths.base import NOT_WRITTEN, Path, WrittenNow
from moonpool.transfer.paths.tcp.stream import MAX_READ_NOW_NBYTES, MAX_WRITE_NOW_NBYTES, Stream, Task

# A chunk acquires the GIL twice on either side, so chunks are large. Verified chunks are small, so that they
# are still in the cache then.
_MIN_CHUNK_NBYTES = 1 << 20
_MAX_CHUNK_NBYTES = 32 << 20
_VERIFIED_CHUNK_NBYTES = 4 << 20
_MAX_PULL_NBYTES = 64 << 20
# Several chunks per connection let fast rails take over work of slow ones.
_CHUNKS_A_STREAM = 4
# Time limits of connecting to an address, without and with other connections.
_CONNECT_S = 5.0
_PROBE_S = 1.0

# Requests that take longer, on average of so many, are none for the event loop's thread: posting a batch
# takes it 0.15 ms.
_QUICK_S, _QUICK_REQUESTS = 0.4e-3, 8

# The numbers of this process's data connections.
_NUMBERS = itertools.count(1)


@dataclass(slots=True, eq=False)
class Rail:
    """An address of the peer, usually of one network interface.

    connect: makes a connection with a given number, and returns its socket after the handshake.
    """

    connect: Callable[[int], Awaitable[socket.socket]]
    backoff: Backoff = field(default_factory=Backoff)
    num_streams: int = 0
    connecting: asyncio.Task[None] | None = None


def _fits(region: Region, local: Spans) -> bool:
    """Whether all spans are of ``region``, within it, and do not overlap."""
    if set(local.region.tolist()) != {region.id}:
        return False
    end = 0
    for offset, nbytes in sorted(zip(local.offset.tolist(), local.nbytes.tolist(), strict=True)):
        if offset < end or not nbytes:
            return False
        end = offset + nbytes
    return bool(end <= region.nbytes)


class StreamPath(Path):
    """Data connections over TCP or a Unix socket.

    A batch is striped over all connections: they take its chunks from one queue, so faster ones take more.
    When a connection breaks the others redo its chunks; its rail is paused, and reconnected during a later
    batch. The path has failed when no connection is left.
    """

    def __init__(
        self,
        name: str,
        connects: Sequence[Callable[[int], Awaitable[socket.socket]]],
        *,
        streams: int,
        slice_nbytes: int,
        write_op: Op = Op.WRITE,
        device_write_op: Op = Op.WRITE,
    ) -> None:
        """connects: for each address of the peer, see ``Rail``. streams: number of connections to each.

        write_op: WRITE, or PULL or FETCH if the peer can read our memory. device_write_op: the same for
        device memory.
        """
        self.name = name
        self.networked = name == "tcp"
        self._write_op = write_op
        self._device_write_op = device_write_op
        self._rails = [Rail(connect) for connect in connects]
        self._num_streams = streams
        self._slice_nbytes = slice_nbytes
        self._lock = threading.Lock()
        self._streams: dict[Stream, Rail] = {}
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._num_idle = 0
        # Equal when no thread is about to work on a task.
        self._num_put = 0
        self._num_taken = 0
        self._quick = Backoff()  # of requests on the event loop's thread, after slow ones
        self._usual_s = 0.0  # that they take
        self._pulls = Backoff()  # after the peer could not read our memory

    @property
    def write_op(self) -> Op:
        """WRITE while the peer is not asked to read our memory, because it could not lately."""
        return self._write_op if self._pulls.ready else Op.WRITE

    @property
    def device_write_op(self) -> Op:
        """As ``write_op``, for device memory."""
        return self._device_write_op if self._pulls.ready else Op.WRITE

    def chunking(
        self, direction: Direction, nbytes: int, verified: bool, region_ids: Sequence[int]
    ) -> Chunking:
        if direction == "write" and self.write_op in (Op.PULL, Op.FETCH):
            return Chunking(_MAX_PULL_NBYTES, MAX_REQUEST_SPANS)
        streams = self._num_streams * len(self._rails)
        chunk_nbytes = -(-nbytes // (streams if len(self._rails) == 1 else streams * _CHUNKS_A_STREAM))
        most = min(_VERIFIED_CHUNK_NBYTES, _MAX_CHUNK_NBYTES) if verified else _MAX_CHUNK_NBYTES
        return Chunking(min(max(chunk_nbytes, _MIN_CHUNK_NBYTES), most), MAX_REQUEST_SPANS)

    # ------------------------------------------------------------------ connections

    async def open(self, direction: Direction, region_ids: Sequence[int]) -> None:
        # Later connections join in: a rail that is down must not delay a batch that others can move.
        lacking = [rail for rail in self._rails if rail.num_streams < self._num_streams]
        connecting = {self._begin_connecting(rail) for rail in lacking if rail.backoff.ready}
        if not self._streams:
            await self._first(connecting or {self._begin_connecting(rail) for rail in lacking})

    async def _first(self, connecting: set[asyncio.Task[None]]) -> None:
        """Wait for a connection. Raises the last rail's error when there is none."""
        while connecting:
            done, connecting = await asyncio.wait(connecting, return_when=asyncio.FIRST_COMPLETED)
            if self._streams:
                return
            if not connecting:
                done.pop().result()

    def _begin_connecting(self, rail: Rail) -> asyncio.Task[None]:
        if rail.connecting is None or rail.connecting.done():
            rail.connecting = asyncio.create_task(self._connect(rail))
            # Without a waiter the error would never be retrieved. The back-off records it.
            rail.connecting.add_done_callback(lambda task: task.cancelled() or task.exception())
        return rail.connecting

    async def _connect(self, rail: Rail) -> None:
        try:
            async with asyncio.timeout(_PROBE_S if self._streams else _CONNECT_S):
                while rail.num_streams < self._num_streams:
                    number = next(_NUMBERS)
                    sock = await rail.connect(number)
                    self._add(rail, Stream(self, byte_stream(sock, self._slice_nbytes), number))
        except (OSError, TransferError) as error:
            self._pause(rail)
            if rail.num_streams:
                return
            if isinstance(error, OSError | PeerBusy):
                raise PathFailed(self.name, f"cannot connect: {str(error) or 'no answer'}") from error
            raise

    def _add(self, rail: Rail, stream: Stream) -> None:
        """Raises PathFailed, and closes the stream, if the system has no thread for it."""
        # Under the lock: no batch may be given to a stream that does not start. Its thread waits until then.
        with self._lock:
            try:
                stream.start()
            except RuntimeError as error:
                stream.bytes.close()
                raise PathFailed(self.name, str(error)) from error
            self._streams[stream] = rail
            rail.num_streams += 1

    async def close(self) -> None:
        connecting = [rail.connecting for rail in self._rails if rail.connecting is not None]
        for task in connecting:
            task.cancel()
        if connecting:
            await asyncio.wait(connecting)
        with self._lock:
            streams = list(self._streams)
            for _ in streams:
                self._put(None)
        for stream in streams:
            stream.close()

    # ------------------------------------------------------------------ attempts

    def start(self, attempt: Attempt) -> None:
        op = Op.READ if attempt.request.direction == "read" else self.write_op
        if op is not Op.READ and attempt.hold.device is not None:
            op = self.device_write_op
        # A span that was split is not in one chunk as a whole.
        if op is Op.PULL and attempt.verify_remote and len(attempt.plan.rows) == len(attempt.request.local):
            op = Op.PULL_CHECKED
        with self._lock:
            if self._streams:
                for chunk in range(len(attempt.plan.chunks)):
                    self._put(Task(attempt, chunk, op))
                if attempt.unfinished_streams:
                    attempt.expect(1)
                    self._put(Task(attempt, len(attempt.plan.chunks), Op.END))
                return
        attempt.stop(PathFailed(self.name, "its connections broke"))

    def write_now(
        self, region: Region, local: Spans, remote: Spans, checksums: bytes | None, grant: int
    ) -> WrittenNow:
        stream = self._idle_stream()
        if stream is None:
            return NOT_WRITTEN
        parts: list[bytes] = []
        if self.write_op is not Op.PULL:
            sizes = local.nbytes.tolist()
            if not 0 < sum(sizes) <= MAX_WRITE_NOW_NBYTES or not _fits(region, local):
                return NOT_WRITTEN
            if stream.bytes.round_trip_s > _QUICK_S:
                return NOT_WRITTEN
            rows = zip(local.offset.tolist(), sizes, strict=True)
            parts = [ctypes.string_at(region.address + offset, size) for offset, size in rows]
            if checksums is None:
                checksums = array("Q", map(checksum, parts)).tobytes()
        assert checksums is not None, "no peer on a network is asked to PULL"
        began = time.perf_counter()
        if parts:
            written = stream.send_now(remote, b"".join(parts), checksums, grant)
        else:
            written = stream.pull_now(local, remote, checksums, grant)
        self._took(time.perf_counter() - began)
        return written

    def read_now(self, region: Region, local: Spans, remote: Spans, checksums: bytes) -> int:
        if not plain_columns(local, remote) or local.nbytes.tobytes() != remote.nbytes.tobytes():
            return 0
        sizes = local.nbytes.tolist()
        nbytes, stream = sum(sizes), self._idle_stream()
        if stream is None or not 0 < nbytes <= MAX_READ_NOW_NBYTES or not _fits(region, local):
            return 0
        if stream.bytes.round_trip_s > _QUICK_S:
            return 0
        began = time.perf_counter()
        found = stream.read_now(remote)
        self._took(time.perf_counter() - began)
        if found is None or len(found) != nbytes:
            return 0
        at, sums = 0, array("Q")
        for offset, size in zip(local.offset.tolist(), sizes, strict=True):
            part = found[at : at + size]
            ctypes.memmove(region.address + offset, part, size)
            at += size
            if checksums:
                sums.append(checksum(part))
        return nbytes if sums.tobytes() == checksums else 0

    def _idle_stream(self) -> Stream | None:
        """A connection that the event loop's thread may use until it returns. None: there is work for the
        connections' threads, or the peer was slow lately."""
        if not self._quick.ready:
            return None
        with self._lock:
            # New work comes from the thread that we are on, or from one that is not idle.
            idle = 0 < len(self._streams) == self._num_idle and self._num_put == self._num_taken
            return next((one for one in self._streams if not one.interrupted), None) if idle else None

    def _took(self, seconds: float) -> None:
        self._usual_s += (seconds - self._usual_s) / _QUICK_REQUESTS
        if self._usual_s > _QUICK_S:
            self._usual_s = 0.0
            self._quick.failed()
        elif seconds < _QUICK_S:
            self._quick.succeeded()

    def progress(self, attempt: Attempt) -> dict[object, int]:
        with self._lock:
            streams = [stream for stream in self._streams if stream.carries(attempt)]
        return {stream: stream.bytes.moved_nbytes for stream in streams}

    def drop(self, carriers: Collection[object]) -> bool:
        with self._lock:
            stuck = {rail for stream, rail in self._streams.items() if stream in carriers}
            if stuck.issuperset(self._streams.values()):
                return False
            for stream, rail in self._streams.items():
                if rail in stuck:
                    # An idle one ends with the first task it takes, which is then put back.
                    stream.bytes.shut()
        for rail in stuck:
            self._pause(rail)
        return True

    def _pause(self, rail: Rail) -> None:
        if rail.backoff.failed() and len(self._rails) > 1:
            metrics.RAIL_FAILURES.labels(self.name).inc()

    # ------------------------------------------------------------------ called by streams, on their threads

    def next_task(self, block: bool) -> Task | None:
        if not block:
            # Leave one task for each idle connection.
            if self._tasks.qsize() <= self._num_idle:
                return None
            with contextlib.suppress(queue.Empty):
                task = self._tasks.get_nowait()
                with self._lock:
                    self._num_taken += 1
                return task
            return None
        with self._lock:
            self._num_idle += 1
        task = self._tasks.get()
        with self._lock:
            self._num_idle -= 1
            self._num_taken += 1
        return task

    def _put(self, task: Task | None) -> None:
        """Under the lock."""
        self._num_put += 1
        self._tasks.put(task)

    def cannot_pull(self) -> None:
        self._pulls.failed()

    def answered(self, stream: Stream) -> None:
        self._streams[stream].backoff.succeeded()

    def stream_ended(self, stream: Stream, tasks: list[Task], error: Exception) -> bool:
        with self._lock:
            rail = self._streams.pop(stream)
            rail.num_streams -= 1
            writes = {task.attempt for task in tasks if task.op in WRITES}
            for attempt in writes:
                attempt.unfinished_streams.append(stream.number)
            if not stream.interrupted and len(self._rails) > 1:
                self._pause(rail)
            if self._streams:
                if isinstance(error, PathFailed):
                    for task in tasks:
                        self._put(task)
                    for attempt in writes:
                        attempt.expect(1)
                        self._put(Task(attempt, len(attempt.plan.chunks), Op.END))
                    return True
                return False
            orphans = []
            while not self._tasks.empty():
                task_left = self._tasks.get()
                self._num_taken += 1
                if task_left is not None:
                    orphans.append(task_left)
        for orphan in orphans:
            orphan.attempt.stop(error)
        return False
