"""The candidates of a placement as choices for a booking, and the placement that a booking makes of them.

Pure, and the same live and simulated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from moonpool.conductor.coordination.bookings import Booking, Choice, Wanted
from moonpool.conductor.placing.node_view import NodeView
from moonpool.conductor.placing.placement import DecodeEstimate, Placement, PrefillEstimate, Reason
from moonpool.conductor.placing.policies import POLICIES

# A placement is kept unless another node is earlier by more than this: estimates are no better.
_KEEP_RATIO = 1.05
_KEEP_S = 1e-3


class Bookable(Protocol):
    """A node: ``Member``, or a simulated one. ``incarnation``: its id and epoch."""

    view: NodeView

    @property
    def incarnation(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Candidates:
    """Those of ``placement`` that are known here, the chosen one of each role first."""

    placement: Placement
    prefills: Sequence[PrefillEstimate]
    decodes: Sequence[DecodeEstimate]
    wanted: Wanted

    @classmethod
    def of(cls, placement: Placement, members: Mapping[str, Bookable], num_blocks: int) -> Candidates:
        """``members``: by node id. ``num_blocks``: of KV on the decode node."""
        prefills = [placement.prefill]
        if POLICIES[placement.policy].counts_load:
            prefills += [e for e in placement.prefill_candidates if e != placement.prefill]
        decodes: list[DecodeEstimate] = []
        if placement.decode is not None:
            decodes = [placement.decode, *(e for e in placement.decode_candidates if e != placement.decode)]
        prefills = [estimate for estimate in prefills if estimate.node_id in members]
        decodes = [estimate for estimate in decodes if estimate.node_id in members]
        wanted = Wanted(
            _prefill_choices(prefills, placement.prefill, members),
            [_decode_choice(members[estimate.node_id]) for estimate in decodes],
            num_blocks,
            placement.prefill.compute_s,
        )
        return cls(placement, prefills, decodes, wanted)

    def booked(self, booking: Booking) -> Placement:
        """The placement with the booked nodes: the same object if it keeps its own."""
        placement, prefills, decodes = self.placement, self.prefills, self.decodes
        prefill = prefills[booking.prefill] if 0 <= booking.prefill < len(prefills) else placement.prefill
        decode = decodes[booking.decode] if 0 <= booking.decode < len(decodes) else placement.decode
        if prefill == placement.prefill and decode == placement.decode:
            return placement
        taken = placement.prefill if prefill != placement.prefill else placement.decode
        assert taken is not None
        detail = f"another conductor has placed requests on {taken.node_id} meanwhile"
        return replace(placement, prefill=prefill, decode=decode, reason=Reason.LOAD, detail=detail)


def _prefill_choices(
    estimates: Sequence[PrefillEstimate], placed: PrefillEstimate, members: Mapping[str, Bookable]
) -> list[Choice]:
    """``placed`` counts as the earliest, whatever it was chosen for, so that only newer foreign load can
    move it.
    """
    first_s = min((estimate.ttft_s for estimate in estimates), default=0.0)
    choices: list[Choice] = []
    for estimate in estimates:
        member = members[estimate.node_id]
        ttft_s = first_s / _KEEP_RATIO - _KEEP_S if estimate == placed else estimate.ttft_s
        choices.append(Choice(member.incarnation, ttft_s=ttft_s - member.view.foreign_queue_s))
    return choices


def _decode_choice(member: Bookable) -> Choice:
    return Choice(member.incarnation, capacity=member.view.num_blocks)
