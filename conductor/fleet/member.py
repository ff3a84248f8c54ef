"""One node as the registry keeps it: what it says of itself, what this conductor gave it, how it fares."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from google.protobuf.message import DecodeError

from moonpool.conductor.costs.model import CostModel, Profile
from moonpool.conductor.fleet.circuit_breaker import CircuitBreaker
from moonpool.conductor.fleet.clock_offset import ClockOffset
from moonpool.conductor.fleet.node_client import DecodeClient, NodeClient, RequestKey
from moonpool.conductor.fleet.step_timing import StepWindow
from moonpool.conductor.observing.agent_facts import agent_facts
from moonpool.conductor.placing.decode_schedule import DecodeSchedule
from moonpool.conductor.placing.node_view import Load, NodeView
from moonpool.kvstore.index.redis.node_record import NodeRecord
from moonpool.protos import node_pb2

log = logging.getLogger(__name__)

# A node that answers with errors, rather than not at all, is left alone after this many in a row: one request
# that no node can serve must not take all of them away from the others.
_IN_A_ROW = 3
# And one that takes so many times as long as was predicted, and this much longer, as often in a row.
_SLOW_RATIO = 8.0
_SLOW_S = 0.5


class Member:
    """A node in one life. ``view`` is what placement sees of it; the methods keep it current.

    The load a record reports is up to a heartbeat old and counts this conductor's own requests too. So own
    ones are counted here, as they come and go, and the rest of the report is taken as the share of others.
    """

    def __init__(
        self,
        record: NodeRecord,
        cost_model: CostModel,
        clock: Callable[[], float],
        *,
        conductor_id: str,
        on_change: Callable[[Member], None],
        on_touched: Callable[[Member], None],
        unix_clock: Callable[[], float] = time.time,
    ) -> None:
        """``on_change``: it can be reached, or cannot; ``on_touched``: anything else placement goes by."""
        self.record = record
        self.clock_offset = ClockOffset()
        self.breaker = CircuitBreaker()
        self.view = NodeView(record.node_id, cost_model.node(Profile.from_record(record.profile)))
        self.client = _client(record, conductor_id, lambda: on_change(self), self._on_step)
        self._cost_model = cost_model
        self._clock = clock
        self._unix_clock = unix_clock
        self._errors = 0  # in a row
        self._slow = 0  # likewise
        self._on_touched = on_touched
        self._alone: RequestKey | None = None  # the prefill beside which there has been no other
        self._decodes: dict[RequestKey, int] = {}  # tokens at placement
        self.schedule = DecodeSchedule()  # when they will probably begin and end
        self._booked: dict[RequestKey, int] = {}  # blocks the decodes will hold
        self._others: Load | None = None  # that other conductors booked here; None: there are none
        self._others_running = 0
        self._context_tokens = 0
        self._steps = StepWindow()
        self.update(record)

    @property
    def node_id(self) -> str:
        return self.record.node_id

    @property
    def kv_address(self) -> node_pb2.KvAddress | None:
        """Where its blocks can be read; None: what it wrote into the index makes no sense."""
        try:
            return node_pb2.KvAddress.FromString(self.record.kv_address)
        except DecodeError:
            log.warning("the KV address of %s cannot be read; nothing is fetched from it", self.node_id)
            return None

    @property
    def decode_client(self) -> DecodeClient:
        """Of a decode node."""
        assert isinstance(self.client, DecodeClient)
        return self.client

    @property
    def num_requests(self) -> int:
        """This conductor's requests that the node works on."""
        return len(self.view.queue) + len(self._decodes)

    def available(self, now_s: float) -> bool:
        """Whether new requests may go there."""
        serves = self.record.state in ("ready", "unhealthy")
        return self.client.connected and serves and self.breaker.closed(now_s)

    @property
    def healthy(self) -> bool:
        """False: it is given requests only where no other node of its role takes any."""
        return self.record.state != "unhealthy"

    @property
    def has_room(self) -> bool:
        """False while it warms up and has as many requests as it may."""
        return self.breaker.has_room(self.num_requests)

    def update(self, record: NodeRecord) -> None:
        """A heartbeat of the same life."""
        if record.profile != self.record.profile:
            self.view.cost.profile = Profile.from_record(record.profile)
        for other_id, nbytes_per_s in record.links.items():
            self._cost_model.links.measured(other_id, self.node_id, nbytes_per_s)
        self.clock_offset.heard(record.unix_s, self._unix_clock())
        self.record = record
        load = record.load
        self.view.num_blocks = load.num_blocks
        self.view.num_free_blocks = load.free_blocks
        self.view.num_waiting = load.num_waiting
        if self._others is None:
            token_s = self.view.cost.profile.prefill_token_s
            own_s = self.view.queue.wait_s(self._clock())
            self.view.foreign_queue_s = max(load.num_queued_tokens * token_s - own_s, 0.0)
        self._others_running = max(load.num_running - len(self._decodes), 0)
        self._refresh_decode()

    # ------------------------------------------------------------------ what this conductor gives it

    def begin_prefill(self, key: RequestKey, compute_s: float, patience_s: float) -> None:
        """``patience_s``: prefills that come within this time may pass it."""
        queue, now_s = self.view.queue, self._clock()
        self._alone = None if len(queue) else key
        queue.add(key, order_s=now_s + patience_s, compute_s=compute_s, now_s=now_s)
        self.view.num_placed += 1
        self._on_touched(self)

    def end_prefill(self, key: RequestKey) -> None:
        """Idempotent."""
        if self.view.queue.remove(key, self._clock()):
            self._on_touched(self)

    def prefilled_alone(self, key: RequestKey) -> bool:
        """Whether it shared no step with another prefill of ours, so that its compute time is its own."""
        return key == self._alone

    def begin_decode(
        self, key: RequestKey, num_tokens: int, num_blocks: int, *, starts_in_s: float, lasts_s: float
    ) -> None:
        """``num_tokens`` now, and ``num_blocks`` in the end; it probably starts and lasts as predicted."""
        self._booked[key] = num_blocks
        starts_s = self._clock() + starts_in_s
        self.schedule.add(key, starts_s=starts_s, ends_s=starts_s + lasts_s, num_tokens=num_tokens)
        self._decodes[key] = num_tokens
        self._context_tokens += num_tokens
        self.view.num_placed += 1
        self._refresh_decode()

    def decoding(self, key: RequestKey) -> None:
        """It has all its blocks and is in the node's batch."""
        self.schedule.begin(key, self._clock())

    def end_decode(self, key: RequestKey, num_delivered: int) -> None:
        """``num_delivered`` of its tokens came from here. Idempotent."""
        self.schedule.remove(key)
        self._booked.pop(key, None)
        num_tokens = self._decodes.pop(key, None)
        if num_tokens is not None:
            left = self._context_tokens - num_tokens - num_delivered
            self._context_tokens = max(left, 0) if self._decodes else 0
            self._refresh_decode()

    # ------------------------------------------------------------------ what other conductors give it

    @property
    def incarnation(self) -> str:
        """Its name in bookings: another epoch is another node."""
        return f"{self.node_id}@{self.record.epoch}"

    @property
    def booked(self) -> Load:
        """What it was given by this conductor and has not done."""
        return Load(sum(self._booked.values()), self.view.queue.wait_s(self._clock()))

    def foreign_booked(self, load: Load | None) -> None:
        """What other conductors gave it; None: there are none, and heartbeats say what else it does."""
        if load == self._others:
            return
        self._others = load
        if load is not None:
            self.view.foreign_queue_s = load.prefill_s
        self._on_touched(self)

    # ------------------------------------------------------------------ how it fares

    def succeeded(self) -> None:
        self._errors = 0
        if not self._slow:
            self.breaker.succeed()
            self._on_touched(self)

    def took(self, predicted_s: float, actual_s: float) -> None:
        """Something took a time of which only this node is the cause."""
        if actual_s < predicted_s * _SLOW_RATIO + _SLOW_S:
            self._slow = 0
            return
        self._slow += 1
        if self._slow % _IN_A_ROW == 0:
            log.warning(
                "%s is given a rest: %.2g s where %.2g s were predicted, %d times in a row",
                self.node_id,
                actual_s,
                predicted_s,
                self._slow,
            )
            self._rest()

    def lost(self) -> None:
        """It could not be reached, or went away."""
        self._rest()

    def erred(self) -> None:
        """It answered with an error."""
        self._errors += 1
        if self._errors >= _IN_A_ROW:
            self._rest()

    def _rest(self) -> None:
        self.breaker.fail(self._clock())
        self._on_touched(self)

    @property
    def state(self) -> str:
        """What it says of itself, where it can be reached."""
        return self.record.state if self.client.connected else "unreachable"

    def to_dict(self, now_s: float) -> dict[str, Any]:
        """For ``/v1/cluster``: plain JSON types."""
        record, load = self.record, self.record.load
        return {
            "node_id": record.node_id,
            "role": record.role,
            "replica": asdict(record.replica) if record.replica else None,  # None: it is a whole node
            "host": record.host,
            "pid": record.pid,
            "ranks": str(record.extra.get("ranks", "")),  # such as tp 2 × pp 1; empty: one process
            "join_s": record.extra.get("join_s"),  # from its life's begin until it served
            "num_starts": record.extra.get("num_starts", 1),  # of its process
            "versions": record.extra.get("versions", {}),
            "epoch": str(record.epoch),  # JSON readers lose 64-bit integers
            "state": self.state,
            "reasons": list(record.reasons),  # why it is unhealthy
            "health": record.extra.get("health", {}),  # readings of its host and GPUs
            "clock_offset_s": self.clock_offset.seconds,  # its host's clock less ours; None: not known yet
            "options": record.extra.get("options", {}),  # those that nodes must agree in
            "version": record.extra.get("version", ""),
            "agent": agent_facts(record.kv_address),
            "rpc_address": record.rpc_address,
            "metrics_url": record.metrics_url,
            "model": record.model,
            "load": {
                "num_running": load.num_running,
                "num_waiting": load.num_waiting,
                "num_queued_tokens": load.num_queued_tokens,
                "num_blocks": load.num_blocks,
                "num_free_blocks": load.free_blocks,
                "own_prefills": len(self.view.queue),
                "own_decodes": len(self._decodes),
                "own_queue_s": self.view.queue.wait_s(now_s),
            },
            "tiers": [
                {
                    "name": "pool",
                    "num_blocks": load.num_blocks,
                    "num_used_blocks": load.num_blocks - load.free_blocks,
                    "num_cached_blocks": load.cached_blocks,
                },
                *(
                    {"name": name, "num_blocks": fill.num_blocks, "num_used_blocks": fill.num_held}
                    for name, fill in record.tiers.items()
                ),
            ],
            "num_placed": self.view.num_placed,
            "breaker_closes_in_s": self.breaker.closes_in_s(now_s),
            "profile": dict(record.profile),
            "links_nbytes_per_s": dict(record.links),
            "prefill_correction": self.view.cost.prefill_correction.factor(now_s),
            "decode_correction": self.view.cost.decode_correction.factor(now_s),
        }

    def _on_step(self, step: node_pb2.StepTokens, num_delivered: int) -> None:
        view, steps = self.view, self._steps
        num_steps = max(step.num_steps, 1)
        batch_size = max(step.num_running, len(step.tokens) // num_steps)
        plain_s = num_steps * view.cost.profile.step_s(batch_size, self._context_tokens)
        now_s = self._clock()
        if step.num_steps and steps.add(plain_s, now_s, num_steps, goes_on=step.num_running > 0):
            predicted_s = steps.plain_s * view.cost.decode_correction.factor(now_s)
            self._cost_model.observe_steps(
                view.cost, plain_s=steps.plain_s, actual_s=steps.actual_s, now_s=now_s
            )
            self.took(predicted_s, steps.actual_s)
        self._context_tokens += num_delivered
        self._others_running = max(step.num_running - len(self._decodes), 0)
        view.num_waiting = step.num_waiting
        view.num_free_blocks = step.num_free_blocks
        self._refresh_decode()

    def _refresh_decode(self) -> None:
        self.view.num_running = len(self._decodes) + self._others_running
        self.view.num_context_tokens = self._context_tokens
        self._on_touched(self)


def _client(
    record: NodeRecord,
    conductor_id: str,
    on_change: Callable[[], None],
    on_step: Callable[[node_pb2.StepTokens, int], None],
) -> NodeClient:
    if record.role != "decode":
        return NodeClient(record.node_id, record.rpc_address, on_change)
    return DecodeClient(
        record.node_id, record.rpc_address, on_change, conductor_id=conductor_id, on_step=on_step
    )
