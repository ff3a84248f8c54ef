"""What the index keeps of a node in Redis, sealed: its record, its batches of changes, its events."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from moonpool.kvstore.errors import EntryCorrupt, EntryRefused
from moonpool.kvstore.index import metrics
from moonpool.kvstore.index.redis.node_record import NodeRecord, RecordCorrupt
from moonpool.kvstore.index.redis.seal import Seals
from moonpool.runtime.observing import audit

_log = logging.getLogger(__name__)

# Clocks of hosts may differ by this, as for ``runtime.security.call_tokens``.
CLOCKS_DIFFER_S = 30.0
# Kinds of events that are only skipped, with the reason as ``data``.
UNREADABLE, REFUSED = b"?", b"!"


@dataclass(frozen=True, slots=True)
class Event:
    """One entry of the stream. kind: J joined, H heartbeat, B blocks changed, C complete, L left,
    ``UNREADABLE`` or ``REFUSED``. life, number: see ``index.redis.seal``; of a record, ``number`` is the
    millisecond since 1970 until which it is valid, of a batch its position in the log."""

    seq: int
    kind: bytes
    node_id: str
    epoch: int
    data: bytes
    life: int = 0
    number: int = 0


@dataclass(frozen=True, slots=True)
class LogPage:
    """Batches of a node's log. ``base + len(all batches)`` only grows; a base beyond the requested position
    means that batches were dropped unread: start over. Refused batches are empty. life, number: of the
    record, as in ``Event``."""

    epoch: int
    life: int
    number: int
    record: NodeRecord
    complete: bool
    base: int
    batches: list[bytes]
    seq: int  # of the last event when the page was read


@dataclass(slots=True)
class Registration:
    """A life of a node in the index, as who writes its entries knows it."""

    node_id: str
    epoch: int
    life: int  # the millisecond of registering
    number: int = 0  # of the newest record
    position: int = 0  # in the log, of the next batch


class NodeEntries:
    """Makes and reads the entries of one namespace. What is refused raises ``EntryRefused``."""

    def __init__(
        self, seals: Seals, node_prefix: str, log_prefix: str, unix_clock: Callable[[], float]
    ) -> None:
        self._seals = seals
        self._node_prefix = node_prefix
        self._log_prefix = log_prefix
        self._unix_clock = unix_clock

    def now_ms(self) -> int:
        return int(self._unix_clock() * 1000)

    def expired(self, number: int) -> bool:
        """Whether a record of this number should have been renewed, also by a clock that differs."""
        return number + CLOCKS_DIFFER_S * 1000 < self.now_ms()

    # ------------------------------------------------------------------ writing

    def record(self, of: Registration, record: NodeRecord, ttl_ms: int, *, joins: bool = False) -> bytes:
        """The newest record. ``joins``: only as the event of a node that registers."""
        of.number = max(of.number + 1, self.now_ms() + ttl_ms)
        return self._seal(b"J" if joins else b"H", of, record.to_json(), of.number)

    def batch(self, of: Registration, position: int, changes: bytes) -> bytes:
        return self._seal(b"B", of, changes, position) if changes else b""

    def complete(self, of: Registration) -> bytes:
        """The mark that all blocks of the node are published."""
        return self._seal(b"C", of)

    def left(self, of: Registration, reason: str) -> bytes:
        return self._seal(b"L", of, reason.encode())

    def _seal(self, kind: bytes, of: Registration, body: bytes = b"", number: int = 0) -> bytes:
        place = self._place(kind, of.node_id)
        return self._seals.seal(kind, place, body, epoch=of.epoch, life=of.life, number=number)

    # ------------------------------------------------------------------ reading

    def page(self, node_id: str, position: int, reply: list[Any]) -> LogPage:
        """The answer of the script ``read``. Raises ``EntryCorrupt``; refused batches are logged, counted."""
        epoch_text, data, done, base_text, batches, seq = reply
        try:
            epoch, base = int(epoch_text), int(base_text)
        except ValueError as error:
            raise RecordCorrupt(f"its hash has a number that is none: {error}") from None
        life, number, body = self._seals.open(b"H", self._place(b"H", node_id), data, epoch=epoch)
        if self.expired(number):
            raise EntryRefused(
                "expired",
                f"its lease ended {(self.now_ms() - number) / 1000:.0f} s ago by our clock: the record was "
                "put back, Redis stood still, or the clocks of the hosts differ",
            )
        record = read_record(node_id, epoch, body)
        of, first = Registration(node_id, epoch, life), max(position, base)
        opened = [self._batch_of(of, first + i, batch) for i, batch in enumerate(batches)]
        return LogPage(epoch, life, number, record, self._marked(of, done), base, opened, int(seq))

    def registration(self, node_id: str, reply: list[Any]) -> Registration:
        """Of a node whose record may have expired, from the answer of the script ``read``. Raises
        ``EntryCorrupt``."""
        try:
            epoch = int(reply[0])
        except ValueError as error:
            raise RecordCorrupt(f"its hash has no epoch: {error}") from None
        life, number, _ = self._seals.open(b"H", self._place(b"H", node_id), reply[1], epoch=epoch)
        return Registration(node_id, epoch, life, number)

    def event(self, entry: Any) -> Event:
        """An entry of the stream. What cannot be used has a kind of its own."""
        identity, fields = entry
        seq = int(identity.split(b"-")[0])
        node_id = text(fields.get(b"n", b""))
        try:
            kind, epoch, data = fields[b"k"], int(fields[b"e"]), fields[b"d"]
            life, number, body = self._seals.open(kind, self._place(kind, node_id), data, epoch=epoch)
        except (KeyError, ValueError) as error:
            return Event(seq, UNREADABLE, node_id, 0, f"it is not a change: {error!r}".encode())
        except EntryRefused as error:
            return Event(seq, REFUSED, node_id, 0, str(error).encode())
        return Event(seq, kind, node_id, epoch, body, life, number)

    def _batch_of(self, of: Registration, position: int, data: bytes) -> bytes:
        try:
            life, number, body = self._seals.open(b"B", self._place(b"B", of.node_id), data, epoch=of.epoch)
            if (life, number) != (of.life, position):
                raise EntryRefused("replayed", f"it was written as batch {number} of life {life}")
        except EntryRefused as error:
            skipped(f"batch {position} in the log", of.node_id, error)
            return b""
        return body

    def _marked(self, of: Registration, data: bytes) -> bool:
        try:
            place = self._place(b"C", of.node_id)
            return bool(data) and self._seals.open(b"C", place, data, epoch=of.epoch).life == of.life
        except EntryRefused as error:
            skipped("the mark of completeness", of.node_id, error)
            return False

    def _place(self, kind: bytes, node_id: str) -> bytes:
        """The Redis key that an entry of this kind belongs to; its event as well."""
        return ((self._log_prefix if kind == b"B" else self._node_prefix) + node_id).encode()


def read_record(node_id: str, epoch: int, data: bytes) -> NodeRecord:
    """Raises ``RecordCorrupt``."""
    record = NodeRecord.from_json(data)
    if (record.node_id, record.epoch) != (node_id, epoch):
        raise RecordCorrupt(f"the entry of epoch {epoch} has the record {data[:200]!r}")
    return record


def skipped(what: str, node_id: str, error: EntryCorrupt) -> None:
    """Count and log something of a node that cannot be used. The rest of the index is used."""
    metrics.skipped_entries.labels(error.reason).inc()
    _log.error("%s of node %s was skipped: %s", what, node_id, error)
    if error.reason == "forged":
        audit.refused("Redis", f"{what} of node {node_id}: {error}", kind="forged")


def text(name: bytes) -> str:
    """Names are UTF-8; another one is of no node."""
    return name.decode(errors="replace")
