"""What a raw answer says: its events with their times, tokens, usage, or its error."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import orjson

from moonpool.bench.serve.client.http_client import Exchange
from moonpool.runtime.errors import MoonpoolError


class AnswerInvalid(MoonpoolError):
    """The server answered something that is not HTTP, or not JSON where it should be."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Times are ``time.perf_counter`` seconds; ``token_s`` has one for each event that brought output."""

    sent_s: float
    done_s: float
    token_s: tuple[float, ...] = ()
    output_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    token_ids: tuple[int, ...] = ()  # empty where the server does not say
    text: str = ""
    id: str = ""
    finish_reason: str = ""
    error: str = ""  # empty: it worked

    @property
    def ttft_s(self) -> float:
        return self.token_s[0] - self.sent_s

    @property
    def e2e_s(self) -> float:
        return self.done_s - self.sent_s

    @property
    def tpot_s(self) -> float:
        """Mean seconds between tokens after the first; 0 for a single token."""
        return (
            (self.token_s[-1] - self.token_s[0]) / (self.output_tokens - 1) if self.output_tokens > 1 else 0.0
        )


def read_json(exchange: Exchange) -> tuple[int, Any]:
    """Status and parsed body of an answer that is not streamed."""
    status, body, _ = _decode(exchange)
    try:
        return status, orjson.loads(bytes(body))
    except orjson.JSONDecodeError as error:
        raise AnswerInvalid(f"status {status}, and no JSON: {bytes(body[:200])!r}") from error


def read_text(exchange: Exchange) -> str:
    """The body of an answer that is not streamed, whatever its status."""
    return _decode(exchange)[1].decode(errors="replace")


def read_answer(exchange: Exchange) -> Answer:
    """A streamed completion or chat completion.

    Raises:
        AnswerInvalid: neither a stream of events nor an error object.
    """
    status, body, arrivals = _decode(exchange)
    if status != 200:
        return Answer(exchange.sent_s, exchange.done_s, error=f"status {status}: {_error_text(bytes(body))}")
    reader = _Reader()
    ends, times = arrivals
    position = 0
    separator = b"\r\n\r\n" if b"\r\n\r\n" in body else b"\n\n"
    for block in bytes(body).split(separator):
        position += len(block) + len(separator)
        if block.startswith(b"data: ") and block != b"data: [DONE]":
            arrived = times[min(bisect_left(ends, position), len(times) - 1)]
            reader.read(block[6:], arrived)
    return reader.answer(exchange)


class _Reader:
    """Gathers the events of one stream."""

    def __init__(self) -> None:
        self._token_s: list[float] = []
        self._token_ids: list[int] = []
        self._texts: list[str] = []
        self._usage: dict[str, Any] = {}
        self._id = self._finish = self._error = ""

    def read(self, data: bytes, arrived_s: float) -> None:
        try:
            event = orjson.loads(data)
        except orjson.JSONDecodeError as error:
            raise AnswerInvalid(f"an event that is no JSON: {data[:200]!r}") from error
        if "error" in event:
            self._error = str(event["error"].get("message", event["error"]))
            return
        self._id = self._id or event.get("id", "")
        self._usage = event.get("usage") or self._usage
        for choice in event.get("choices", ()):
            text = choice.get("text") or (choice.get("delta") or {}).get("content") or ""
            ids = choice.get("token_ids") or ()
            if text or ids:
                self._token_s.append(arrived_s)
                self._texts.append(text)
                self._token_ids += ids
            self._finish = choice.get("finish_reason") or self._finish

    def answer(self, exchange: Exchange) -> Answer:
        details = self._usage.get("prompt_tokens_details") or {}
        error = self._error or ("" if self._token_s else "no tokens")
        return Answer(
            exchange.sent_s,
            exchange.done_s,
            tuple(self._token_s),
            self._usage.get("completion_tokens", len(self._token_ids) or len(self._token_s)),
            self._usage.get("prompt_tokens", 0),
            details.get("cached_tokens") or 0,
            tuple(self._token_ids),
            "".join(self._texts),
            self._id,
            self._finish,
            error,
        )


def _decode(exchange: Exchange) -> tuple[int, bytearray, tuple[list[int], list[float]]]:
    """Status, body, and (ends of the packets in body bytes, their times): chunk frames taken off."""
    raw = b"".join(data for _, data in exchange.packets)
    head, separator, _ = raw.partition(b"\r\n\r\n")
    if not separator or not head.startswith(b"HTTP/1."):
        raise AnswerInvalid(f"not HTTP: {raw[:200]!r}")
    status = int(head.split(b" ", 2)[1])
    start = len(head) + 4
    raw_ends = list(accumulate(len(data) for _, data in exchange.packets))
    times = [arrived for arrived, _ in exchange.packets]
    if b"transfer-encoding: chunked" not in head.lower():
        return status, bytearray(raw[start:]), ([end - start for end in raw_ends], times)
    body = bytearray()
    ends: list[int] = []
    chunk_times: list[float] = []
    while (line_end := raw.find(b"\r\n", start)) >= 0:
        length = int(raw[start:line_end].split(b";")[0] or b"0", 16)
        if length == 0:
            break
        chunk = line_end + 2
        body += raw[chunk : chunk + length]
        ends.append(len(body))
        chunk_times.append(times[min(bisect_left(raw_ends, chunk + length), len(times) - 1)])
        start = chunk + length + 2
    return status, body, (ends or [0], chunk_times or times[-1:])


def _error_text(body: bytes) -> str:
    try:
        content = orjson.loads(body)
    except orjson.JSONDecodeError:
        return body[:200].decode(errors="replace")
    error = content.get("error", content) if isinstance(content, dict) else content
    return str(error.get("message", error) if isinstance(error, dict) else error)
