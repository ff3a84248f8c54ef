"""Streams that go on after their connection broke, at any conductor: ids of events, and what came before.

A client that asks for ``stream_options.resumable`` gets an ``id`` with each event, and sends the same request
with the latest one as ``Last-Event-ID`` to go on. An id has the stream's token and, for each choice, how many
tokens went before, a check of them, and whether it has ended: ``TOKEN:12-5e1f20ab,9-0c44b1d7-end``.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any, NamedTuple
from zlib import crc32

import orjson
from aiohttp import web

from moonpool.conductor.api.choice import Delta
from moonpool.conductor.api.context import ApiContext
from moonpool.conductor.api.errors import ApiError, bad_request, unavailable
from moonpool.conductor.api.schemas import CarriedPast, GenerationBody, parse
from moonpool.conductor.api.sequence_runs import SequenceRun
from moonpool.conductor.api.streams.carried import PAST_HEADER, CarriedRecord, earlier_messages, read_past
from moonpool.conductor.errors import StreamForged, StreamGone
from moonpool.conductor.requests.conversation_records import Messages
from moonpool.conductor.requests.stream_records import (
    TOKEN_CHARS,
    StreamHead,
    StreamPast,
    StreamRecord,
    StreamRecords,
)
from moonpool.kvstore.errors import IndexUnavailable

LAST_EVENT_ID = "Last-Event-ID"
MAX_CHOICES = 16
"""Of a stream that can be resumed: each id has a part for each."""
RETRY_MS = 100
HANDED_OVER = b"retry: %d\n: this conductor ends: send the request again with Last-Event-ID\n\n" % RETRY_MS
"""The end of a stream that another conductor shall go on with."""
_TOKEN = re.compile(rf"[\w-]{{{TOKEN_CHARS}}}", re.A)
_POSITIONS = re.compile(rf"(?:\d{{1,7}}-[0-9a-f]{{8}}(?:-end)?,?){{1,{MAX_CHOICES}}}", re.A)


class Position(NamedTuple):
    """How much of a choice was sent. ``check``: CRC32 of its token ids."""

    num_tokens: int = 0
    check: int = 0
    ended: bool = False

    def __str__(self) -> str:
        return f"{self.num_tokens}-{self.check:08x}{'-end' if self.ended else ''}"

    def after(self, delta: Delta) -> Position:
        check = self.check
        for token_id in delta.token_ids:
            check = crc32(token_id.to_bytes(4, "little"), check)
        return Position(self.num_tokens + len(delta.token_ids), check, delta.finish_reason is not None)


@dataclass(slots=True)
class Resumable:
    """One stream, by choice: what its client had, what it gets, and what of that is written."""

    head: StreamHead
    record: StreamRecord
    seen: tuple[Position, ...]
    positions: list[Position]
    sent: list[Position]
    _records: StreamRecords | None  # None: the stream carries its past
    carried: CarriedRecord | None = None

    @property
    def opened(self) -> set[int]:
        """Choices that have begun for the client."""
        return {index for index, position in enumerate(self.seen) if position.num_tokens or position.ended}

    def announce(self, response: web.StreamResponse) -> None:
        """Say that the stream carries its past, unless the headers of ``response`` have been sent."""
        if self.carried is not None and not response.prepared:
            response.headers[PAST_HEADER] = "1"

    def advance(self, run: SequenceRun, delta: Delta) -> Delta | None:
        """Note an addition. Returns what of it the client does not have; None: it has all.

        Raises ``ApiError``: the tokens computed anew are others than those it has.
        """
        index = run.choice.index
        seen, position = self.seen[index], self.positions[index].after(delta)
        self.positions[index] = position
        if delta.finish_reason is None:
            for token_id in delta.token_ids:
                self.record.add(index, token_id, run.choice.num_cached_tokens)
        differs = position.num_tokens == seen.num_tokens and position.check != seen.check
        if differs or (position.ended and position.num_tokens < seen.num_tokens):
            raise ApiError(
                409,
                "the tokens of this stream came out differently this time: send the request anew, without "
                f"{LAST_EVENT_ID}",
                code="stream_differs",
            )
        if position.num_tokens > seen.num_tokens or (position.num_tokens == seen.num_tokens == 0):
            return delta
        if position.ended and not seen.ended and position.num_tokens == seen.num_tokens:
            if not delta.token_ids:
                return delta  # it may have text that was held back
            return Delta(finish_reason=delta.finish_reason, stop_reason=delta.stop_reason)
        return None

    def id_line(self, run: SequenceRun) -> bytes:
        """The id of an event of ``run`` that is written now."""
        index = run.choice.index
        self.sent[index] = self.positions[index]
        at = ",".join(map(str, self.sent))
        return f"id: {self.record.token}:{at}\n".encode() if self.carried is None else self.carried.lines(at)

    async def hand_over(self) -> None:
        """Have all that was sent recorded. Without Redis, what is missing is computed again."""
        self.record.end()
        if self._records is not None:
            with suppress(IndexUnavailable):
                await self._records.flush()


async def resumable(
    http: web.Request,
    context: ApiContext,
    answer_id: str,
    body: GenerationBody,
    runs: Sequence[SequenceRun],
    earlier: Messages | None = None,
    *,
    repeats_text: bool = False,
) -> Resumable | None:
    """Prepare the runs of a stream: new ones, or for what is left of the one in ``Last-Event-ID``.

    ``earlier``: messages that are not in the request itself. ``repeats_text``: the stream's end has all text:
    choices of which only the end is missing run again. None: it was not asked for, or has too many choices.
    Raises ``ApiError``: 400, 403, 404, 409, 410, 503.
    """
    given, records = http.headers.get(LAST_EVENT_ID), context.streams
    carries = PAST_HEADER in http.headers and not body.resumable
    if len(runs) > MAX_CHOICES or not (carries or (body.resumable and records is not None)):
        if given is not None or body.past is not None:
            field = "past" if given is None else LAST_EVENT_ID
            raise bad_request(f"{field}: this request is of no stream that can go on", field)
        return None
    digest = _digest(http.path, body, runs, context.conductor.model.name)
    goes_on = body.past is not None if carries else given is not None
    if not goes_on:
        seeds = tuple(
            secrets.randbits(64) if run.request.sampling.seed is None else run.request.sampling.seed
            for run in runs
        )
        tenant, now_s = runs[0].request.client.name, context.unix_clock()
        head = StreamHead(answer_id, int(now_s), tenant, digest, seeds, now_s)
        past, seen = StreamPast(head, ((),) * len(runs), (0,) * len(runs)), (Position(),) * len(runs)
    else:
        if carries and body.past is not None:
            seen = _positions(body.past.at, len(runs))
            with _genuine():
                past = read_past(body.past)
        else:
            assert records is not None
            token, seen = _parsed(given or "", len(runs))
            past = await _past(records, token)
        head = past.head
        if head.tenant != runs[0].request.client.name:
            raise ApiError(
                404, "no stream of yours has this id", param=LAST_EVENT_ID, code="stream_not_found"
            )
        if head.digest != digest:
            raise _refused(
                409,
                f"this is another request than the one that the stream in {LAST_EVENT_ID} began with",
                "other_request",
            )
    ran_s = context.unix_clock() - head.began_unix_s if goes_on else 0.0
    for run, seen_of_it, seed, tokens, cached in zip(
        runs, seen, head.seeds, past.tokens, past.cached, strict=True
    ):
        run.ended = seen_of_it.ended and not repeats_text
        _prepare(run, seed, seen_of_it, tokens, cached, ran_s)
        if goes_on:
            # It was admitted before: it waits for room instead of being rejected.
            run.request, run.leader = replace(run.request, follows=True), None
    positions = [one if run.ended else Position() for one, run in zip(seen, runs, strict=True)]
    if carries:
        carried = CarriedRecord(head, earlier)
        return Resumable(head, carried.record, seen, positions, list(seen), None, carried)
    assert records is not None
    return Resumable(head, records.begin(head), seen, positions, list(seen), records)


def _prepare(
    run: SequenceRun, seed: int, seen: Position, tokens: tuple[int, ...], cached: int, ran_s: float
) -> None:
    request = run.request
    if request.sampling.num_logprobs >= 0:
        # Those of tokens that the client does not have are computed again.
        tokens = tokens[: seen.num_tokens]
    deadline_s = request.deadline_s
    run.request = replace(
        request,
        sampling=replace(request.sampling, seed=seed),
        deadline_s=None if deadline_s is None else max(deadline_s - ran_s, 0.0),
        output_ids=tokens,
    )
    if cached and (tokens or run.ended):  # else its first token tells
        run.choice.num_cached_tokens = cached
    if run.ended:
        run.choice.num_tokens = seen.num_tokens


def carried_messages(past: Any, tenant: str) -> Messages | None:
    """What ``resumable`` got as ``earlier`` when another cluster began the stream; None: it got nothing.

    ``past``: of a request, not validated yet. Raises ``ApiError``: 400, 403.
    """
    if not isinstance(past, dict):
        return None
    with _genuine():
        return earlier_messages(parse(CarriedPast, past), tenant)


@contextmanager
def _genuine() -> Iterator[None]:
    try:
        yield
    except (StreamForged, StreamGone) as error:
        raise _refused(403, str(error), "stream_forged") from error


async def _past(records: StreamRecords, token: str) -> StreamPast:
    try:
        return await records.read(token)
    except StreamForged as error:
        raise _refused(403, str(error), "stream_forged") from error
    except StreamGone as error:
        raise _refused(410, str(error), "stream_gone") from error
    except IndexUnavailable as error:
        why = "streams cannot be resumed while Redis does not answer: try again"
        raise unavailable(why, "streams_unknown") from error


def _parsed(given: str, num_choices: int) -> tuple[str, tuple[Position, ...]]:
    token, _, positions = given.partition(":")
    return token, _positions(positions if _TOKEN.fullmatch(token) else "", num_choices)


def _positions(given: str, num_choices: int) -> tuple[Position, ...]:
    found = _POSITIONS.fullmatch(given)
    parts = given.split(",") if found else []
    if len(parts) != num_choices or not all(parts):
        raise bad_request(
            f"{LAST_EVENT_ID}: no id of an event of this request: …{given[:64]!r}", LAST_EVENT_ID
        )
    numbers = [part.split("-") for part in parts]
    return tuple(Position(int(one[0]), int(one[1], 16), len(one) == 3) for one in numbers)


def _refused(status: int, why: str, code: str) -> ApiError:
    return ApiError(status, why, param=LAST_EVENT_ID, code=code)


def _digest(path: str, body: GenerationBody, runs: Sequence[SequenceRun], model: str) -> str:
    """``model``: that answers: a name may come to mean another one (``conductor.canary``)."""
    digest = blake2b(f"{path}\0{model}\0".encode(), digest_size=16)
    fields = body.model_dump(mode="json", exclude={"past"})
    digest.update(orjson.dumps(fields, option=orjson.OPT_SORT_KEYS))
    for run in runs:
        # Whatever made the prompt: a template may have today's date in it.
        digest.update(run.choice.prompt.token_ids.tobytes())
        # Of an adapter that has been replaced, the stream cannot go on.
        digest.update(run.request.adapter_key.encode())
    return digest.hexdigest()
