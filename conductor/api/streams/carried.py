"""Streams that carry their own past, for routers of cells: with it another cluster goes on with them.

Before each event are comments, which clients of event streams pass over:

    : at 12-5e1f20ab            how much of each choice was sent with it, as in ids of ``resume``
    : past NAME BASE64          what the stream began with and, some events late, its tokens

What it began with includes the messages behind ``previous_response_id``: other clusters do not have them.

The past has the seal of the cluster's key, so that a conductor only goes on with tokens that a conductor has
made. Tokens that are missing at its end are computed again.
"""

from __future__ import annotations

import secrets
from base64 import b64decode, b64encode
from typing import Any, Final

import orjson

from moonpool.conductor.api.schemas import CarriedPast
from moonpool.conductor.errors import StreamForged
from moonpool.conductor.requests.conversation_records import Messages
from moonpool.conductor.requests.stream_records import StreamHead, StreamPast, StreamRecord, past_of
from moonpool.kvstore.errors import EntryRefused
from moonpool.kvstore.index.redis.seal import Seals

PAST_HEADER: Final = "x-moonpool-past"
"""Of a request: its stream shall carry its past. Of an answer: it does."""
AT, PAST = b": at ", b": past "
_KIND: Final = b"S"
_EVERY_TOKENS: Final = 16
"""A seal takes some microseconds, and so many tokens less than a step each to compute again."""


class CarriedRecord:
    """Writes the past of one stream between its events. ``record``: what it is told.

    ``earlier``: messages behind its request that another cluster does not know.
    """

    def __init__(self, head: StreamHead, earlier: Messages | None = None) -> None:
        self.record = StreamRecord.new(head, "", "", lambda: None)
        self._earlier = earlier
        self._name = secrets.token_hex(12)
        self._seals = Seals()
        self._num_written = 0

    def lines(self, at: str) -> bytes:
        """The comments of an event that is written now."""
        record, lines = self.record, AT + at.encode() + b"\n"
        if record.num_entries and record.num_tokens - self._num_written < _EVERY_TOKENS:
            return lines
        entry, record.num_written = record.unwritten()
        if self._earlier and not record.num_entries:
            entry = orjson.dumps({**orjson.loads(entry), "earlier": self._earlier})
        sealed = self._seals.seal(_KIND, self._name.encode(), entry, number=record.num_entries)
        record.num_entries += 1
        self._num_written = record.num_tokens
        return lines + PAST + self._name.encode() + b" " + b64encode(sealed) + b"\n"


def read_past(given: CarriedPast) -> StreamPast:
    """Raises ``StreamForged``: no conductor with our key has made it. ``StreamGone``: it has no beginning."""
    return past_of(_entries(given))


def earlier_messages(given: CarriedPast, tenant: str) -> Messages | None:
    """Those of a stream of ``tenant``'s; None: there are none. Raises as ``read_past``."""
    entries = _entries(given)
    if past_of(entries).head.tenant != tenant:
        return None
    return next((entry["earlier"] for entry in entries if "earlier" in entry), None)


def _entries(given: CarriedPast) -> list[dict[str, Any]]:
    seals, entries = Seals(), []
    for number, text in enumerate(given.entries):
        try:
            sealed = seals.open(_KIND, given.name.encode(), b64decode(text))
        except (EntryRefused, ValueError):
            raise StreamForged from None
        if sealed.number != number:
            raise StreamForged
        entries.append(orjson.loads(sealed.body))
    return entries
