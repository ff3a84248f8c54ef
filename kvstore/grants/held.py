"""Grants at other processes, as their holders see them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from moonpool.transfer import DeadlineExceeded, GrantLapsed

# Clocks of two hosts may run this much apart, relatively. NTP corrects by 0.0005 at most.
_DRIFT = 0.01


def holders_clock() -> float:
    """Seconds; goes on while the machine is suspended, unlike ``time.monotonic``."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class HeldGrant:
    """A grant from a reply that said ``granted_s``, to a request made at ``asked_s``.

    What was read before ``ends_s`` is what was granted, without asking again:

    - The granting process began to count after ``asked_s``, and it reuses no slot before it has counted
      ``granted_s``, or before we release the grant (``GrantTable``). It may be slow to notice the end, never
      early. So no slot is reused before ``asked_s + granted_s`` of any clock that runs like ours.
    - A read ends before ``within`` looks at the clock. If that is before ``ends_s``, every byte was read from
      slots that were still granted. A reader that was stopped or suspended meanwhile finds that it is late.
    - A granting process that restarts has another incarnation and other regions, which every path checks
      after its last byte.
    """

    def __init__(
        self, granted_by: str, asked_s: float, granted_s: float, clock: Callable[[], float] = holders_clock
    ) -> None:
        """``granted_by``: for messages."""
        self.granted_by = granted_by
        self.ends_s = asked_s
        self._clock = clock
        self.renewed(asked_s, granted_s)

    def renewed(self, asked_s: float, granted_s: float) -> None:
        """A later reply, to this or another request, granted so much."""
        self._granted_s = granted_s
        self.ends_s = max(self.ends_s, asked_s + granted_s * (1 - _DRIFT))

    @property
    def seconds_left(self) -> float:
        return self.ends_s - self._clock()

    @contextmanager
    def within(self, deadline_s: float) -> Iterator[float]:
        """Read or write under the grant inside the block, with the deadline it yields: ``deadline_s``, or
        what is left of the grant.

        Raises ``GrantLapsed``: it is over, before the block or after it; what was read must not be used.
        """
        left_s = self.seconds_left
        if left_s <= 0:
            raise self._lapsed()
        try:
            yield min(deadline_s, left_s)
        except DeadlineExceeded as error:
            if left_s < deadline_s:
                raise self._lapsed() from error
            raise
        if self.seconds_left <= 0:
            raise self._lapsed()

    def _lapsed(self) -> GrantLapsed:
        return GrantLapsed(
            f"{self.granted_by} granted its memory for {self._granted_s:g} s, and the transfer was not done "
            "by then: nothing of it counts. Raise store.lease_ttl_s there (of objects: transfer.deadline_s), "
            "or move less at a time"
        )
