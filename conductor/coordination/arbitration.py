"""Arbitration among several conductors on the same nodes.

A conductor that is alone knows all load it placed, and asks Redis nothing. With others, each placement is
booked in one atomic step before it starts; without Redis, the nodes themselves reject what does not fit.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

from moonpool.conductor.coordination.bookings import Booking, Bookings, Choice
from moonpool.conductor.fleet.registry import NodeRegistry
from moonpool.conductor.observing import scheduling_metrics as core_metrics
from moonpool.conductor.placing.node_view import Load
from moonpool.conductor.placing.placement import DecodeEstimate, Placement, PrefillEstimate, Reason
from moonpool.conductor.placing.policies import POLICIES
from moonpool.kvstore.errors import IndexUnavailable

log = logging.getLogger(__name__)

# The period in which conductors exchange their bookings.
_BEAT_S = 0.25
# A placement is kept unless another node is earlier by more than this: estimates are no better.
_KEEP_RATIO = 1.05
_KEEP_S = 1e-3


class Arbitration:
    """Books the placements of one conductor."""

    def __init__(self, bookings: Bookings, registry: NodeRegistry) -> None:
        self._bookings = bookings
        self._registry = registry
        self._task: asyncio.Task[None] | None = None
        self._num_books = 0  # in progress
        self._no_books, self._no_beat = asyncio.Event(), asyncio.Event()
        self._no_books.set()
        self._no_beat.set()
        self.num_others = 0  # live conductors besides this one

    async def start(self) -> None:
        """Raises ``IndexUnavailable``; nothing runs then."""
        await self._beat()
        self._task = asyncio.create_task(self._run(), name="arbitration")

    async def close(self) -> None:
        """Cancel all bookings. Idempotent."""
        task, self._task = self._task, None
        if task is None:
            return
        task.cancel()
        await asyncio.wait((task,))
        try:
            await self._bookings.leave()
        except IndexUnavailable as error:
            log.info("bookings stay until the lease ends: %s", error)

    async def book(self, placement: Placement, num_blocks: int) -> Placement:
        """Book the nodes of a placement, or others if they got too much foreign load since it was made.

        ``num_blocks``: of KV on the decode node. Call it directly after the placement: it uses the foreign
        load that the placement was based on.
        """
        if not self.num_others:
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
        # Before waiting for a beat, which updates the foreign load.
        choices = self._prefill_choices(prefills, placement.prefill)
        try:
            # The caller starts the request before any other task runs, so the next beat includes it.
            async with self._booking():
                booking = await self._bookings.book(
                    choices,
                    [self._decode_choice(estimate) for estimate in decodes],
                    num_blocks,
                    placement.prefill.compute_s,
                )
        except IndexUnavailable:
            core_metrics.bookings.labels("unavailable").inc()
            return placement
        return _booked(placement, prefills, decodes, booking)

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

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(_BEAT_S)
            try:
                await self._beat()
            except IndexUnavailable as error:
                log.debug("the bookings of other conductors are unknown: %s", error)

    async def _beat(self) -> None:
        """Replace all our bookings. No single booking may be in progress meanwhile."""
        self._no_beat.clear()
        try:
            await self._no_books.wait()
            booked = ((member.incarnation, member.load.booked) for member in self._registry.members.values())
            own = {life: load for life, load in booked if load != Load()}
            num_others, others = await self._bookings.beat(own)
        finally:
            self._no_beat.set()
        if num_others != self.num_others:
            log.info("%d other conductors use the same nodes", num_others)
        self.num_others = num_others
        for member in self._registry.members.values():
            member.load.book_foreign(others.get(member.incarnation, Load()) if num_others else None)

    @asynccontextmanager
    async def _booking(self) -> AsyncIterator[None]:
        while not self._no_beat.is_set():
            await self._no_beat.wait()
        self._num_books += 1
        self._no_books.clear()
        try:
            yield
        finally:
            self._num_books -= 1
            if not self._num_books:
                self._no_books.set()


def _booked(
    placement: Placement,
    prefills: list[PrefillEstimate],
    decodes: list[DecodeEstimate],
    booking: Booking,
) -> Placement:
    prefill = prefills[booking.prefill] if booking.prefill >= 0 else placement.prefill
    decode = decodes[booking.decode] if booking.decode >= 0 else placement.decode
    if prefill == placement.prefill and decode == placement.decode:
        core_metrics.bookings.labels("kept" if booking.had_room else "full").inc()
        return placement
    core_metrics.bookings.labels("moved").inc()
    taken = placement.prefill if prefill != placement.prefill else placement.decode
    assert taken is not None
    detail = f"another conductor has placed requests on {taken.node_id} meanwhile"
    return replace(placement, prefill=prefill, decode=decode, reason=Reason.LOAD, detail=detail)
