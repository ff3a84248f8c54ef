"""Requests that native code serves: any of them is answered as Python would, or left in the socket."""

from __future__ import annotations

import math
import socket
import struct

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from moonpool.transfer import Span, Spans, checksum
from moonpool.transfer.connections.wire import Op, Reply, Request, Status, pack_spans
from moonpool.transfer.native.arrays import address_of
from moonpool.transfer.native.compiled_copy import SHORT_NBYTES, compiled_copy
from moonpool.transfer.native.ledger import Ledger, new_ledger
from tests.transfer.peer_process import pattern

pytestmark = pytest.mark.skipif(compiled_copy() is None, reason="there is no compiler")

NBYTES = 8192
WRITABLE, READ_ONLY, CLOSED = 7, 8, 9
GRANT, LAPSED = 5, 6
GRANTED = (1024, 6000)
# Most of them inside of what is granted, and then anything.
TAME = st.tuples(st.just(WRITABLE), st.integers(GRANTED[0] - 8, GRANTED[1] - 500), st.integers(240, 510))
WILD = st.tuples(
    st.sampled_from((WRITABLE, READ_ONLY, CLOSED)),
    st.one_of(st.integers(0, NBYTES), st.integers((1 << 64) - 700, (1 << 64) - 1)),
    st.one_of(st.integers(0, 700), st.integers((1 << 64) - NBYTES, (1 << 64) - 1)),
)


class Here:
    """A ledger of two regions and a grant, and what they should contain."""

    def __init__(self) -> None:
        ledger = new_ledger()
        assert ledger is not None
        self.ledger: Ledger = ledger
        self.memory = {region: pattern(NBYTES, region) for region in (WRITABLE, READ_ONLY)}
        for region, array in self.memory.items():
            ledger.region(region, address_of(array), NBYTES, writable=region == WRITABLE)
        ledger.region(CLOSED, address_of(self.memory[READ_ONLY]), NBYTES)
        ledger.region(CLOSED, 0, 0)
        bounds = tuple(np.array([at], np.uint64) for at in GRANTED)
        ledger.grant(GRANT, {WRITABLE: (bounds[0], bounds[1])}, math.inf)
        ledger.grant(LAPSED, {WRITABLE: (bounds[0], bounds[1])}, 0.0)

    def serve(self, message: bytes) -> tuple[bytes, bytes]:
        """What is answered to a message, and what is left of it."""
        ours, theirs = socket.socketpair()
        with ours, theirs:
            theirs.sendall(message)
            theirs.shutdown(socket.SHUT_WR)
            sent = self.ledger.serve(ours.fileno(), 1)
            ours.setblocking(False)
            left = b""
            while part := ours.recv(1 << 17):
                left += part
            ours.shutdown(socket.SHUT_RDWR)
            answer = b""
            while part := theirs.recv(1 << 17):
                answer += part
        assert sent == len(answer)
        return answer, left

    def expected(self, request: Request, spans: list[tuple[int, int, int]], payload: bytes) -> bytes | None:
        """What the reply to a good request carries, after what it does; None: it is not for native code."""
        writes = request.op is Op.WRITE
        least = SHORT_NBYTES + 1 if request.op is Op.CHECKSUM else 1
        begin, end = GRANTED if writes else (0, NBYTES)
        for region, offset, nbytes in spans:
            known = region == WRITABLE or (region == READ_ONLY and not writes)
            if not known or nbytes < least or not begin <= offset <= offset + nbytes <= end:
                return None
        if sum(nbytes for *_, nbytes in spans) != request.nbytes or (writes and request.grant != GRANT):
            return None
        found = b""
        for region, offset, nbytes in spans:
            run = self.memory[region][offset : offset + nbytes]
            if writes:
                run[:] = np.frombuffer(payload[:nbytes], np.uint8)
                payload = payload[nbytes:]
            else:
                found += run.tobytes() if request.op is Op.READ else struct.pack("<Q", checksum(run))
        return found


@hypothesis.settings(max_examples=300, deadline=None)
@hypothesis.given(
    st.sampled_from((Op.READ, Op.WRITE, Op.WRITE, Op.CHECKSUM, Op.PULL, Op.PULL_CHECKED, Op.FETCH)),
    st.one_of(st.lists(TAME, min_size=1, max_size=6), st.lists(WILD | TAME, min_size=1, max_size=3)),
    st.sampled_from((GRANT, GRANT, GRANT, LAPSED, 0)),
    st.sampled_from((0, 0, 0, 0, 1, -1)),
)
def test_a_request_is_answered_or_left(
    op: Op, spans: list[tuple[int, int, int]], grant: int, wrong: int
) -> None:
    here, model = Here(), Here()
    whole = max((sum(nbytes for *_, nbytes in spans) + wrong) % (1 << 64), 1)
    # A write that announces more brings no more than this: the rest would never come.
    payload = pattern(min(whole, 1 << 16), 3).tobytes() if op is Op.WRITE else b""
    request = Request(op, len(spans), 1000, whole, grant=grant)
    columns = Spans.of([Span(*span) for span in spans])
    sources = bytes(12 * len(spans)) if op in (Op.PULL, Op.PULL_CHECKED, Op.FETCH) else b""
    message = request.pack() + pack_spans(columns) + payload + sources
    pulls = op in (Op.PULL, Op.PULL_CHECKED, Op.FETCH)
    expected = None if pulls else model.expected(request, spans, payload)
    answer, left = here.serve(message)
    if expected is None:
        assert (answer, left) == (b"", message)
    else:
        assert (answer, left) == (Reply(Status.OK, 0, len(expected)).pack() + expected, b"")
    for region, array in here.memory.items():
        assert np.array_equal(array, model.memory[region])


@hypothesis.settings(max_examples=100, deadline=None)
@hypothesis.given(st.binary(max_size=400), st.integers(0, 60), st.booleans())
def test_garbage_is_left(garbage: bytes, kept: int, head: bool) -> None:
    good = Request(Op.READ, 1, 1000, 8).pack() + pack_spans(Spans.of([Span(READ_ONLY, 0, 8)]))
    cut = good[: min(kept, len(good) - 1)]
    message = (cut if head else b"") + (b"" if head else garbage)
    hypothesis.assume(not message.startswith(good))
    here = Here()
    answer, left = here.serve(message)
    assert (answer, left) == (b"", message)


def test_one_after_another_until_one_is_for_python() -> None:
    here = Here()
    read = Request(Op.READ, 1, 1000, 8).pack() + pack_spans(Spans.of([Span(READ_ONLY, 16, 8)]))
    end = Request(Op.END, 1, 1000, 4).pack() + bytes(4)
    answer, left = here.serve(3 * read + end + read)
    one = Reply(Status.OK, 0, 8).pack() + here.memory[READ_ONLY][16:24].tobytes()
    assert (answer, left) == (3 * one, end + read)
