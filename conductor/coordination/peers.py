"""The other conductors, by direct connections: all exchange their load, and one of them decides for all.

The arbiter is the conductor with the smallest id among those that answer at once: its tables have every
booking. While it does not answer, each conductor decides by the load that it knows of. Addresses come from
Redis and are kept while Redis does not answer.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any

from grpc.aio import ServicerContext

from moonpool.conductor.admission.fair_share import Work
from moonpool.conductor.admission.tenants import LEAST_WEIGHT, Tenant
from moonpool.conductor.admission.usage import TenantUse, Usage
from moonpool.conductor.coordination.bookings import SHARE_S, Booking, Bookings, Choice, Report, Wanted
from moonpool.conductor.observing import scheduling_metrics as core_metrics
from moonpool.conductor.observing.demand import ClusterDemand, Demand
from moonpool.conductor.placing.node_view import Load
from moonpool.protos import conductor_pb2, conductor_pb2_grpc
from moonpool.runtime import rpc
from moonpool.runtime.errors import MoonpoolError
from moonpool.runtime.failures import FailureClass
from moonpool.runtime.network.sockets import host_port
from moonpool.runtime.observing import failures
from moonpool.runtime.service.vital import cancel_and_wait, restarted

log = logging.getLogger(__name__)

# The longest that a booking holds a request. The arbiter takes less than a millisecond.
ANSWER_S = 0.010
# Without load, pause between reports.
_IDLE_S = 0.25
_BEAT_TIMEOUT_S = 1.0
_FAREWELL_S = 0.2


class ConductorUnknown(MoonpoolError):
    """A conductor asks for a booking before its first report. Nothing was booked."""

    code = "FAILED_PRECONDITION"
    failure = FailureClass.CONDUCTOR


class _Peer:
    """Another conductor. ``live``: its load counts. ``prompt``: it answers within ``ANSWER_S``."""

    def __init__(self, conductor_id: str, address: str) -> None:
        self.conductor_id = conductor_id
        self.address = address
        self.live = False
        self.prompt = False
        self.heard_s = -math.inf
        self.channel = rpc.channel(address, direct=True)
        self.stub = conductor_pb2_grpc.ConductorPeerStub(self.channel)
        self.beats: asyncio.Task[None] | None = None


class Peers(conductor_pb2_grpc.ConductorPeerServicer):
    """Serves ``protos.ConductorPeer``, and is the client of all others."""

    def __init__(
        self,
        conductor_id: str,
        bookings: Bookings,
        usage: Usage,
        demand: ClusterDemand,
        own_loads: Callable[[], Mapping[str, Load]],
        on_news: Callable[[set[str] | None], None],
        *,
        lease_ttl_s: float,
        host: str,
        port: int,
    ) -> None:
        """``on_news``: the foreign load of these nodes may have changed; None: of all.

        A conductor that was not heard of for ``lease_ttl_s`` no longer counts. ``host`` is announced.
        """
        self.address = ""  # ours, from ``start`` on
        self._conductor_id = conductor_id
        self._bookings = bookings
        self._usage = usage
        self._demand = demand
        self._own_loads = own_loads
        self._on_news = on_news
        self._lease_ttl_s = lease_ttl_s
        self._host, self._port = host, port
        self._server: rpc.Server | None = None
        self._peers: dict[str, _Peer] = {}
        self._announced: Mapping[str, str] = {}  # in Redis, as last read
        self._version = 0
        self._num_begun = 0  # bookings asked of others
        self._open: set[int] = set()  # those without an answer
        self._closing: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Listen. Raises ``PortInUse``; nothing runs then."""
        add = conductor_pb2_grpc.add_ConductorPeerServicer_to_server
        self._server, port = await rpc.serve([(add, self)], self._host, self._port, direct=True)
        self.address = host_port(self._host, port)

    async def close(self) -> None:
        """Tell the others that our load is gone. Idempotent."""
        server, self._server = self._server, None
        if server is None:
            return
        farewell = self._report()
        farewell.stops = True
        peers = list(self._peers.values())
        self._peers.clear()
        await asyncio.gather(
            *(peer.stub.Share(farewell, timeout=_FAREWELL_S) for peer in peers if peer.live),
            return_exceptions=True,
        )
        await asyncio.gather(*map(self._end, peers), *self._closing)
        await server.stop(None)

    @property
    def num_live(self) -> int:
        """Other conductors with load that counts."""
        return sum(peer.live for peer in self._peers.values())

    @property
    def live(self) -> list[str]:
        """The ids of those."""
        return [name for name, peer in self._peers.items() if peer.live]

    def silent(self) -> Iterator[str]:
        """A sentence for each conductor that is in Redis and does not answer."""
        for name in sorted(self._announced):
            peer = self._peers.get(name)
            if peer is not None and not peer.live:
                yield (
                    f"{name} at {peer.address} does not answer: its load is known from the nodes only. "
                    "Conductors must reach each other at node.host and node.port"
                )

    def meet(self, announced: Mapping[str, str]) -> None:
        """Redis has the conductors with these ids and addresses."""
        self._announced = announced
        for conductor_id, address in announced.items():
            self._meet(conductor_id, address)

    async def book(self, wanted: Wanted) -> Booking:
        """Have the arbiter choose nodes, within ``ANSWER_S``; else choose by what is known here."""
        arbiter = self._arbiter()
        if arbiter is not None:
            self._num_begun += 1
            number = self._num_begun
            self._open.add(number)
            request = conductor_pb2.BookRequest(
                conductor_id=self._conductor_id,
                number=number,
                prefills=_to_messages(wanted.prefills),
                decodes=_to_messages(wanted.decodes),
                num_blocks=wanted.num_blocks,
                prefill_s=wanted.prefill_s,
            )
            try:
                with rpc.node_errors(arbiter.conductor_id):
                    reply = await arbiter.stub.Book(request, timeout=ANSWER_S)
                return Booking(reply.prefill, reply.decode, reply.had_room)
            except MoonpoolError as error:
                arbiter.prompt = False  # until the next report that it answers at once
                core_metrics.bookings.labels("unavailable").inc()
                failures.count(FailureClass.CONDUCTOR, "lost")
                log.debug("decided without the arbiter: %s", error)
            finally:
                self._open.discard(number)
        return self._bookings.book(wanted)

    # ------------------------------------------------------------------ service ConductorPeer

    async def Share(
        self, request: conductor_pb2.LoadReport, context: ServicerContext[Any, Any]
    ) -> conductor_pb2.LoadReport:
        if request.stops:
            if (peer := self._peers.pop(request.conductor_id, None)) is not None:
                self._lapse(peer)
                self._end_soon(peer)
        elif self._server is not None and (peer := self._meet(request.conductor_id, request.address)):
            self._hear(peer, request)
        return self._report()

    async def Book(
        self, request: conductor_pb2.BookRequest, context: ServicerContext[Any, Any]
    ) -> conductor_pb2.BookReply:
        if request.conductor_id not in self._peers:
            raise ConductorUnknown(f"{request.conductor_id} must report its load before it books")
        prefills, decodes = _to_choices(request.prefills), _to_choices(request.decodes)
        wanted = Wanted(prefills, decodes, request.num_blocks, request.prefill_s)
        booking = self._bookings.book(wanted, conductor_id=request.conductor_id, number=request.number)
        nodes = {prefills[booking.prefill].node} if booking.prefill >= 0 else set()
        if booking.decode >= 0:
            nodes.add(decodes[booking.decode].node)
        self._on_news(nodes)
        return conductor_pb2.BookReply(
            prefill=booking.prefill, decode=booking.decode, had_room=booking.had_room
        )

    # ------------------------------------------------------------------ reports

    def _report(self) -> conductor_pb2.LoadReport:
        self._version += 1
        return conductor_pb2.LoadReport(
            conductor_id=self._conductor_id,
            address=self.address,
            version=self._version,
            loads=[
                conductor_pb2.BookedLoad(node=node, num_blocks=load.num_blocks, prefill_s=load.prefill_s)
                for node, load in self._own_loads().items()
            ],
            num_begun=self._num_begun,
            open=self._open,
            demand=conductor_pb2.Demand(**asdict(self._demand.own)),
            tenants=[
                conductor_pb2.TenantUse(
                    name=use.tenant.name,
                    weight=use.tenant.weight,
                    tokens_per_minute=use.tenant.tokens_per_minute,
                    num_requests=use.num_requests,
                    num_tokens=use.num_tokens,
                    prefill_s=use.work.prefill_s,
                    decode_s=use.work.decode_s,
                )
                for use in self._usage.own()
            ],
        )

    def _hear(self, peer: _Peer, report: conductor_pb2.LoadReport) -> None:
        loads = {load.node: Load(load.num_blocks, load.prefill_s) for load in report.loads}
        nodes = self._bookings.hear(
            peer.conductor_id, Report(report.version, loads, report.num_begun, frozenset(report.open))
        )
        self._usage.hear(peer.conductor_id, map(_use, report.tenants))
        if report.HasField("demand"):  # a conductor of an older version tells none
            self._demand.hear(peer.conductor_id, _demand(report.demand))
        peer.heard_s = asyncio.get_running_loop().time()
        if not peer.live:
            peer.live = True
            log.info("%s at %s uses the same nodes", peer.conductor_id, peer.address)
            self._on_news(None)
        self._on_news(nodes)

    def _meet(self, conductor_id: str, address: str) -> _Peer | None:
        """The peer of this id. None: it is this conductor, or an address is missing."""
        peer = self._peers.get(conductor_id)
        if peer is None and address and conductor_id != self._conductor_id:
            peer = self._peers[conductor_id] = _Peer(conductor_id, address)
            peer.beats = restarted(
                lambda: self._beat(peer), f"share load with {conductor_id}", "share load with a conductor"
            )
        return peer

    async def _beat(self, peer: _Peer) -> None:
        clock = asyncio.get_running_loop().time
        told, began_s = False, -math.inf
        while True:
            ours = self._report()
            if not ours.loads and not told and clock() - began_s < _IDLE_S:
                await asyncio.sleep(SHARE_S)
                continue
            told, began_s = bool(ours.loads), clock()
            try:
                with rpc.node_errors(peer.conductor_id):
                    report = await peer.stub.Share(ours, timeout=_BEAT_TIMEOUT_S)
                # Another process may have its address by now.
                is_it = report.conductor_id == peer.conductor_id
                peer.prompt = is_it and clock() - began_s <= ANSWER_S
                if is_it:
                    self._hear(peer, report)
            except MoonpoolError as error:
                peer.prompt = False
                log.debug("%s at %s does not share its load: %s", peer.conductor_id, peer.address, error)
            if clock() - peer.heard_s > self._lease_ttl_s:
                self._lapse(peer)
                if peer.conductor_id not in self._announced:
                    self._peers.pop(peer.conductor_id, None)
                    self._end_soon(peer)
                    return
            await asyncio.sleep(SHARE_S)

    def _lapse(self, peer: _Peer) -> None:
        """Its load no longer counts. Idempotent."""
        if peer.live:
            peer.live = peer.prompt = False
            log.info("%s at %s has left", peer.conductor_id, peer.address)
            self._bookings.forget(peer.conductor_id)
            self._usage.forget(peer.conductor_id)
            self._demand.forget(peer.conductor_id)
            self._on_news(None)

    def _arbiter(self) -> _Peer | None:
        """The peer that decides; None: this conductor does."""
        prompt = [peer for peer in self._peers.values() if peer.live and peer.prompt]
        first = min(prompt, key=lambda peer: peer.conductor_id, default=None)
        return first if first is not None and first.conductor_id < self._conductor_id else None

    def _end_soon(self, peer: _Peer) -> None:
        task = asyncio.create_task(self._end(peer))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def _end(self, peer: _Peer) -> None:
        await cancel_and_wait(peer.beats)
        # Without grace, a booking in flight would be cancelled, and its request with it.
        await peer.channel.close(_BEAT_TIMEOUT_S)


def _use(use: conductor_pb2.TenantUse) -> TenantUse:
    weight = max(use.weight, LEAST_WEIGHT)
    tenant = Tenant(use.name, weight=weight, tokens_per_minute=use.tokens_per_minute)
    return TenantUse(tenant, use.num_requests, use.num_tokens, Work(use.prefill_s, use.decode_s))


def _demand(told: conductor_pb2.Demand) -> Demand:
    return Demand(**{field.name: getattr(told, field.name) for field in fields(Demand)})


def _to_messages(choices: Sequence[Choice]) -> list[conductor_pb2.NodeChoice]:
    return [
        conductor_pb2.NodeChoice(node=choice.node, capacity=choice.capacity, ttft_s=choice.ttft_s)
        for choice in choices
    ]


def _to_choices(messages: Sequence[conductor_pb2.NodeChoice]) -> list[Choice]:
    return [Choice(one.node, one.capacity, one.ttft_s) for one in messages]
