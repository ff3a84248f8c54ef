"""The wire format: fixed little-endian headers, and limits on everything that follows them.

The handshake names one of three kinds of connection:

control   frames of (length u32, kind u8, body), both ways: notes, questions about regions, closed regions.
data      requests one way, replies the other, in order: see ``Request`` and ``Reply``.
memfd     the server sends one memfd descriptor and closes (Unix sockets only).
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from moonpool.transfer.errors import TransferError
from moonpool.transfer.memory.span import Spans

MAX_FRAME_NBYTES = 64 << 10
"""Limit of a control frame without its header, and so of a note."""
MAX_REQUEST_SPANS = 4096
PAGE_NBYTES = 4096
"""Padding is shorter; see ``ByteStream.padding``."""
MAX_REQUEST_NBYTES = 64 << 20
MAX_CHECKED_NBYTES = 1 << 44
MAX_MESSAGE_NBYTES = 1024
MAX_KEY_NBYTES = 8192


class WireError(TransferError):
    """The other side violated the protocol. The connection is closed."""


class Kind(enum.IntEnum):
    """Kind of a connection."""

    CONTROL = 1
    DATA = 2
    MEMFD = 3


class Op(enum.IntEnum):
    """Operation of a request."""

    READ = 1  # the reply carries the spans' bytes
    WRITE = 2  # the spans' bytes follow the request
    PULL = 3  # the server copies from the client's regions; the sources follow the spans
    CHECKSUM = 4  # the reply carries one u64 a span
    FETCH = 5  # the server reads the client's regions as a peer; the sources follow the spans
    PULL_CHECKED = 6  # PULL and CHECKSUM in one, while the spans are in the cache
    END = 7  # the server ends other data connections of the client; their numbers (u32) follow


WRITES = frozenset({Op.WRITE, Op.PULL, Op.PULL_CHECKED, Op.FETCH})
"""Requests that change the server's memory."""


class Status(enum.IntEnum):
    """Status of a reply."""

    OK = 0
    BAD_SPAN = 1  # detail: the span's index in the request
    BAD_REGION = 2  # detail: the region's id
    FAILED = 3  # this path cannot do it
    BAD_GRANT = 4  # the grant to write has ended


class Frame(enum.IntEnum):
    """Kind of a control frame."""

    NOTE = 1
    ASK_REGION = 2  # region id u32
    REGION = 3  # RegionInfo
    REGION_CLOSED = 4  # region id u32
    REGION_RELEASED = 5  # region id u32: the sender no longer reads the closed region


FRAME_HEADER = struct.Struct("<IB")
REGION_ID = struct.Struct("<I")
_REQUEST = struct.Struct("<4sBxHIIQQ")
_REPLY = struct.Struct("<4sBxHIQ")
REQUEST_NBYTES = _REQUEST.size
REPLY_NBYTES = _REPLY.size
_SPAN_NBYTES = 8 + 8 + 4
_NUMBER_NBYTES = 4
_SOURCE_NBYTES = 8 + 4
PULLS = (Op.PULL, Op.PULL_CHECKED, Op.FETCH)
_REQUEST_MAGIC = b"MPq2"
_REPLY_MAGIC = b"MPr1"


@dataclass(frozen=True, slots=True)
class Request:
    """Followed by the spans' offsets, sizes (u64 each) and regions (u32 each), then as ``Op`` says.

    ``padding`` comes before the bytes of a WRITE.
    """

    op: Op
    num_spans: int
    budget_ms: int
    """Milliseconds after which the client gives up, and the server stops."""
    nbytes: int
    padding: int = 0
    grant: int = 0
    """Of ``WRITES``: the server's grant to write the spans; 0: the one without an end."""

    def pack(self) -> bytes:
        return _REQUEST.pack(
            _REQUEST_MAGIC, self.op, self.padding, self.num_spans, self.budget_ms, self.nbytes, self.grant
        )

    @property
    def body_nbytes(self) -> int:
        """Bytes of the spans and the sources of a PULL or FETCH, or of the numbers of an END."""
        if self.op is Op.END:
            return _NUMBER_NBYTES * self.num_spans
        return self.num_spans * (_SPAN_NBYTES + (_SOURCE_NBYTES if self.op in PULLS else 0))

    @classmethod
    def unpack(cls, header: bytes) -> Request:
        magic, op, padding, num_spans, budget_ms, nbytes, grant = _REQUEST.unpack(header)
        if magic != _REQUEST_MAGIC or op not in Op.__members__.values():
            raise WireError("not a request")
        # A CHECKSUM moves none of its bytes.
        most_nbytes = MAX_CHECKED_NBYTES if op == Op.CHECKSUM else MAX_REQUEST_NBYTES
        if not 1 <= num_spans <= MAX_REQUEST_SPANS or not 1 <= nbytes <= most_nbytes:
            raise WireError(f"a request for {num_spans} spans and {nbytes} bytes exceeds the limits")
        if padding >= (PAGE_NBYTES if op == Op.WRITE else 1):
            raise WireError(f"padding of {padding} bytes exceeds the limit")
        return cls(Op(op), num_spans, budget_ms, nbytes, padding, grant)


@dataclass(frozen=True, slots=True)
class Reply:
    """Followed by ``padding``, then ``nbytes``: the data if OK, else an error text."""

    status: Status
    detail: int
    nbytes: int
    padding: int = 0

    def pack(self) -> bytes:
        return _REPLY.pack(_REPLY_MAGIC, self.status, self.padding, self.detail, self.nbytes)

    @classmethod
    def unpack(cls, header: bytes) -> Reply:
        magic, status, padding, detail, nbytes = _REPLY.unpack(header)
        if magic != _REPLY_MAGIC or status not in Status.__members__.values():
            raise WireError("not a reply")
        if nbytes > (MAX_REQUEST_NBYTES if status == Status.OK else MAX_MESSAGE_NBYTES):
            raise WireError(f"a reply of {nbytes} bytes exceeds the limit")
        if padding >= PAGE_NBYTES:
            raise WireError(f"padding of {padding} bytes exceeds the limit")
        return cls(Status(status), detail, nbytes, padding)


def pack_end(numbers: Sequence[int], budget_ms: int) -> bytes:
    """A complete END request."""
    body = np.array(numbers, np.uint32).tobytes()
    return Request(Op.END, len(numbers), budget_ms, len(body)).pack() + body


def unpack_numbers(body: bytes) -> list[int]:
    """The connection numbers in the body of an END."""
    return [int(number) for number in np.frombuffer(body, np.uint32)]


def pack_spans(spans: Spans) -> bytes:
    return spans.offset.tobytes() + spans.nbytes.tobytes() + spans.region.tobytes()


def unpack_spans(body: bytes, num_spans: int) -> Spans:
    return Spans(
        offset=np.frombuffer(body, np.uint64, num_spans),
        nbytes=np.frombuffer(body, np.uint64, num_spans, 8 * num_spans),
        region=np.frombuffer(body, np.uint32, num_spans, 16 * num_spans),
    )


def pack_sources(sources: Spans) -> bytes:
    """The sources of a PULL or FETCH in the client's regions. They have the sizes of the spans."""
    return sources.offset.tobytes() + sources.region.tobytes()


def unpack_sources(body: bytes, spans: Spans) -> Spans:
    """The sources behind ``spans`` in the body of a PULL or FETCH."""
    count = len(spans)
    rest = body[_SPAN_NBYTES * count :]
    return Spans(
        np.frombuffer(rest, np.uint32, count, 8 * count), np.frombuffer(rest, np.uint64, count), spans.nbytes
    )


_REGION_INFO = struct.Struct("<IBBHQQ")


@dataclass(frozen=True, slots=True)
class RegionInfo:
    """What a peer is told of a region.

    address: in its owner's process. shared: it has a memfd. on_device: in CUDA device memory. key, ipc: for
    UCX and CUDA IPC, or empty.
    """

    id: int
    open: bool
    writable: bool
    shared: bool
    nbytes: int
    address: int
    key: bytes = b""
    on_device: bool = False
    ipc: bytes = b""

    def pack(self) -> bytes:
        flags = self.writable | self.shared << 1 | self.on_device << 2
        header = _REGION_INFO.pack(self.id, self.open, flags, len(self.ipc), self.nbytes, self.address)
        return header + self.ipc + self.key

    @classmethod
    def unpack(cls, body: bytes) -> RegionInfo:
        if not 0 <= len(body) - _REGION_INFO.size <= MAX_KEY_NBYTES:
            raise WireError("not a region")
        region_id, is_open, flags, ipc_nbytes, nbytes, address = _REGION_INFO.unpack_from(body)
        key_at = _REGION_INFO.size + ipc_nbytes
        if key_at > len(body):
            raise WireError("not a region")
        writable, shared, on_device = (bool(flags & 1 << bit) for bit in range(3))
        ipc = body[_REGION_INFO.size : key_at]
        return cls(region_id, bool(is_open), writable, shared, nbytes, address, body[key_at:], on_device, ipc)
