"""Grants: which bytes of our regions peers may write, and until when."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Callable
from random import SystemRandom

import numpy as np

from moonpool.transfer.errors import GrantLapsed, SpanError
from moonpool.transfer.memory.region import Region
from moonpool.transfer.memory.span import Spans, region_ids, spans_in
from moonpool.transfer.native.arrays import U64
from moonpool.transfer.native.ledger import Ledger

Stop = Callable[[GrantLapsed], object]
Ranges = dict[int, tuple[U64, U64]]

STANDING = 0
"""The grant without an end, of the regions in ``WriteGrants.allow``."""


class WriteGrant:
    """Permission of peers to write some spans. Its ``id`` is random and never given again."""

    def __init__(self, grants: WriteGrants, grant_id: int, ranges: Ranges, ends_at: float) -> None:
        """ranges: begins and ends by region, sorted, not adjacent. ends_at: by ``time.monotonic``."""
        self.id = grant_id
        self.ranges = ranges
        self.ends_at = ends_at
        self._grants = grants

    def check(self, spans: Spans) -> None:
        """Raises SpanError: a span is not all within one granted range."""
        ids = region_ids(spans)
        for region_id in ids:
            where = spans_in(spans, region_id, ids)
            if region_id not in self.ranges:
                raise SpanError(int(where[0]), f"region {region_id} is not open to this write")
            begins, ends = self.ranges[region_id]
            offset = spans.offset[where]
            at = np.searchsorted(begins, offset, side="right") - 1
            bad = (at < 0) | (offset + spans.nbytes[where] > ends[at])
            if bad.any():
                raise SpanError(int(where[int(bad.argmax())]), "its bytes were not granted")

    def revoke(self, then: Callable[[], None]) -> None:
        """Refuse the grant from now on, and stop writes under it. ``then`` is called when none can land a
        byte any more: at once if there are none. Call it on the loop of its agent."""
        self._grants.revoke(self, then)

    async def end(self) -> None:
        """``revoke``, and wait until no write can land a byte any more."""
        over = asyncio.Event()
        self.revoke(over.set)
        await over.wait()


class GrantUse:
    """A write in progress. ``release`` it when nothing touches the spans any more."""

    def __init__(self, grants: WriteGrants, grant: WriteGrant, stop: Stop) -> None:
        self.grant = grant
        self.stop = stop
        self._grants = grants

    def seconds_left(self) -> float:
        return self.grant.ends_at - time.monotonic()

    def release(self) -> None:
        """From any thread. Idempotent."""
        self._grants.release(self)


class WriteGrants:
    """The write grants of one agent. Thread-safe, except ``revoke``.

    Peers never write to our memory themselves: over every path a thread of this process does, on their
    behalf, inside a ``GrantUse``. So a revoked grant is harmless as soon as its uses have ended, and they
    end by themselves, whatever state the writer is in: stopped, dead, or behind a slow network.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, ledger: Ledger | None = None) -> None:
        """ledger: is told of every grant, and serves small writes."""
        self._loop = loop
        self._ledger = ledger
        self._lock = threading.Lock()
        # Ids must not be guessed.
        self._rng = SystemRandom()
        self._grants = {STANDING: WriteGrant(self, STANDING, {}, math.inf)}
        self._uses: dict[GrantUse, None] = {}
        self._revoked: dict[int, list[Callable[[], None]]] = {}  # by id: to call after the last use

    def __len__(self) -> int:
        return len(self._grants) - 1 + len(self._revoked)

    def add(self, spans: Spans, lasts_s: float = math.inf) -> WriteGrant:
        """Let the peer that is told the id write ``spans`` for ``lasts_s``."""
        grant = WriteGrant(self, self._rng.getrandbits(63) | 1, _ranges(spans), time.monotonic() + lasts_s)
        with self._lock:
            self._grants[grant.id] = grant
        self._tell(grant)
        return grant

    def _tell(self, grant: WriteGrant) -> None:
        if self._ledger is not None:
            self._ledger.grant(grant.id, grant.ranges, grant.ends_at)

    def allow(self, region: Region) -> None:
        """Let all peers write all of ``region``, until it is closed."""
        whole = np.zeros(1, np.uint64), np.array([region.nbytes], np.uint64)
        with self._lock:
            before = self._grants[STANDING]
            ranges = {**before.ranges, region.id: whole}
            grant = self._grants[STANDING] = WriteGrant(self, STANDING, ranges, math.inf)
        self._tell(grant)

    def use(self, grant_id: int, spans: Spans, stop: Stop) -> GrantUse:
        """Begin a write. ``stop``, from any thread, must make it end soon.

        Raises GrantLapsed; SpanError: a span was not granted.
        """
        with self._lock:
            grant = self._grants.get(grant_id)
            if grant is None or grant.ends_at <= time.monotonic():
                raise GrantLapsed("the grant to write here has ended, or never was: ask for a new one")
            grant.check(spans)
            use = GrantUse(self, grant, stop)
            self._uses[use] = None
            return use

    def release(self, use: GrantUse) -> None:
        with self._lock:
            self._uses.pop(use, None)
            used = any(other.grant is use.grant for other in self._uses)
            over = [] if used else self._revoked.pop(use.grant.id, [])
        for then in over:
            self._loop.call_soon_threadsafe(then)

    def revoke(self, grant: WriteGrant, then: Callable[[], None]) -> None:
        with self._lock:
            self._grants.pop(grant.id, None)
            if self._ledger is not None:
                self._ledger.grant(grant.id, {}, 0.0)
            users = [use for use in self._uses if use.grant is grant]
            if users:
                self._revoked.setdefault(grant.id, []).append(then)
        if not users:
            then()
        # Outside the lock: a use that ends at once releases itself.
        for use in users:
            use.stop(GrantLapsed("the grant ended while a write was using it"))

    def check_integrity(self) -> None:
        """Check the table. No write may be in progress."""
        assert not self._uses, f"{len(self._uses)} writes are in progress"
        assert not self._revoked, "a revoked grant without uses is kept"


def _ranges(spans: Spans) -> Ranges:
    found: Ranges = {}
    ids = region_ids(spans)
    for region_id in ids:
        where = spans_in(spans, region_id, ids)
        order = where[spans.offset[where].argsort()]
        # One span may lie within another: what ends is the longest so far.
        begins, ends = spans.offset[order], np.maximum.accumulate(spans.offset[order] + spans.nbytes[order])
        # Peers join adjacent spans.
        breaks = np.flatnonzero(begins[1:] > ends[:-1]) + 1
        found[region_id] = begins[np.concatenate(([0], breaks))], ends[np.concatenate((breaks - 1, [-1]))]
    return found
