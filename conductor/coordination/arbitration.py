"""Arbitration among several conductors on the same nodes.

A conductor that is alone knows all load it placed, and asks no other. With others, each placement is booked
before it starts (see ``peers``), within some milliseconds or not at all; nodes queue what does not fit.
"""

from __future__ import annotations

from moonpool.conductor.admission.usage import Usage
from moonpool.conductor.coordination.bookings import Bookings
from moonpool.conductor.coordination.candidates import Candidates
from moonpool.conductor.coordination.peers import Peers
from moonpool.conductor.fleet.member import Member
from moonpool.conductor.fleet.registry import NodeRegistry
from moonpool.conductor.observing import scheduling_metrics as core_metrics
from moonpool.conductor.observing.demand import ClusterDemand
from moonpool.conductor.placing.node_view import Load
from moonpool.conductor.placing.placement import Placement


class Arbitration:
    """Books the placements of one conductor."""

    def __init__(
        self,
        registry: NodeRegistry,
        usage: Usage,
        demand: ClusterDemand,
        conductor_id: str,
        *,
        lease_ttl_s: float,
        host: str,
        port: int,
    ) -> None:
        """See ``Peers``."""
        self._registry = registry
        self._bookings = Bookings(self._own)
        self.peers = Peers(
            conductor_id,
            self._bookings,
            usage,
            demand,
            self._own_loads,
            self._on_news,
            lease_ttl_s=lease_ttl_s,
            host=host,
            port=port,
        )

    async def book(self, placement: Placement, num_blocks: int) -> Placement:
        """Book the nodes of a placement, or others if they got too much foreign load since it was made.

        ``num_blocks``: of KV on the decode node. Call it directly after the placement: it uses the foreign
        load that the placement was based on. Start the request before any other task runs: the next report
        must include it.
        """
        if not self.peers.num_live:
            return placement
        candidates = Candidates.of(placement, self._registry.members, num_blocks)
        booking = await self.peers.book(candidates.wanted)
        booked = candidates.booked(booking)
        outcome = "moved" if booked is not placement else "kept" if booking.had_room else "full"
        core_metrics.bookings.labels(outcome).inc()
        return booked

    # ------------------------------------------------------------------ loads, for ``Peers``

    def _own(self, incarnation: str) -> Load:
        member = self._member(incarnation)
        return member.load.booked if member is not None else Load()

    def _own_loads(self) -> dict[str, Load]:
        members = self._registry.members.values()
        return {member.incarnation: member.load.booked for member in members if member.load.num_requests}

    def _on_news(self, incarnations: set[str] | None) -> None:
        """The foreign load of these nodes may have changed; None: of all, with the conductors themselves."""
        alone = not self.peers.num_live
        if incarnations is None:
            members = list(self._registry.members.values())
        else:
            members = [member for name in incarnations if (member := self._member(name)) is not None]
        for member in members:
            member.load.book_foreign(None if alone else self._bookings.foreign(member.incarnation))

    def _member(self, incarnation: str) -> Member | None:
        member = self._registry.members.get(incarnation.rpartition("@")[0])
        return member if member is not None and member.incarnation == incarnation else None
