"""Arbitration among several conductors on the same nodes.

A conductor that is alone knows all load it placed, and asks no other. With others, each placement is booked
before it starts (see ``peers``), within some milliseconds or not at all; nodes queue what does not fit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from moonpool.conductor.admission.usage import Usage
from moonpool.conductor.coordination.bookings import Booking, Bookings, Choice, Wanted
from moonpool.conductor.coordination.peers import Peers
from moonpool.conductor.fleet.member import Member
from moonpool.conductor.fleet.registry import NodeRegistry
from moonpool.conductor.observing import scheduling_metrics as core_metrics
from moonpool.conductor.observing.demand import ClusterDemand
from moonpool.conductor.placing.node_view import Load
from moonpool.conductor.placing.placement import DecodeEstimate, Placement, PrefillEstimate, Reason
from moonpool.conductor.placing.policies import POLICIES

# A placement is kept unless another node is earlier by more than this: estimates are no better.
_KEEP_RATIO = 1.05
_KEEP_S = 1e-3


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
        prefills = [placement.prefill]
        if POLICIES[placement.policy].counts_load:
            prefills += [e for e in placement.prefill_candidates if e != placement.prefill]
        decodes: list[DecodeEstimate] = []
        if placement.decode is not None:
            decodes = [placement.decode, *(e for e in placement.decode_candidates if e != placement.decode)]
        members = self._registry.members
        prefills = [estimate for estimate in prefills if estimate.node_id in members]
        decodes = [estimate for estimate in decodes if estimate.node_id in members]
        wanted = Wanted(
            self._prefill_choices(prefills, placement.prefill),
            [self._decode_choice(estimate) for estimate in decodes],
            num_blocks,
            placement.prefill.compute_s,
        )
        return _booked(placement, prefills, decodes, await self.peers.book(wanted))

    def _prefill_choices(self, estimates: Sequence[PrefillEstimate], placed: PrefillEstimate) -> list[Choice]:
        """``placed`` counts as the earliest, whatever it was chosen for, so that only newer foreign load can
        move it.
        """
        first_s = min((estimate.ttft_s for estimate in estimates), default=0.0)
        choices: list[Choice] = []
        for estimate in estimates:
            member = self._registry.members[estimate.node_id]
            ttft_s = first_s / _KEEP_RATIO - _KEEP_S if estimate == placed else estimate.ttft_s
            choices.append(Choice(member.incarnation, ttft_s=ttft_s - member.view.foreign_queue_s))
        return choices

    def _decode_choice(self, estimate: DecodeEstimate) -> Choice:
        member = self._registry.members[estimate.node_id]
        return Choice(member.incarnation, capacity=member.view.num_blocks)

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


def _booked(
    placement: Placement,
    prefills: list[PrefillEstimate],
    decodes: list[DecodeEstimate],
    booking: Booking,
) -> Placement:
    prefill = prefills[booking.prefill] if 0 <= booking.prefill < len(prefills) else placement.prefill
    decode = decodes[booking.decode] if 0 <= booking.decode < len(decodes) else placement.decode
    if prefill == placement.prefill and decode == placement.decode:
        core_metrics.bookings.labels("kept" if booking.had_room else "full").inc()
        return placement
    core_metrics.bookings.labels("moved").inc()
    taken = placement.prefill if prefill != placement.prefill else placement.decode
    assert taken is not None
    detail = f"another conductor has placed requests on {taken.node_id} meanwhile"
    return replace(placement, prefill=prefill, decode=decode, reason=Reason.LOAD, detail=detail)
