"""The server side of data connections. Each has a thread that serves one request after another."""

from __future__ import annotations

import itertools
import logging
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future

import numpy as np

from moonpool.transfer.connections.byte_stream import ByteStream, byte_stream
from moonpool.transfer.connections.handshake import Authenticated
from moonpool.transfer.connections.wire import (
    REPLY_NBYTES,
    REQUEST_NBYTES,
    WRITES,
    Op,
    Reply,
    Request,
    Status,
    WireError,
    unpack_numbers,
    unpack_sources,
    unpack_spans,
)
from moonpool.transfer.copying.device import receive, send
from moonpool.transfer.copying.mapped_region import MappedRegion
from moonpool.transfer.copying.peer_memory import CopySource, ProcessMemory
from moonpool.transfer.errors import GrantLapsed, RegionError, SpanError
from moonpool.transfer.memory.chunks import based, windows
from moonpool.transfer.memory.lifeline import RegionLocation
from moonpool.transfer.memory.region import Hold, RegionTable
from moonpool.transfer.memory.span import Spans, check_bounds, region_ids, spans_in
from moonpool.transfer.memory.write_grants import GrantUse, WriteGrants
from moonpool.transfer.native.arrays import U64
from moonpool.transfer.native.compiled_copy import Stop, compiled_copy
from moonpool.transfer.native.cuda import CudaError
from moonpool.transfer.native.ledger import Ledger

_log = logging.getLogger(__name__)
_MAX_BUDGET_S = 600.0
# Bytes between two checks whether the client still wants its write: about 0.7 ms.
_LOOK_NBYTES = 16 << 20
# Without the compiled copy verifying is a second pass. So few bytes are still in the cache then.
_CACHED_NBYTES = 2 << 20
IDLE_S = 5.0
"""After so long without data a connection may be ended to make room: batches of a busy peer are closer."""
# Of connections, for the ledger.
_NUMBERS = itertools.count(1)


# (client, local spans, the client's spans, seconds, grant) -> a future that ends when the bytes have arrived.
Fetch = Callable[[Authenticated, Spans, Spans, float, int], "Future[object]"]


class StreamServer:
    """Serves the regions of one agent to its peers' data connections."""

    def __init__(
        self,
        regions: RegionTable,
        grants: WriteGrants,
        slice_nbytes: int,
        fetch: Fetch,
        ledger: Ledger | None = None,
    ) -> None:
        """``fetch`` reads spans of a client's regions, as a peer; from any thread. ``ledger``: serves small
        requests; None: it cannot be compiled."""
        self.regions = regions
        self.grants = grants
        self.fetch = fetch
        self.ledger = ledger
        self.slice_nbytes = slice_nbytes
        self._lock = threading.Lock()
        self._threads: dict[threading.Thread, ServerConnection] = {}

    def __len__(self) -> int:
        return len(self._threads)

    def incarnations(self) -> list[bytes]:
        """Of the client of each connection."""
        with self._lock:
            return [served.remote.identity.incarnation for served in self._threads.values()]

    def num_idle(self) -> int:
        """Connections that ``end_idle`` can end, or has ended."""
        with self._lock:
            return sum(served.ending or served.idle for served in self._threads.values())

    def end_idle(self, most: int) -> None:
        """End connections that are idle, the longest idle first, while more than ``most`` are open.

        Their clients connect again for the next batch.
        """
        with self._lock:
            left = [served for served in self._threads.values() if not served.ending]
            if len(left) <= most:
                return
            idle = [served for served in left if served.idle]
            idle.sort(key=lambda served: served.stream.idle_s, reverse=True)
            for served in idle[: len(left) - most]:
                served.end()

    def serve(self, sock: socket.socket, remote: Authenticated) -> None:
        """Serve a connection, and close its socket in the end."""
        served = ServerConnection(byte_stream(sock, self.slice_nbytes), remote, self)
        thread = threading.Thread(target=served.run, name=f"serve {remote.identity.agent_id}", daemon=True)
        # Under the lock: ``close`` joins only threads that have started. This one waits for it when it ends.
        with self._lock:
            try:
                thread.start()
            except RuntimeError as error:
                _log.error("data connection of %s is refused: %s", remote.identity.agent_id, error)
                served.stream.close()
                return
            self._threads[thread] = served

    def forget(self, incarnation: bytes, region_id: int) -> None:
        """A client closed one of its regions."""
        with self._lock:
            served = [one for one in self._threads.values() if one.remote.identity.incarnation == incarnation]
        for one in served:
            one.forget(region_id)

    def ended(self) -> None:
        """The calling thread has ended its connection."""
        with self._lock:
            self._threads.pop(threading.current_thread(), None)

    def close(self) -> None:
        """End all connections, and wait for their threads."""
        with self._lock:
            threads = dict(self._threads)
        for served in threads.values():
            served.stream.shut()
        for thread in threads:
            thread.join()

    def end(self, incarnation: bytes, numbers: Collection[int], seconds: float) -> bool:
        """End a client's connections with these numbers. False: some still run after ``seconds``."""
        with self._lock:
            threads = [
                thread
                for thread, served in self._threads.items()
                if served.remote.identity.incarnation == incarnation and served.remote.argument in numbers
            ]
            for thread in threads:
                self._threads[thread].stream.shut()
        until = time.monotonic() + seconds
        for thread in threads:
            thread.join(max(until - time.monotonic(), 0))
        return not any(thread.is_alive() for thread in threads)


class ServerConnection:
    """One data connection, on a thread of its own."""

    def __init__(self, stream: ByteStream, remote: Authenticated, server: StreamServer) -> None:
        self.stream = stream
        self.remote = remote
        self._server = server
        self._number = next(_NUMBERS)
        self._ledger = server.ledger if type(stream) is ByteStream else None
        self._memory: ProcessMemory | None = None
        # The client's regions that the ledger knows. It has their addresses.
        self._mapped: dict[int, MappedRegion] = {}
        self._mapping = threading.Lock()
        self._stop: Stop = np.zeros(1, np.uint8)
        self._answering = False
        self.ending = False
        self._poll = select.poll()
        self._poll.register(stream.sock, select.POLLRDHUP)

    @property
    def idle(self) -> bool:
        """Whether it is a TCP connection without a request in progress nor data lately. From any thread."""
        return not self._answering and self.stream.idle_s >= IDLE_S

    def end(self) -> None:
        """End it, from any thread. A request that arrives meanwhile fails, as on a broken connection."""
        self.ending = True
        self.stream.shut()

    def forget(self, region_id: int) -> None:
        # First: ``_remember`` looks whether the region is still mapped.
        if self._memory is not None:
            self._memory.forget(region_id)
        if self._ledger is not None:
            with self._mapping:
                self._ledger.source(self._number, region_id, None)
                self._mapped.pop(region_id, None)

    def run(self) -> None:
        try:
            while True:
                if self._ledger is not None:
                    self.stream.note_sent(self._ledger.serve(self.stream.sock.fileno(), self._number))
                request = Request.unpack(self.stream.receive(REQUEST_NBYTES))
                self._answering = True
                self._answer(request)
                self._answering = False
                self.stream.limit(0)
        except (OSError, WireError) as error:
            _log.debug("data connection of %s ended: %s", self.remote.identity.agent_id, error)
        except CudaError as error:
            _log.error("data connection of %s ended: %s", self.remote.identity.agent_id, error)
        finally:
            if self._ledger is not None:
                self._ledger.source(self._number, 0, None)
            if self._memory is not None:
                self._memory.close()
            self.stream.close()
            self._server.ended()

    def _answer(self, request: Request) -> None:
        budget_s = min(request.budget_ms / 1000, _MAX_BUDGET_S)
        # From the header on: a client that sends or reads no further does not keep the thread.
        self.stream.limit(max(budget_s, 1e-3))
        body = self.stream.receive(request.body_nbytes)
        self.stream.receive(request.padding)
        if request.op is Op.END:
            self._end(unpack_numbers(body), request.budget_ms / 1000)
            return
        spans = unpack_spans(body, request.num_spans)
        writes = request.op in WRITES
        use: GrantUse | None = None
        try:
            if request.op is Op.FETCH:
                self._fetch(spans, unpack_sources(body, spans), budget_s, request.grant)
                return
            hold = self._server.regions.hold(region_ids(spans), self._interrupt)
            try:
                addresses = self._server.regions.addresses(spans, writable=writes)
                if spans.total_nbytes != request.nbytes:
                    raise WireError(
                        f"{request.nbytes} bytes announced, but the spans have {spans.total_nbytes}"
                    )
                if writes:
                    use = self._server.grants.use(request.grant, spans, self._interrupt)
                    # A write that was long on its way gets no more time than its grant has.
                    budget_s = min(budget_s, max(use.seconds_left(), 1e-3))
                    self.stream.limit(budget_s)
                self._serve(request, body, spans, addresses, hold, use, time.monotonic() + budget_s)
            finally:
                if use is not None:
                    use.release()
                hold.release()
        except GrantLapsed as error:
            self._refuse(request, Status.BAD_GRANT, 0, str(error))
        except SpanError as error:
            self._refuse(request, Status.BAD_SPAN, error.index, error.reason)
        except RegionError as error:
            self._refuse(request, Status.BAD_REGION, error.region_id, error.reason)

    def _end(self, numbers: list[int], seconds: float) -> None:
        if self.remote.argument in numbers:
            raise WireError("it asked to end the connection it asked on")
        if self._server.end(self.remote.identity.incarnation, numbers, min(seconds, _MAX_BUDGET_S)):
            self._reply()
        else:
            self._reply(Status.FAILED, 0, b"its earlier connections do not end")

    def _refuse(self, request: Request, status: Status, detail: int, reason: str) -> None:
        if request.op is Op.WRITE:
            # The bytes have been sent already, and another batch's request may follow them.
            self.stream.discard(request.nbytes)
        self._reply(status, detail, reason.encode()[:1024])

    def _reply(self, status: Status = Status.OK, detail: int = 0, payload: bytes = b"") -> None:
        self.stream.send(Reply(status, detail, len(payload)).pack() + payload)

    def _interrupt(self, error: RegionError | GrantLapsed) -> None:
        """A region of the request in progress was closed, or its grant revoked. From any thread."""
        self._stop[0] = 1
        self.stream.shut()

    def _serve(
        self,
        request: Request,
        body: bytes,
        spans: Spans,
        addresses: U64,
        hold: Hold,
        use: GrantUse | None,
        deadline: float,
    ) -> None:
        """use: of a write; released before the reply, after which the grant may be revoked."""
        if request.op is Op.READ:
            padding = self.stream.padding(REPLY_NBYTES, request.nbytes)
            head = Reply(Status.OK, 0, request.nbytes, padding).pack() + bytes(padding)
            send(self.stream, head, hold, addresses, spans.nbytes)
        elif use is not None and request.op is Op.WRITE:
            receive(self.stream, hold, addresses, spans.nbytes, lambda: self._wanted(deadline))
            use.release()
            self._reply()
        elif use is not None:
            checked = request.op is Op.PULL_CHECKED
            self._pull(unpack_sources(body, spans), addresses, spans.nbytes, hold, use, checked, deadline)
        else:
            self._reply(payload=hold.checksums(spans).tobytes())

    def _pull(
        self,
        sources: Spans,
        addresses: U64,
        nbytes: U64,
        hold: Hold,
        use: GrantUse,
        checked: bool,
        deadline: float,
    ) -> None:
        """checked: reply with the checksums of the copy."""
        source = self._locate(sources, hold)
        if source is None:
            self._reply(Status.FAILED, 0, b"the memory of the writing process cannot be read")
            return
        there = based(sources.region, sources.offset, source.bases)
        digests = np.empty(len(nbytes) if checked else 0, np.uint64)
        most_nbytes = _CACHED_NBYTES if checked and compiled_copy() is None else _LOOK_NBYTES
        for begin, end, _ in windows(nbytes, len(nbytes), most_nbytes):
            part = slice(begin, end)
            wanted = self._wanted(deadline) and source.copy(
                addresses[part], there[part], nbytes[part], self._stop, digests[part] if checked else None
            )
            if not wanted:
                raise ConnectionResetError("the client no longer wants its write")
        use.release()
        self._reply(payload=digests.tobytes())

    def _locate(self, sources: Spans, hold: Hold) -> CopySource | None:
        """None: the client's memory cannot be read, or a region is closed. Raises SpanError."""
        if self._memory is None:
            self._memory = ProcessMemory.of(self.remote)
            if self._memory is None:
                return None
        addresses: dict[int, int] = {}
        ids = region_ids(sources)
        for region_id in ids:
            location = self._memory.locate_region(region_id)
            if location is None:
                return None
            check_bounds(sources, region_id, location.nbytes, spans_in(sources, region_id, ids))
            addresses[region_id] = location.address
            if self._ledger is not None and region_id not in self._mapped:
                self._remember(self._ledger, region_id, location, self._memory)
        return self._memory.source(addresses, hold)

    def _remember(
        self, ledger: Ledger, region_id: int, location: RegionLocation, memory: ProcessMemory
    ) -> None:
        """Let the ledger serve small writes from a region of the client, if it is mapped."""
        compiled, array, witness = compiled_copy(), memory.mapping(region_id), memory.witness()
        if compiled is None or array is None or witness is None:
            return
        client = self.remote.identity
        mapped = MappedRegion(compiled, region_id, array, location.nbytes, client, witness)
        with self._mapping:
            if memory.mapping(region_id) is None:
                return  # it was closed meanwhile
            self._mapped[region_id] = mapped
            ledger.source(self._number, region_id, mapped.source)

    def _fetch(self, spans: Spans, sources: Spans, budget_s: float, grant: int) -> None:
        """Read the client's regions as a peer, until the client hangs up."""
        if self._poll.poll(0):
            raise ConnectionResetError("the client no longer wants its write")
        ended = os.eventfd(0, os.EFD_CLOEXEC)
        try:
            reading = self._server.fetch(self.remote, spans, sources, budget_s, grant)
            reading.add_done_callback(lambda _: os.eventfd_write(ended, 1))
            self._poll.register(ended, select.POLLIN)
            if ended not in dict(self._poll.poll()):
                reading.cancel()
            os.eventfd_read(ended)
            self._poll.unregister(ended)
        finally:
            os.close(ended)
        if reading.cancelled():
            raise ConnectionResetError("the client no longer wants its write")
        error = reading.exception()
        if isinstance(error, SpanError | RegionError | GrantLapsed):
            raise error
        if error is not None:
            self._reply(Status.FAILED, 0, str(error).encode()[:1024])
            return
        self._reply()

    def _wanted(self, deadline: float) -> bool:
        """Whether the write may continue. The client hangs up when its batch is over."""
        return time.monotonic() < deadline and not self._poll.poll(0)
