"""The objects that all handlers of the API use."""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from moonpool.conductor.access.gate import Gate
from moonpool.conductor.api.errors import draining
from moonpool.conductor.api.responses.conversations import Conversations
from moonpool.conductor.api.sampling_defaults import SamplingDefaults
from moonpool.conductor.cells.prefixes import HotPrefixes
from moonpool.conductor.core import Conductor
from moonpool.conductor.observing.recent_requests import RecentRequests
from moonpool.conductor.observing.request_metrics import RequestMetrics
from moonpool.conductor.requests.stream_records import StreamRecords
from moonpool.conductor.text.chat_template import ChatTemplate
from moonpool.conductor.text.tokenizer import Tokenizer
from moonpool.runtime.config.options import ConductorOptions, LogOptions
from moonpool.runtime.structure.grammars import Grammars


def new_id() -> str:
    return secrets.token_hex(12)


@dataclass
class ApiContext:
    """``clock``: monotonic seconds; ``unix_clock``: wall time; ``new_id``: a short random name."""

    conductor: Conductor
    tokenizer: Tokenizer
    template: ChatTemplate | None
    defaults: SamplingDefaults
    metrics: RequestMetrics
    options: ConductorOptions
    log_options: LogOptions = field(default_factory=LogOptions)
    gate: Gate = field(default_factory=Gate.open)
    grammars: Grammars | None = None  # None: answers cannot be made to match a structure
    streams: StreamRecords | None = None  # None: streams cannot be resumed
    workers_page: str = ""  # metrics of all workers behind our port; empty: there are no others
    about: Mapping[str, Any] = field(default_factory=dict)  # from the conductor's start
    recent: RecentRequests = field(default_factory=RecentRequests)
    conversations: Conversations = field(default_factory=Conversations)
    clock: Callable[[], float] = time.perf_counter
    unix_clock: Callable[[], float] = time.time
    new_id: Callable[[], str] = new_id

    def __post_init__(self) -> None:
        self.created_unix_s = int(self.unix_clock())
        self.leaving = False  # /readyz says so; requests are served
        self.draining = False  # requests are refused
        self.handed_over = False  # streams that can go on elsewhere have ended
        self._streams: set[asyncio.Timeout] = set()
        self._in_flight = 0
        self.hot = HotPrefixes(self.clock)  # of requests, for routers of cells
        self.cell_summary = -math.inf, b""  # when it was made: see ``cells.routes``
        self.idle = asyncio.Event()
        self.idle.set()

    @property
    def num_requests(self) -> int:
        """Generation requests in flight at this conductor."""
        return self._in_flight

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Count a generation request, so that draining waits for it.

        Raises:
            ApiError: 503, the conductor is draining.
        """
        if self.draining:
            raise draining()
        self._in_flight += 1
        self.idle.clear()
        try:
            yield
        finally:
            self._in_flight -= 1
            if not self._in_flight:
                self.idle.set()

    @asynccontextmanager
    async def until_handed_over(self) -> AsyncIterator[None]:
        """Run a stream that another conductor can go on with. Raises ``TimeoutError`` once it shall."""
        async with asyncio.timeout(0 if self.handed_over else None) as limit:
            self._streams.add(limit)
            try:
                yield
            finally:
                self._streams.discard(limit)

    def hand_over(self) -> None:
        """End the streams that other conductors can go on with."""
        self.handed_over = True
        now_s = asyncio.get_running_loop().time()
        for limit in list(self._streams):
            if not limit.expired():
                limit.reschedule(now_s)


CONTEXT = web.AppKey("context", ApiContext)
