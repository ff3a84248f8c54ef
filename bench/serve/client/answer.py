"""Parse raw answers: events with their times, tokens, usage, or the error."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import orjson

from moonpool.bench.serve.client.http_client import Exchange
from moonpool.runtime.errors import MoonpoolError
from moonpool.runtime.failures import FailureClass


class AnswerInvalid(MoonpoolError):
    """The answer is not HTTP, its content is not JSON, or its status is not the one that is needed."""

    failure = FailureClass.CONDUCTOR


@dataclass(frozen=True, slots=True)
class Answer:
    """Times are ``time.perf_counter`` seconds; ``token_s`` has one for each event that brought output."""

    sent_s: float
    done_s: float
    token_s: tuple[float, ...] = ()
    output_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    token_ids: tuple[int, ...] = ()  # empty if the server does not send them
    text: str = ""
    id: str = ""
    finish_reason: str = ""
    error: str = ""  # empty: none

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
        raise AnswerInvalid(f"status {status}, and not JSON: {bytes(body[:200])!r}") from error


def status_of(exchange: Exchange) -> int:
    """The HTTP status; the body does not matter."""
    return _decode(exchange)[0]


def read_text(exchange: Exchange) -> str:
    """The body of an answer that is not streamed. Raises ``AnswerInvalid``: its status is not 200."""
    status, body, _ = _decode(exchange)
    if status != 200:
        raise AnswerInvalid(f"status {status}: {_error_text(bytes(body))}")
    return body.decode(errors="replace")


def read_answer(exchange: Exchange) -> Answer:
    """A streamed completion or chat completion.

    Raises:
        AnswerInvalid: neither a stream of events nor an error object.
    """
    status, body, arrivals = _decode(exchange)
    if status != 200:
        return Answer(exchange.sent_s, exchange.done_s, error=f"status {status}: {_error_text(bytes(body))}")
    ends, times = arrivals
    events: list[tuple[float, dict[str, Any]]] = []
    position = 0
    separator = b"\r\n\r\n" if b"\r\n\r\n" in body else b"\n\n"
    for block in bytes(body).split(separator):
        position += len(block) + len(separator)
        if block.startswith(b"data: ") and block != b"data: [DONE]":
            arrived_s = times[min(bisect_left(ends, position), len(times) - 1)]
            events.append((arrived_s, _event(block[6:])))
    return _answer(exchange, events)


def _event(data: bytes) -> dict[str, Any]:
    try:
        event: dict[str, Any] = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise AnswerInvalid(f"an event that is not JSON: {data[:200]!r}") from error
    return event


def _answer(exchange: Exchange, events: list[tuple[float, dict[str, Any]]]) -> Answer:
    token_s: list[float] = []
    token_ids: list[int] = []
    texts: list[str] = []
    usage: dict[str, Any] = {}
    answer_id = finish = error = ""
    for arrived_s, event in events:
        if "error" in event:
            error = _error_of(event)
            continue
        answer_id = answer_id or event.get("id", "")
        usage = event.get("usage") or usage
        for choice in event.get("choices", ()):
            text = choice.get("text") or (choice.get("delta") or {}).get("content") or ""
            ids = choice.get("token_ids") or ()
            if text or ids:
                token_s.append(arrived_s)
                texts.append(text)
                token_ids += ids
            finish = choice.get("finish_reason") or finish
    return Answer(
        exchange.sent_s,
        exchange.done_s,
        tuple(token_s),
        usage.get("completion_tokens", len(token_ids) or len(token_s)),
        usage.get("prompt_tokens", 0),
        (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0,
        tuple(token_ids),
        "".join(texts),
        answer_id,
        finish,
        error or ("" if token_s else "no tokens"),
    )


def _decode(exchange: Exchange) -> tuple[int, bytearray, tuple[list[int], list[float]]]:
    """Status, body without chunk frames, and (ends of the packets in body bytes, their times)."""
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
    return _error_of(content)


def _error_of(content: Any) -> str:
    """Its ``error``: an object with a message, or a text, as some servers have it."""
    error = content.get("error", content) if isinstance(content, dict) else content
    return str(error.get("message", error) if isinstance(error, dict) else error)
