"""The course of a failure: from the fault to the next token, as timelines and counters tell it."""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from moonpool.bench.serve.client.answer import Answer, AnswerInvalid, read_json, read_text
from moonpool.bench.serve.client.http_client import HttpClient, ServerUnreachable
from moonpool.runtime.observing.metrics_server import own_metrics_key
from moonpool.runtime.service.vital import cancel_and_wait

# How often the counters of all processes are read.
READ_EVERY_S = 0.25
# Of one page; a process that is stopped does not keep the others from being read.
_ANSWER_S = 5.0
_COUNTED = re.compile(r'^moonpool_failures_total\{cause="(\w+)",class="(\w+)"\} (\S+)$', re.MULTILINE)
_CONNECTED = re.compile(r"^moonpool_index_(mirror|publisher)_connected (\S+)$", re.MULTILINE)
_REJECTED = "status 429"


class CapacityWatch:
    """Asks ``/v1/cluster`` which nodes take requests. ``missing_s``: node-seconds in which they did not, to
    the interval of the asking: a node is away, not ready, or behind an open breaker."""

    def __init__(self, http: HttpClient) -> None:
        self.missing_s = 0.0
        self._http = http
        self._nodes: set[str] = set()
        self._asked_s = 0.0

    async def read(self) -> None:
        """The nodes of the first call are those that there should be."""
        try:
            async with asyncio.timeout(_ANSWER_S):
                _, state = read_json(await self._http.get("/v1/cluster"))
        except (ServerUnreachable, AnswerInvalid, TimeoutError):
            return
        self.see(state["nodes"], time.monotonic())

    def see(self, nodes: Sequence[Mapping[str, Any]], now_s: float) -> None:
        self._nodes = self._nodes or {node["node_id"] for node in nodes}
        serving = {
            node["node_id"] for node in nodes if node["state"] == "ready" and not node["breaker_closes_in_s"]
        }
        if self._asked_s:
            self.missing_s += len(self._nodes - serving) * (now_s - self._asked_s)
        self._asked_s = now_s

    def forget(self) -> None:
        """What was missing so far is not of the fault."""
        self.missing_s = 0.0


class FailureWatch:
    """Reads ``moonpool_failures_total`` of every process. ``first_s``: when (class, cause) first grew, by
    ``time.time``."""

    def __init__(self, urls: Sequence[str]) -> None:
        self._pages = {url: HttpClient(url, api_key=own_metrics_key()) for url in urls}
        self.reads = [partial(self._read, url) for url in urls]
        self._seen: dict[tuple[str, str, str], float] = {}
        self.first_s: dict[tuple[str, str], float] = {}
        self._has_index: dict[tuple[str, str], bool] = {}  # those that had it once: others never will
        self.without_index_s = 0.0  # when one of them was seen last

    @property
    def has_index(self) -> bool:
        """Whether every process that had Redis before has it now."""
        return all(self._has_index.values())

    async def read(self) -> None:
        """A process that does not answer, or that restarted, has nothing new."""
        await asyncio.gather(*(read() for read in self.reads))

    def forget(self) -> None:
        """What was counted so far is not of the fault."""
        self.first_s.clear()

    async def _read(self, url: str) -> None:
        try:
            async with asyncio.timeout(_ANSWER_S):
                page = read_text(await self._pages[url].get(""))
        except (ServerUnreachable, AnswerInvalid, TimeoutError):
            return
        for cause, failure, text in _COUNTED.findall(page):
            key, value = (url, failure, cause), float(text)
            if value > self._seen.get(key, 0.0):
                self.first_s.setdefault((failure, cause), time.time())
            self._seen[key] = value
        for kind, text in _CONNECTED.findall(page):
            if float(text) or (url, kind) in self._has_index:
                self._has_index[url, kind] = bool(float(text))
                if not float(text):
                    self.without_index_s = time.time()


@asynccontextmanager
async def reading(failures: FailureWatch, capacity: CapacityWatch) -> AsyncIterator[None]:
    """Both read once, then every ``READ_EVERY_S`` during the block, each page for itself."""

    async def again(read: Callable[[], Awaitable[None]]) -> None:
        while True:
            await asyncio.sleep(READ_EVERY_S)
            await read()

    reads: list[Callable[[], Awaitable[None]]] = [capacity.read, *failures.reads]
    await asyncio.gather(*(read() for read in reads))
    tasks = [asyncio.create_task(again(read)) for read in reads]
    try:
        yield
    finally:
        await cancel_and_wait(*tasks)


@dataclass(slots=True)
class Course:
    """What came of one fault. Seconds by request: from the fault (or the request's start, if later) to its
    first failed attempt, from a failed attempt to the next placement, and to the next token."""

    classes: Counter[str] = field(default_factory=Counter)  # of failed attempts, or of counters that grew
    detect_s: list[float] = field(default_factory=list)
    contain_s: list[float] = field(default_factory=list)
    recover_s: list[float] = field(default_factory=list)
    num_failed_attempts: int = 0
    num_recovered: int = 0  # retries that were followed by a token
    recomputed_tokens: int = 0
    missing_s: float = 0.0  # node-seconds without service
    ttft_s: list[float] = field(default_factory=list)
    e2e_s: list[float] = field(default_factory=list)
    lost: int = 0  # requests that ended in an error
    late: int = 0
    rejected: int = 0
    preempted: int = 0
    total: int = 0

    def add(self, timeline: Mapping[str, Any], fault_unix_s: float) -> None:
        """What the timeline of a request says of failures since the fault."""
        first = True
        for event in timeline.get("events", ()):  # none: it was rejected before it was queued
            if event["unix_s"] < fault_unix_s:
                continue
            if event["event"] == "retry" and event["cause"] != "queue":
                self.num_failed_attempts += 1
                self.classes[event["class"]] += 1
                if first:
                    self.detect_s.append(event["unix_s"] - max(fault_unix_s, timeline["started_unix_s"]))
                    first = False
            elif event["event"] == "preempted":
                self.preempted += 1
            elif event["event"] == "recovered":
                self.num_recovered += 1
                self.contain_s.append(event["contain_s"])
                self.recover_s.append(event["recover_s"])
                self.recomputed_tokens += event["recomputed_tokens"]

    def count(self, answers: Sequence[Answer], fault_s: float, late_s: float) -> None:
        """``fault_s``: by ``time.perf_counter``. Requests that ended before it are not of the course."""
        for answer in answers:
            if answer.done_s < fault_s:
                continue
            self.total += 1
            if answer.error.startswith(_REJECTED):
                self.rejected += 1
            elif answer.error:
                self.lost += 1
            else:
                self.e2e_s.append(answer.e2e_s)
                if answer.token_s:
                    self.ttft_s.append(answer.ttft_s)
                self.late += answer.e2e_s > late_s
