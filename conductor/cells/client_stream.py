"""A stream as a router's client gets it: from one cell, and then from others if its cell is lost."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any, Final

import aiohttp
import orjson
from aiohttp import web
from multidict import CIMultiDict

from moonpool.conductor.api.answer import DONE
from moonpool.conductor.api.responses.answer import ENDS
from moonpool.conductor.api.streams.carried import AT, PAST, PAST_HEADER
from moonpool.conductor.api.streams.resume import HANDED_OVER
from moonpool.conductor.api.streams.stream_writer import StreamWriter

log = logging.getLogger(__name__)

_CARRYING: Final = ("/v1/completions", "/v1/chat/completions", "/v1/responses")
_MOST_NBYTES: Final = 4 << 20
"""Of a past that is kept: more tokens than any stream may have, and half of the largest body."""
_ERROR: Final = b'data: {"error"'
_LAST: Final = (DONE.rstrip(), _ERROR, *ENDS)
_UNAVAILABLE: Final = b'"type":"service_unavailable_error"'  # such as ``no_nodes``
_END: Final = b"\n\n"


class ClientStream:
    """The client's side of one request. A stream of a cell that carries its past can go on in another one."""

    def __init__(self, http: web.Request, body: Mapping[str, Any], write_timeout_s: float) -> None:
        self._http = http
        self._body = body
        self._write_timeout_s = write_timeout_s
        self._response: web.StreamResponse | None = None
        options = body.get("stream_options")
        # Its client goes on with it by itself.
        self.resumable = isinstance(options, dict) and options.get("resumable") is True
        self.can_carry = body.get("stream") is True and http.path in _CARRYING and not self.resumable
        self._carries = False  # the stream that comes now
        self._name = b""  # of the past that is kept
        self._at = ""
        self._entries: list[str] = []
        self._num_kept = 0  # bytes of them
        self._partial = self._held = b""
        self._ended = False

    @property
    def response(self) -> web.StreamResponse | None:
        """That of the client, with headers sent; None: nothing was sent."""
        return self._response

    @property
    def can_go_on(self) -> bool:
        """Whether another cell can go on after what was sent."""
        return self._carries and self._num_kept <= _MOST_NBYTES

    def body(self, raw: bytes) -> bytes:
        """What to send to a cell: ``raw``, until something has come of the stream."""
        if self._response is None or not self._at:
            return raw
        past = {"name": self._name.decode(), "at": self._at, "entries": self._entries}
        return orjson.dumps({**self._body, "past": past})

    async def pass_on(self, answer: aiohttp.ClientResponse, chunk: bytes, headers: CIMultiDict[str]) -> str:
        """Pass the events of ``answer`` on, from ``chunk`` on. Returns why it broke; empty: it has ended.

        Raises ``ConnectionError``: the client is gone, or does not read.
        """
        carries = headers.pop(PAST_HEADER, "") == "1"
        if self._response is not None and not carries:
            return "it does not go on with streams of other cells"
        if self._response is None:
            self._carries = carries
            self._response = web.StreamResponse(status=answer.status, headers=headers)
            await self._response.prepare(self._http)
        self._partial = self._held = b""
        response, clock = self._response, asyncio.get_running_loop().time
        with StreamWriter(self._http, response, self._write_timeout_s, clock) as writer:
            while chunk:
                if passed := self._taken(chunk) if self._carries else chunk:
                    await writer.write(passed)
                try:
                    chunk = await answer.content.readany()
                except (aiohttp.ClientError, OSError) as error:
                    return str(error) or type(error).__name__
        return "" if self._ended or not self._carries else "it ended early"

    async def close(self, last: bytes = b"") -> web.StreamResponse:
        """Write the end."""
        assert self._response is not None
        if last:
            await self._response.write(last)
        await self._response.write_eof()
        return self._response

    def break_off(self, error: bytes) -> bytes:
        """The end of a stream that no other cell goes on with. Its client may."""
        return HANDED_OVER if self.resumable else b"data: " + error + _END

    def _taken(self, chunk: bytes) -> bytes:
        """Keep the past, and return whole events without it.

        What stands between two events with a place is passed on with the second one: a stream that goes on
        begins after the first.
        """
        *blocks, self._partial = (self._partial + chunk).split(_END)
        passed = b""
        for block in blocks:
            if block.startswith(AT):
                passed += self._held + self._kept(block) + _END
                self._held = b""
            elif block.startswith(_LAST) and not (block.startswith(_ERROR) and _UNAVAILABLE in block):
                passed, self._held, self._ended = passed + self._held + block + _END, b"", True
            elif block.startswith(b":"):
                passed += block + _END  # a comment alone: it waits
            elif not block.startswith((b"retry:", *_LAST)):  # else the cell cannot go on, and ends the stream
                self._held += block + _END
        return passed

    def _kept(self, block: bytes) -> bytes:
        """Keep the past of an event. Returns the event."""
        at, _, event = block.partition(b"\n")
        self._at = at.removeprefix(AT).decode()
        if event.startswith(PAST):
            line, _, event = event.partition(b"\n")
            name, _, entry = line.removeprefix(PAST).partition(b" ")
            if name != self._name:
                self._name, self._entries, self._num_kept = name, [], 0
            self._num_kept += len(entry)
            if self.can_go_on:
                self._entries.append(entry.decode())
        return event
