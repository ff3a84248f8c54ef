"""A simulated conductor: its tenants, its view of the nodes, and what it learns and books."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable

from moonpool.conductor.admission.adapter_shares import AdapterShares
from moonpool.conductor.admission.fair_share import FairShare
from moonpool.conductor.admission.limits import Limits
from moonpool.conductor.admission.rejection import DECODE
from moonpool.conductor.admission.tenants import EVERYWHERE
from moonpool.conductor.admission.turn import Turn
from moonpool.conductor.admission.usage import Usage
from moonpool.conductor.coordination.bookings import Bookings
from moonpool.conductor.costs.links import LinkModel
from moonpool.conductor.costs.model import CostModel
from moonpool.conductor.costs.regions import RegionLinks
from moonpool.conductor.fleet.circuit_breaker import CircuitBreaker
from moonpool.conductor.fleet.eligible_nodes import EligibleByRegions, EligibleNodes
from moonpool.conductor.placing.load_ledger import LoadLedger
from moonpool.conductor.placing.node_table import NodeTable
from moonpool.conductor.placing.node_view import Load, NodeView
from moonpool.conductor.placing.placement import Rejection
from moonpool.kvstore.index.redis.node_record import stages_of
from moonpool.simulator.cluster.clock import Clock
from moonpool.simulator.cluster.job import Job
from moonpool.simulator.inputs.scenario import Scenario


class Member:
    """A node as one conductor sees it: ``conductor.fleet.Member`` in virtual time.

    ``view`` is what placement gets; ``load`` counts this conductor's requests there.
    """

    healthy = True

    def __init__(
        self,
        view: NodeView,
        conductor: int,
        costs: CostModel,
        clock: Clock,
        on_change: Callable[[Member], None],
    ) -> None:
        """``conductor``: its number. ``on_change``: ``view`` or ``breaker`` has changed."""
        self.view = view
        self.conductor = conductor
        self.costs = costs
        self.alive = True
        self.stages: tuple[str, ...] = ()  # that requests are placed here for; none: it gets no more
        self.load = LoadLedger(view, lambda: clock.now_s, lambda _: on_change(self))
        self.breaker = CircuitBreaker(view.node_id, lambda: clock.now_s, lambda: on_change(self))
        self.num_ended = 0  # tokens of requests that are no longer in the batch
        self.num_reported = 0  # tokens of the batch that ``load`` has counted

    @property
    def incarnation(self) -> str:
        """A node that joins has a new name."""
        return self.view.node_id

    @property
    def has_room(self) -> bool:
        """False while it warms up and has as many requests as it may."""
        return self.breaker.room(self.load.num_requests) > 0

    def available(self, now_s: float) -> bool:
        """Whether new requests may go there."""
        return self.alive and self.breaker.closed(now_s)


class Conductor:
    """The conductor's own objects, without messages. ``conductor.max_requests`` is not simulated.

    ``prefill`` and ``decode``: the nodes of each stage; a node of both roles is in both tables.
    """

    def __init__(self, number: int, scenario: Scenario, clock: Clock, *, nbytes_per_s: float) -> None:
        """``nbytes_per_s``: of links, as it believes."""
        self.name = f"conductor-{number}"
        self.costs = CostModel()
        self.links = self.costs.links = LinkModel(
            latency_s=scenario.hardware.network_latency_s,
            nbytes_per_s=nbytes_per_s,
            connect_s=0.0,
            regions=RegionLinks.parse(scenario.region_links, node_price=scenario.node_price),
        )
        self.lengths = self.costs.output_lengths
        self.members: dict[str, Member] = {}
        self.prefill, self.decode = NodeTable(), NodeTable()
        self.turn = 0  # decisions so far
        self.rng = random.Random(scenario.seed + number)
        self.bookings = Bookings(self._booked)
        self.limits = Limits(sys.maxsize)
        self._fair_share = FairShare()
        self._adapter_shares = AdapterShares()
        self.usage = Usage(self.limits, self._fair_share, lambda: clock.now_s)
        self._clock = clock
        self._eligible = EligibleByRegions()

    # ------------------------------------------------------------------ nodes

    def use(self, member: Member, role: str) -> None:
        """Place requests of the role's stages there. The conductor does not do so yet."""
        self.members[member.view.node_id] = member
        member.stages, member.view.computes_rest = stages_of(role), role == "decode"
        for stage in member.stages:
            self._table(stage).add(member.view)
        self.touch(member)

    def drop(self, member: Member) -> None:
        """Place no more requests there."""
        for stage in member.stages:
            self._table(stage).remove(member.view)
        member.stages = ()
        self._eligible.drop(member)

    def touch(self, member: Member) -> None:
        """Its view has changed."""
        self.prefill.touch(member.view)
        self.decode.touch(member.view)
        if member.stages:
            self._eligible.put(member, self._clock.now_s)

    def eligible(self, regions: frozenset[str] = EVERYWHERE) -> EligibleNodes:
        return self._eligible.within(regions, self.members.values(), self._clock.now_s)

    def _table(self, stage: str) -> NodeTable:
        return self.prefill if stage == "prefill" else self.decode

    # ------------------------------------------------------------------ tenants

    def enter(self, job: Job) -> Rejection | None:
        """Admit a request and give it its turn; or why not."""
        request, now_s = job.request, self._clock.now_s
        rejection = self.limits.rejection(request.client, now_s)
        if rejection is None:
            self.limits.enter(request.client, request.input_tokens, now_s)
            job.turn = Turn(
                request.client, request.adapter, self._fair_share, self._adapter_shares, self.usage
            )
        return rejection

    def leave(self, job: Job) -> None:
        """The request has ended. It costs its tenant nothing if it got no token, or was not admitted."""
        if job.turn is None:
            return
        now_s, client = self._clock.now_s, job.request.client
        # The token of a prefill that was rejected before its decode is not streamed.
        num_new = 0 if job.rejected == DECODE else job.num_produced
        pays = job.life.pays(num_new, ended_by_client=False)
        if job.life.num_attempts:
            job.turn.settle(num_new, now_s, pays=pays)
        num_tokens = num_new if pays else -job.request.input_tokens
        self.limits.leave(client, num_tokens, now_s, lasted_s=now_s - job.request.arrival_s)

    # ------------------------------------------------------------------ bookings

    def loads(self) -> dict[str, Load]:
        """Its own load by node, for the others."""
        members = self.members.values()
        return {member.incarnation: member.load.booked for member in members if member.load.num_requests}

    def _booked(self, name: str) -> Load:
        member = self.members.get(name)
        return member.load.booked if member is not None else Load()
