"""Several conductors on the same nodes: ``conductor.coordination`` in virtual time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from moonpool.conductor.coordination.bookings import Report
from moonpool.conductor.coordination.candidates import Candidates
from moonpool.conductor.placing.placement import Placement
from moonpool.simulator.cluster.clock import Clock
from moonpool.simulator.cluster.conductor import Conductor


class Coordination:
    """The first conductor is the arbiter and answers at once. All report their load each ``share_s``."""

    def __init__(
        self,
        conductors: Sequence[Conductor],
        clock: Clock,
        *,
        share_s: float,
        has_open_requests: Callable[[], bool],
    ) -> None:
        """``share_s`` 0: before each decision."""
        self._conductors = conductors
        self._clock = clock
        self._share_s = share_s
        self._has_open_requests = has_open_requests
        self._num_begun: Counter[str] = Counter()  # bookings asked of the arbiter
        self._version = 0
        if self._several and share_s:
            clock.at(clock.now_s + share_s, self._round)

    @property
    def _several(self) -> bool:
        return len(self._conductors) > 1

    def decides(self) -> None:
        """A conductor decides next."""
        if self._several and not self._share_s:
            self._share()

    def book(self, conductor: Conductor, placement: Placement, num_blocks: int) -> Placement:
        """As ``Arbitration.book``."""
        if not self._several:
            return placement
        candidates, arbiter = Candidates.of(placement, conductor.members, num_blocks), self._conductors[0]
        if conductor is arbiter:
            return candidates.booked(arbiter.bookings.book(candidates.wanted))
        self._num_begun[conductor.name] += 1
        number = self._num_begun[conductor.name]
        booking = arbiter.bookings.book(candidates.wanted, conductor_id=conductor.name, number=number)
        booked = candidates.booked(booking)
        _learn(arbiter, [booked.prefill.node_id, *([booked.decode.node_id] if booked.decode else [])])
        return booked

    def _round(self) -> None:
        self._share()
        if self._has_open_requests():
            self._clock.at(self._clock.now_s + self._share_s, self._round)

    def _share(self) -> None:
        """Each tells all others."""
        self._version += 1
        for teller in self._conductors:
            report = Report(self._version, teller.loads(), self._num_begun[teller.name])
            uses = teller.usage.own()
            for hearer in self._conductors:
                if hearer is not teller:
                    _learn(hearer, hearer.bookings.hear(teller.name, report))
                    hearer.usage.hear(teller.name, uses)


def _learn(conductor: Conductor, nodes: Iterable[str]) -> None:
    """The load of others on these nodes may have changed."""
    for node in nodes:
        if (member := conductor.members.get(node)) is not None:
            member.load.book_foreign(conductor.bookings.foreign(node))
