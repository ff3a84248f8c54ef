"""The latest HTTP requests, for the dashboard and to find timelines by id."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(slots=True)
class RequestRecord:
    """One HTTP request. Seconds; zero until known."""

    id: str  # the answer's
    client_id: str  # x-request-id
    endpoint: str
    stream: bool
    received_unix_s: float
    parse_s: float = 0.0  # body to checked request
    tokenize_s: float = 0.0  # chat template included
    write_s: float = 0.0  # encoding and writing events
    ttft_s: float = 0.0
    e2e_s: float = 0.0
    tpot_s: float = 0.0  # mean over its choices
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    status: str = "running"  # then done, cancelled, or the error's name
    sequences: list[str] = field(default_factory=list)  # the core's request ids, one a choice

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class RecentRequests:
    """The last ``capacity`` records; of equal x-request-ids the latest is found."""

    def __init__(self, capacity: int = 512) -> None:
        self._capacity = capacity
        self._records: OrderedDict[str, RequestRecord] = OrderedDict()
        self._aliases: dict[str, str] = {}

    def add(self, record: RequestRecord) -> None:
        self._records[record.id] = record
        self._aliases[record.client_id] = record.id
        if len(self._records) > self._capacity:
            _, oldest = self._records.popitem(last=False)
            if self._aliases.get(oldest.client_id) == oldest.id:
                del self._aliases[oldest.client_id]

    def find(self, request_id: str) -> RequestRecord | None:
        """By the answer's id or the client's own."""
        return self._records.get(self._aliases.get(request_id, request_id))

    def latest(self, count: int) -> list[RequestRecord]:
        """Newest first."""
        newest = reversed(self._records.values())
        return [record for record, _ in zip(newest, range(count), strict=False)]
