"""An answer as server-sent events."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

from aiohttp import web

from moonpool.conductor.api.answer import Answer
from moonpool.conductor.api.choice import Delta
from moonpool.conductor.api.context import ApiContext
from moonpool.conductor.api.errors import as_api_error, draining, name_of
from moonpool.conductor.api.sequence_runs import SequenceRun, Sink
from moonpool.conductor.api.streams.heartbeats import Heartbeats
from moonpool.conductor.api.streams.resume import HANDED_OVER, Resumable
from moonpool.conductor.api.streams.stream_writer import StreamWriter
from moonpool.conductor.observing.recent_requests import RequestRecord

log = logging.getLogger(__name__)

_END = b"\n\n"  # of an event

SSE_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # proxies must not buffer tokens
}


def new_stream() -> web.StreamResponse:
    """A response for server-sent events."""
    return web.StreamResponse(headers=SSE_HEADERS)


def error_event(error: Exception) -> bytes:
    """The end of a stream that broke."""
    return b"data: " + as_api_error(error).body() + b"\n\n"


class EventStream:
    """Headers are sent with the first token: until then an error still has its own status."""

    def __init__(
        self,
        http: web.Request,
        context: ApiContext,
        answer: Answer,
        record: RequestRecord,
        resumable: Resumable | None,
        beats: Heartbeats | None = None,
    ) -> None:
        """``beats``: comments until the first token, on the response that the stream goes on with."""
        self._http = http
        self._context = context
        self._answer = answer
        self._record = record
        self._resumable = resumable
        self._opened = set[int]() if resumable is None else resumable.opened
        self._beats = beats
        self._response = new_stream() if beats is None else beats.response
        if resumable is not None:
            resumable.announce(self._response)
        self._writer = StreamWriter(http, self._response, context.options.write_timeout_s, context.clock)

    async def run(
        self, generate: Callable[[Sink], Awaitable[None]], end: Callable[[], Awaitable[bytes]]
    ) -> web.StreamResponse:
        """Write what ``generate`` gives to its sink, and then ``end``."""
        response, record = self._response, self._record
        try:
            with self._writer:
                try:
                    async with self._handover():
                        await generate(self._sink)
                        await self._only_writer()
                        if not response.prepared:
                            await response.prepare(self._http)  # the client had all but the end
                    last = await end()
                except Exception as error:
                    await self._only_writer()
                    if isinstance(error, ConnectionError) or not response.prepared:
                        raise
                    record.status = name_of(error)
                    last = error_event(error)
                    if isinstance(error, _HandedOver):
                        last = HANDED_OVER
                await self._writer.write(last)
                await response.write_eof()
        except ConnectionError:
            # The client has closed the connection; the core was cancelled.
            log.debug("%s: the connection was closed", record.id)
        except _HandedOver:
            raise draining() from None
        finally:
            if self._resumable is not None:
                self._resumable.record.end()
            if self._writer.stalled:
                record.status = "client_stalled"
        return response

    async def _sink(self, run: SequenceRun, delta: Delta) -> None:
        clock = self._context.clock
        started_s = clock()
        if self._resumable is not None:
            new = self._resumable.advance(run, delta)
            if new is not delta:
                # What the client has already counts for the end of the answer.
                self._answer.passed(run.choice, delta if new is None else replace(delta, finish_reason=None))
            if new is None:
                return
            delta = new
        events = self._answer.chunk(run.choice, delta)
        if run.choice.index not in self._opened:
            self._opened.add(run.choice.index)
            events = self._answer.opening(run.choice.index) + events
        await self._only_writer()
        if not self._response.prepared:
            await self._response.prepare(self._http)
        if events:
            if self._resumable is not None:
                # The id belongs to the last event, and is made when nothing comes between it and the write.
                before, end, last = events[: -len(_END)].rpartition(_END)
                events = before + end + self._resumable.id_line(run) + last + _END
            await self._writer.write(events)
        self._record.write_s += clock() - started_s

    async def _only_writer(self) -> None:
        if self._beats is not None:
            await self._beats.stop()

    @asynccontextmanager
    async def _handover(self) -> AsyncIterator[None]:
        """Raises ``_HandedOver`` once this conductor ends and another one can go on with the stream."""
        if self._resumable is None:
            yield
            return
        try:
            async with self._context.until_handed_over():
                yield
        except TimeoutError:
            if not self._context.handed_over:
                raise
            await self._resumable.hand_over()
            raise _HandedOver from None


class _HandedOver(Exception):
    """Another conductor goes on with the stream."""
