"""The frames of a relay connection between two machines."""

from __future__ import annotations

import enum
import struct
from collections.abc import Iterator
from dataclasses import dataclass

from moonpool.engine.collectives.board import BoardWord, SharedBoard

MAX_FRAME_NBYTES = 64 << 20
_HEADER = struct.Struct("<IBxH")
_STEP = struct.Struct("<Q")
_HEARTBEAT = struct.Struct("<Hxxxxxxq")
# Posted before DONE.
_STEP_WORDS = (
    BoardWord.DIGEST,
    BoardWord.COMPUTE_NS,
    BoardWord.COLLECTIVE_NS,
    BoardWord.BUBBLE_NS,
    BoardWord.ALL_TO_ALL_NS,
    BoardWord.EXCHANGE_NS,
)
_DONE = struct.Struct(f"<Q{len(_STEP_WORDS)}q")


class FrameKind(enum.IntEnum):
    """L: sent by the leader, H: by the rank host."""

    START = 1  # L: start a process for a rank; its compute threads
    STARTED = 2  # H: its process id
    LINE = 3  # both: a line of JSON to or from a rank
    ENDED = 4  # H: how a rank's process ended
    OPEN = 5  # L: create a board and exchange memory of this shape
    STEP = 6  # L: a step's number and batch
    DONE = 7  # H: a rank is done with a step; its digest and times
    HEARTBEATS = 8  # both: age of each rank's last heartbeat; empty before the first
    BYE = 9  # both: the end, with the reason


class FrameError(Exception):
    """The other side uses another protocol."""


@dataclass(frozen=True, slots=True)
class Frame:
    kind: FrameKind
    rank: int
    payload: bytes

    def pack(self) -> bytes:
        return _HEADER.pack(len(self.payload), self.kind, self.rank) + self.payload


class FrameReader:
    """Splits a stream of bytes into frames."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, received: bytes) -> Iterator[Frame]:
        """Yield the complete frames. Raises FrameError; the stream is unusable then."""
        self._rest += received
        begin = 0
        while len(self._rest) - begin >= _HEADER.size:
            nbytes, kind, rank = _HEADER.unpack_from(self._rest, begin)
            if nbytes > MAX_FRAME_NBYTES or kind not in FrameKind.__members__.values():
                raise FrameError(f"a frame of kind {kind} and {nbytes:,} bytes")
            end = begin + _HEADER.size + nbytes
            if len(self._rest) < end:
                break
            yield Frame(FrameKind(kind), rank, bytes(self._rest[begin + _HEADER.size : end]))
            begin = end
        del self._rest[:begin]


def step_frame(step: int, batch: bytes) -> Frame:
    return Frame(FrameKind.STEP, 0, _STEP.pack(step) + batch)


def unpack_step(frame: Frame) -> tuple[int, memoryview]:
    """Return (number, batch)."""
    (step,) = _STEP.unpack_from(frame.payload)
    return step, memoryview(frame.payload)[_STEP.size :]


def done_frame(board: SharedBoard, rank: int, step: int) -> Frame:
    """Pack the words that ``rank`` posted at the end of ``step``."""
    return Frame(FrameKind.DONE, rank, _DONE.pack(step, *(board.count(rank, word) for word in _STEP_WORDS)))


def post_done(frame: Frame, board: SharedBoard) -> None:
    """Post the words of a DONE frame. ``board``: the view of its rank."""
    step, *values = _DONE.unpack(frame.payload)
    for word, value in zip(_STEP_WORDS, values, strict=True):
        board.post(word, value)
    board.post_done(step)


def heartbeat_frame(ages_ns: dict[int, int]) -> Frame:
    return Frame(
        FrameKind.HEARTBEATS, 0, b"".join(_HEARTBEAT.pack(rank, age) for rank, age in ages_ns.items())
    )


def unpack_heartbeats(frame: Frame) -> dict[int, int]:
    """Return ages in ns by rank."""
    return dict(_HEARTBEAT.iter_unpack(frame.payload))
