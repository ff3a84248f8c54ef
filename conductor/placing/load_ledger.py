"""The load of one node: what was placed on it here, and what it reports besides."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable
from typing import Any

from moonpool.conductor.placing.decode_schedule import DecodeSchedule
from moonpool.conductor.placing.node_view import Load, NodeView


class LoadLedger:
    """Keeps ``view`` current while requests begin and end on its node. The simulator uses it too.

    A node's report is up to a heartbeat old and includes the requests placed here. Those are therefore
    counted here as they begin and end; the rest of the report is foreign load.
    """

    def __init__(
        self, view: NodeView, clock: Callable[[], float], on_change: Callable[[NodeView], None]
    ) -> None:
        """``on_change``: called after every change of ``view``."""
        self.view = view
        self.schedule = DecodeSchedule()
        self._clock = clock
        self._on_change = on_change
        self._latest: Hashable = None  # the request placed last
        self._prefills: dict[Hashable, tuple[str, int]] = {}  # tenant, tokens to compute
        self._tenant_tokens: Counter[str] = Counter()  # of those
        self._alone: Hashable = None  # the prefill that has shared no step with another or with decodes
        self._decodes: dict[Hashable, tuple[int, int]] = {}  # tokens at placement, blocks in the end
        self._num_blocks = 0  # of KV in the end, of those
        self._context_tokens = 0
        self._decoding: dict[Hashable, None] = {}  # those in the batch
        self._batch_tokens = 0  # of KV that these attend over
        self._foreign_running = 0
        self._foreign_context_tokens = 0
        self._foreign: Load | None = None  # booked by other conductors; None: there are none

    @property
    def num_decodes(self) -> int:
        return len(self._decodes)

    @property
    def num_requests(self) -> int:
        """Requests placed here that the node still works on."""
        return len(self.view.queue) + len(self._decodes)

    @property
    def booked(self) -> Load:
        """Work placed here that is not done."""
        return Load(self._num_blocks, self.view.queue.wait_s(self._clock()))

    # ------------------------------------------------------------------ requests placed here

    def begin_prefill(
        self,
        key: Hashable,
        compute_s: float,
        patience_s: float,
        tenant: str = "",
        num_tokens: int = 0,
        starts_in_s: float = 0.0,
    ) -> None:
        """``patience_s``: prefills that arrive within this time may overtake it. ``num_tokens``: that it
        computes, for ``tenant``. ``starts_in_s``: predicted."""
        queue, now_s = self.view.queue, self._clock()
        self._alone = None if len(queue) or self._decoding else key
        order_s, ready_s = now_s + patience_s, now_s + starts_in_s
        self.view.cost.prefill_correction.used(now_s)
        if not self.view.cost.knows_prefills:
            ready_s = math.inf  # whatever it takes, it is not overdue
        queue.add(key, order_s=order_s, compute_s=compute_s, now_s=now_s, ready_s=ready_s)
        self._prefills[key] = tenant, num_tokens
        self._tenant_tokens[tenant] += num_tokens
        self._count(key)
        self._on_change(self.view)

    def end_prefill(self, key: Hashable) -> None:
        """Idempotent."""
        if self.view.queue.remove(key, self._clock()):
            tenant, num_tokens = self._prefills.pop(key)
            self._tenant_tokens[tenant] -= num_tokens
            if not self._tenant_tokens[tenant]:
                del self._tenant_tokens[tenant]
            self._on_change(self.view)

    def queued(self) -> dict[str, Any]:
        """Tokens of the prompts placed here that are not computed, and the tenant with most of them, as a
        timeline's fact; empty: there are none."""
        if not self._tenant_tokens:
            return {}
        ((tenant, num_tokens),) = self._tenant_tokens.most_common(1)
        return {"tokens": self._tenant_tokens.total(), "tenant": tenant, "tenant_tokens": num_tokens}

    def prefilled_alone(self, key: Hashable) -> bool:
        """Whether it shared no step with another request of ours, so that its compute time is its own."""
        return key == self._alone

    def begin_decode(
        self,
        key: Hashable,
        num_tokens: int,
        *,
        expected_tokens: int,
        num_blocks: int,
        starts_in_s: float,
        lasts_s: float,
        tbt_s: float = math.inf,
    ) -> None:
        """A request with ``num_tokens`` was placed, to produce ``expected_tokens`` more: ``num_blocks``
        of KV in the end. The times are predictions, but for its SLO, ``tbt_s``.
        """
        now_s = self._clock()
        starts_s = now_s + starts_in_s
        self.view.cost.decode_correction.used(now_s)
        average_tokens = num_tokens + expected_tokens // 2
        ends_s = starts_s + lasts_s
        self.schedule.add(key, starts_s=starts_s, ends_s=ends_s, num_tokens=average_tokens, tbt_s=tbt_s)
        self._decodes[key] = num_tokens, num_blocks
        self._num_blocks += num_blocks
        self._context_tokens += num_tokens
        self._count(key)
        self._refresh()

    def decoding(self, key: Hashable) -> None:
        """The request is in the node's batch. Only the first call for it has an effect."""
        self.schedule.begin(key, self._clock())
        if key in self._decodes and key not in self._decoding:
            self._decoding[key] = None
            self._alone = self._alone if key == self._alone else None
            self._batch_tokens += self._decodes[key][0]

    def end_decode(self, key: Hashable, num_delivered: int) -> None:
        """``num_delivered``: tokens of it that ``on_step`` has counted. Idempotent."""
        self.schedule.remove(key)
        decode = self._decodes.pop(key, None)
        if decode is not None:
            self._num_blocks -= decode[1]
            num_tokens = decode[0] + num_delivered
            self._context_tokens = max(self._context_tokens - num_tokens, 0) if self._decodes else 0
            if key in self._decoding:
                del self._decoding[key]
                self._batch_tokens = max(self._batch_tokens - num_tokens, 0) if self._decoding else 0
            self._refresh()

    # ------------------------------------------------------------------ reports

    def on_step(
        self,
        *,
        num_delivered: int,
        num_waiting: int,
        num_free_blocks: int,
        num_running: int = 0,
        num_context_tokens: int = 0,
    ) -> None:
        """The node's batch has produced ``num_delivered`` tokens for requests placed here.

        ``num_context_tokens``: of KV that all its ``num_running`` sequences attend over.
        """
        self._context_tokens += num_delivered
        self._batch_tokens += num_delivered
        self._see_batch(num_running, num_context_tokens)
        self.view.num_waiting = num_waiting
        self.view.num_free_blocks = num_free_blocks
        self._refresh()

    def on_heartbeat(
        self,
        *,
        num_blocks: int,
        num_free_blocks: int,
        num_waiting: int,
        num_running: int,
        queued_s: float,
        num_context_tokens: int = 0,
    ) -> None:
        """A heartbeat reported this of all requests; ``queued_s``: of prefills that wait."""
        view = self.view
        view.num_blocks, view.num_free_blocks, view.num_waiting = num_blocks, num_free_blocks, num_waiting
        if self._foreign is None:
            view.foreign_queue_s = max(queued_s - view.queue.wait_s(self._clock()), 0.0)
        self._see_batch(num_running, num_context_tokens)
        self._refresh()

    def book_foreign(self, load: Load | None) -> None:
        """Work that other conductors placed on the node; None: there are none, and heartbeats tell."""
        if load == self._foreign:
            return
        self._foreign = load
        if load is not None:
            self.view.foreign_queue_s = load.prefill_s
        self._on_change(self.view)

    def _count(self, key: Hashable) -> None:
        # A node of both roles gets both stages of a request, one after the other.
        self.view.num_placed += key != self._latest
        self._latest = key

    def _see_batch(self, num_running: int, num_context_tokens: int) -> None:
        self._foreign_running = max(num_running - len(self._decodes), 0)
        self._foreign_context_tokens = max(num_context_tokens - self._batch_tokens, 0)

    def _refresh(self) -> None:
        self.view.num_running = len(self._decodes) + self._foreign_running
        self.view.num_context_tokens = self._context_tokens + self._foreign_context_tokens
        self.view.num_decoding = len(self._decoding) + self._foreign_running
        self.view.num_batch_tokens = self._batch_tokens + self._foreign_context_tokens
        self._on_change(self.view)
