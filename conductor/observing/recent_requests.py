"""The latest HTTP requests, for the dashboard and to find timelines by id."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from itertools import islice
from typing import Any

from moonpool.conductor.observing.timelines.timeline import RequestTimeline

_Alias = tuple[str | None, str]


@dataclass(slots=True)
class RequestRecord:
    """One HTTP request. Seconds; zero until known."""

    id: str  # the answer's
    client_id: str  # x-request-id
    endpoint: str
    stream: bool
    received_unix_s: float
    tenant: str = ""  # the name of a configured one
    parse_s: float = 0.0  # body to checked request
    tokenize_s: float = 0.0  # chat template included
    write_s: float = 0.0  # encoding and writing events
    delivered_s: dict[str, float] = field(default_factory=dict)  # by part, in all: see ``Delivery``
    ttft_s: float = 0.0
    e2e_s: float = 0.0
    tpot_s: float = 0.0  # mean over its choices
    prompt_tokens: int = 0
    cached_tokens: int = 0
    prefix_outcome: str = ""  # of the first sequence: see prefix_outcomes.OUTCOMES
    prefix_missed: str = ""  # the same: see prefix_outcomes.MISSED
    cached_from: dict[str, int] = field(default_factory=dict)  # the same, tokens: pool, host, ssd, fetched
    output_tokens: int = 0
    cost: float = 0.0  # of all sequences: their shares of nodes' seconds, at model.price
    status: str = "running"  # then done, cancelled, or the error's name
    sequences: list[str] = field(default_factory=list)  # the core's request ids, one a choice

    def see(self, timeline_of: Callable[[str], RequestTimeline | None]) -> RequestRecord:
        """Take over what is known of its prefix and cost while its timelines are kept; returns itself."""
        if self.sequences and (timeline := timeline_of(self.sequences[0])):
            summary = timeline.summary
            self.prefix_outcome, self.prefix_missed = summary.prefix_outcome, summary.prefix_missed
            self.cached_from = summary.sources()
            known = filter(None, map(timeline_of, self.sequences))
            self.cost = sum(one.summary.cost for one in known)
        return self

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class RecentRequests:
    """The last ``capacity`` records; of equal x-request-ids the latest is found.

    ``tenant``: only its records are found and listed; None: those of all.
    """

    def __init__(self, capacity: int = 512) -> None:
        self._capacity = capacity
        self._records: OrderedDict[str, RequestRecord] = OrderedDict()
        self._aliases: dict[_Alias, str] = {}  # tenant, x-request-id -> the answer's id
        self._aliases_of: dict[str, set[_Alias]] = {}  # the same, by the answer's id

    def add(self, record: RequestRecord) -> None:
        """Again, under another ``client_id``: it is found by both."""
        self._records[record.id] = record
        self._aliases_of.setdefault(record.id, set()).update(_aliases(record))
        for alias in _aliases(record):
            self._aliases[alias] = record.id
        if len(self._records) > self._capacity:
            oldest, _ = self._records.popitem(last=False)
            for alias in self._aliases_of.pop(oldest):
                if self._aliases.get(alias) == oldest:
                    del self._aliases[alias]

    def find(self, request_id: str, tenant: str | None = None) -> RequestRecord | None:
        """By the answer's id or the client's own."""
        record = self._records.get(self._aliases.get((tenant, request_id), request_id))
        return record if record is not None and tenant in (None, record.tenant) else None

    def latest(self, count: int, tenant: str | None = None) -> list[RequestRecord]:
        """Newest first."""
        newest = reversed(self._records.values())
        return list(islice((record for record in newest if tenant in (None, record.tenant)), count))


def _aliases(record: RequestRecord) -> tuple[_Alias, ...]:
    return (record.tenant, record.client_id), (None, record.client_id)
