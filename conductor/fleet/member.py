"""One node as the registry keeps it: record, connection, load and circuit breaker."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace

from google.protobuf.message import DecodeError

from moonpool.conductor.costs.learned import LearnedCosts
from moonpool.conductor.costs.model import CostModel, Profile
from moonpool.conductor.engines.client import EngineClient
from moonpool.conductor.fleet.circuit_breaker import CircuitBreaker
from moonpool.conductor.fleet.member_adapters import MemberAdapters
from moonpool.conductor.fleet.node_client import DecodeClient, NodeClient
from moonpool.conductor.fleet.removal import Reuse
from moonpool.conductor.fleet.timing import ClockOffset, StepWindow
from moonpool.conductor.placing.load_ledger import LoadLedger
from moonpool.conductor.placing.node_view import ADAPTER_LOAD_S, NodeView
from moonpool.kvstore.index.redis.engine_facts import EngineFacts
from moonpool.kvstore.index.redis.node_record import NodeLoad, NodeRecord, stages_of
from moonpool.protos import node_pb2

log = logging.getLogger(__name__)

_LONGEST_S = 3600.0  # of the load of an adapter that is believed


class Member:
    """A node in one incarnation. Placement sees ``view``, which ``load`` keeps current."""

    def __init__(
        self,
        record: NodeRecord,
        cost_model: CostModel,
        clock: Callable[[], float],
        *,
        conductor_id: str,
        on_reachable: Callable[[Member], None],
        on_change: Callable[[Member], None],
        on_late: Callable[[float], None] = lambda seconds: None,
        engine: EngineFacts | None = None,
        learned: LearnedCosts | None = None,
        engine_key: str = "",
    ) -> None:
        """``engine``: facts of another project's engine. Its server asks for ``engine_key``, and its cost is
        one of ``learned``.
        ``on_reachable``: its connection came up or broke; ``on_change``: anything else that placement depends
        on changed. ``on_late``: see ``DecodeClient``.
        """
        self.record = record
        self.clock_offset = ClockOffset()
        self.reuse = Reuse()  # of its cached blocks, by requests placed here
        self.breaker = CircuitBreaker(record.node_id, clock, lambda: on_change(self))
        self.engine = engine
        if learned is None:
            cost = cost_model.node(Profile.from_record(record.profile), clock())
        else:
            cost = learned.new()
        self.view = NodeView(record.node_id, cost, serves_whole=engine is not None and record.role == "both")
        self.load = LoadLedger(self.view, clock, lambda _: on_change(self))
        if engine is not None:
            self.client: NodeClient = EngineClient(
                record.node_id,
                engine.url,
                record.rpc_address,
                lambda: on_reachable(self),
                key=engine_key,
                on_load=self._on_engine_load,
            )
        # A node that can decode may get the role later: its tokens are listened to from the beginning.
        elif record.can("decode"):
            self.client = DecodeClient(
                record.node_id,
                record.rpc_address,
                lambda: on_reachable(self),
                conductor_id=conductor_id,
                on_step=self._on_step,
                on_late=on_late,
            )
        else:
            self.client = NodeClient(record.node_id, record.rpc_address, lambda: on_reachable(self))
        self._cost_model = cost_model
        self.warming: bool | None = None  # it gets hot prefixes before requests; None: it was never connected
        self.first_token_s: float | None = None  # from now to the first token of a request placed here
        self._joined_s = clock()
        self._clock = clock
        self.adapters = MemberAdapters(self.client)
        self._steps = StepWindow()
        self.gated = bool(record.extra.get("gated"))  # it gets no requests until a rollout's gate has passed
        self.update(record)

    @property
    def node_id(self) -> str:
        return self.record.node_id

    @property
    def owner(self) -> str:
        """The name of its node, which may have several replicas."""
        return self.record.replica.node_id if self.record.replica else self.node_id

    @property
    def incarnation(self) -> str:
        """Its name in bookings: another epoch is another node."""
        return f"{self.node_id}@{self.record.epoch}"

    @property
    def kv_address(self) -> node_pb2.KvAddress | None:
        """The address that its blocks are read from; None: its record has no valid one."""
        try:
            return node_pb2.KvAddress.FromString(self.record.kv_address)
        except DecodeError:
            log.warning("the KV address of %s cannot be read; nothing is fetched from it", self.node_id)
            return None

    @property
    def decode_client(self) -> DecodeClient:
        """The client of a node that can decode."""
        assert isinstance(self.client, DecodeClient)
        return self.client

    @property
    def engine_client(self) -> EngineClient:
        """The client of an engine of another project."""
        assert isinstance(self.client, EngineClient)
        return self.client

    @property
    def stages(self) -> tuple[str, ...]:
        """The stages that its role serves."""
        return stages_of(self.record.role)

    def serves(self, now_s: float) -> bool:
        """Whether it would answer a request."""
        ready = self.record.state in ("ready", "unhealthy")
        return self.client.connected and ready and self.breaker.closed(now_s)

    def available(self, now_s: float) -> bool:
        """Whether new requests may go there."""
        return not self.gated and not self.warming and self.serves(now_s)

    @property
    def decodes(self) -> bool:
        """Whether requests may decode there, and move there while they do."""
        return isinstance(self.client, DecodeClient) and "decode" in stages_of(self.record.role)

    @property
    def hands_on(self) -> bool:
        """Whether the requests that decode there should move: it is about to end, or its role has changed."""
        leaves = self.record.state == "draining" or not self.decodes
        return isinstance(self.client, DecodeClient) and self.client.connected and leaves

    @property
    def structures(self) -> bool:
        """Whether it can make answers match a structure. vLLM's server can: it says otherwise by an error."""
        return self.engine is not None or bool(self.record.extra.get("structured"))

    @property
    def healthy(self) -> bool:
        """False: it is used only where no other node of its role is available."""
        return self.record.state != "unhealthy"

    @property
    def has_room(self) -> bool:
        """False while it warms up and has as many requests as it may."""
        return self.breaker.room(self.load.num_requests) > 0

    @property
    def state(self) -> str:
        """The state it reports, or ``unreachable``, or ``gated``: it serves, and gets no requests yet."""
        if not self.client.connected:
            return "unreachable"
        return "gated" if self.gated and self.record.state == "ready" else self.record.state

    def update(self, record: NodeRecord) -> None:
        """A heartbeat of the same incarnation."""
        self.view.region = record.region
        self._cost_model.links.place(record.node_id, record.region)
        if record.profile != self.record.profile:
            self.view.cost.measured(Profile.from_record(record.profile), self._clock())
        for other_id, nbytes_per_s in record.links.items():
            self._cost_model.links.measured(other_id, self.node_id, nbytes_per_s)
        self.clock_offset.observe(record.unix_s, time.time())
        if self.engine is not None:
            # Its store node does not know the engine's load: its server tells.
            record = replace(record, load=self.record.load)
        self.record = record
        self.adapters.see(record.extra.get("adapters"))
        resident = record.extra.get("resident_adapters")
        self.view.resident_adapters = frozenset(map(str, resident if isinstance(resident, list) else ()))
        self.view.adapter_load_s = _positive(record.extra.get("adapter_load_s"), ADAPTER_LOAD_S)
        self.view.computes_rest = record.role == "decode" and record.can("prefill")
        self.view.chunk_tokens = int(record.extra.get("chunk_tokens", 0))
        self._see_load(record.load)

    def _see_load(self, load: NodeLoad) -> None:
        cost = self.view.cost
        token_s = cost.profile.prefill_token_s * cost.prefill_correction.factor(self._clock())
        self.load.on_heartbeat(
            num_blocks=load.num_blocks,
            num_free_blocks=load.free_blocks,
            num_waiting=load.num_waiting,
            # What a prefill node runs are prompts: they are in its queue.
            num_running=0 if self.record.role == "prefill" else load.num_running,
            num_context_tokens=load.num_context_tokens,
            queued_s=load.num_queued_tokens * token_s,
        )

    def prefilled(self, num_tokens: int, num_cached_tokens: int, actual_s: float) -> None:
        """It computed a prompt in ``actual_s``. ``num_cached_tokens``: in fact; the index may have promised
        more.
        """
        uncached_tokens = num_tokens - num_cached_tokens
        self.breaker.took(
            self.view.cost.prefill_s(uncached_tokens, num_cached_tokens, self._clock()), actual_s
        )

    def produced_first(self) -> None:
        """It has produced a request's first token, or has all that it needs to go on with one."""
        if self.first_token_s is None:
            self.first_token_s = self._clock() - self._joined_s

    def delivered(self) -> None:
        """A token of an engine arrived for a request placed here."""
        view = self.view
        self.load.on_step(
            num_delivered=1,
            num_running=view.num_running,
            num_waiting=view.num_waiting,
            num_free_blocks=view.num_free_blocks,
        )

    def _on_engine_load(self, load: NodeLoad) -> None:
        self.record = replace(self.record, load=load)
        self._see_load(load)

    def _on_step(self, step: node_pb2.StepTokens, num_delivered: int) -> None:
        cost, steps = self.view.cost, self._steps
        if step.mixed:
            # A part of the time was a prompt's.
            self._steps = steps = StepWindow()
        num_steps = max(step.num_steps, 1)
        batch_size = max(step.num_running, len(step.tokens) // num_steps)
        plain_s = num_steps * cost.profile.step_s(batch_size, step.num_context_tokens)
        now_s = self._clock()
        if (
            step.num_steps
            and not step.mixed
            and steps.add(plain_s, now_s, num_steps, goes_on=step.num_running > 0)
        ):
            predicted_s = steps.plain_s * cost.decode_correction.factor(now_s)
            self._cost_model.observe_steps(cost, plain_s=steps.plain_s, actual_s=steps.actual_s, now_s=now_s)
            self.breaker.took(predicted_s, steps.actual_s)
        self.load.on_step(
            num_delivered=num_delivered,
            num_running=step.num_running,
            num_context_tokens=step.num_context_tokens,
            num_waiting=step.num_waiting,
            num_free_blocks=step.num_free_blocks,
        )


def _positive(value: object, default: float) -> float:
    return float(value) if isinstance(value, int | float) and 0 < value < _LONGEST_S else default
