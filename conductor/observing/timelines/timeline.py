"""The timeline of a request: its events with their times."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from moonpool.conductor.observing.timelines.crowding import seen
from moonpool.conductor.observing.timelines.delivery import Delivery

# Facts of the event "placed" that are not of the placement.
_NOT_OF_PLACEMENT = ("queued", "delivered_s")


@dataclass(frozen=True, slots=True)
class TimelineEvent:
    """``name``: queued, waits_for_node, placed, prefix_loaded, prefilled, first_token, transferred,
    preempted, migrated, stayed (a migration failed), retry, recovered (the next token after a retry) or done.
    """

    name: str
    unix_s: float  # wall time at admission plus monotonic seconds since, so order and gaps are true
    facts: Mapping[str, Any]


@dataclass(slots=True)
class RequestSummary:
    """The main figures of a request, of its latest placement. Zero or empty until known."""

    prefill_node: str = ""
    decode_node: str = ""
    path: str = ""  # split, whole, rest or prefill: see placement.Path
    reason: str = ""  # of the placement, one word: see place.Reason
    detail: str = ""  # the same as a sentence
    prompt_tokens: int = 0
    output_tokens: int = 0
    prefix_outcome: str = ""  # at the first placement: see prefix_outcomes.OUTCOMES
    prefix_missed: str = ""  # of a hit, why it reached no further: see prefix_outcomes.MISSED
    cached_tokens: int = 0  # prompt tokens not computed: the sum of the four below
    pool_tokens: int = 0
    host_tokens: int = 0
    ssd_tokens: int = 0
    fetched_tokens: int = 0  # read from a peer
    transferred_nbytes: int = 0  # prefill node -> decode node
    transfer_s: float = 0.0  # spent reading
    transport: str = ""
    attempts: int = 0
    ttft_s: float = 0.0
    tpot_s: float = 0.0  # mean seconds between tokens after the first
    tokens_per_step: float = 0.0  # after the first token, where speculation was of use
    e2e_s: float = 0.0
    node_s: float = 0.0  # its shares of the nodes' steps
    wasted_s: float = 0.0  # of these: see ``accounts.spent``
    cost: float = 0.0  # of ``node_s``, in the currency of model.price
    finish_reason: str = ""  # stop, length, cancelled, or the error's name

    def sources(self) -> dict[str, int]:
        """The cached tokens by where they were, without zeros."""
        tokens = {name: getattr(self, f"{name}_tokens") for name in ("pool", "host", "ssd", "fetched")}
        return {name: count for name, count in tokens.items() if count}


@dataclass(slots=True)
class RequestTimeline:
    """The events of one request in order."""

    request_id: str
    started_unix_s: float
    started_s: float  # the conductor's monotonic clock at admission
    tenant: str = ""  # the name of a configured one
    first_attempt: int = 0  # number of its first attempt in messages to nodes
    summary: RequestSummary = field(default_factory=RequestSummary)
    events: list[TimelineEvent] = field(default_factory=list)
    delivery: Delivery = field(default_factory=Delivery)

    def add(self, name: str, now_s: float, /, **facts: Any) -> None:
        """Append an event that happened at ``now_s`` of the monotonic clock.

        One that is told after the end, as a move may be by the task that asked for it, was before it.
        """
        at_unix_s = self.started_unix_s + now_s - self.started_s
        has_ended = bool(self.events) and self.events[-1].name == "done"
        if has_ended:
            at_unix_s = min(at_unix_s, self.events[-1].unix_s)
        event = TimelineEvent(name, at_unix_s, facts | self.delivery.take())
        self.events.insert(len(self.events) - has_ended, event)

    def placements(self) -> dict[str, Any]:
        """The placement of each attempt and its reason, and what came of the prefix: plain JSON types.
        Nothing of other requests: it goes to the request's client."""
        placed = [event for event in self.events if event.name == "placed"]
        return {
            "request_id": self.request_id,
            "prefix": {
                "outcome": self.summary.prefix_outcome,
                "missed": self.summary.prefix_missed,
                "prompt_tokens": self.summary.prompt_tokens,
                "cached_tokens": self.summary.cached_tokens,
                "cached_from": self.summary.sources(),
            },
            "placements": [
                {"at_s": event.unix_s - self.started_unix_s}
                | {
                    name: _plain(value)
                    for name, value in event.facts.items()
                    if name not in _NOT_OF_PLACEMENT
                }
                for event in placed
            ],
        }

    def times(self) -> dict[str, Any]:
        """What ``parts_of`` needs of ``to_dict``; of placements the nodes alone, so it takes little time."""
        return {
            "events": [
                {"event": event.name, "at_s": event.unix_s - self.started_unix_s}
                | {
                    name: value.nodes() if name == "placement" else value
                    for name, value in event.facts.items()
                }
                for event in self.events
            ]
        }

    def to_dict(self, scope: str | None = None) -> dict[str, Any]:
        """For ``GET /v1/requests/{id}/timeline``: plain JSON types only. ``scope``: of the viewer, see
        ``Principal``."""
        summary = {name: getattr(self.summary, name) for name in RequestSummary.__slots__}
        return {
            "request_id": self.request_id,
            "started_unix_s": self.started_unix_s,
            "summary": summary,
            "events": [
                {"event": event.name, "unix_s": event.unix_s, "at_s": event.unix_s - self.started_unix_s}
                | {
                    name: seen(value, scope) if name == "queued" else _plain(value)
                    for name, value in event.facts.items()
                }
                for event in self.events
            ],
        }


def _plain(value: Any) -> Any:
    """A placement is converted to JSON types only when a timeline is read."""
    return value.to_dict() if hasattr(value, "to_dict") else value


class TimelineRing:
    """The latest ``capacity`` timelines by request id."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._timelines: OrderedDict[str, RequestTimeline] = OrderedDict()

    def put(self, timeline: RequestTimeline) -> None:
        self._timelines[timeline.request_id] = timeline
        self._timelines.move_to_end(timeline.request_id)
        if len(self._timelines) > self._capacity:
            self._timelines.popitem(last=False)

    def get(self, request_id: str) -> RequestTimeline | None:
        return self._timelines.get(request_id)
