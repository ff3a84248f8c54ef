"""The values of objects' records in Redis: ``version expires_ms storage payload``, see ``record_scripts``."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from moonpool.kvstore.blocks.keys import KEY_NBYTES
from moonpool.kvstore.errors import EntryRefused
from moonpool.kvstore.index.metrics import skipped_entries
from moonpool.kvstore.index.redis.seal import Seals
from moonpool.kvstore.objects.record_scripts import NUM_BUCKETS
from moonpool.protos import store_pb2
from moonpool.runtime.message_checks import check_message
from moonpool.runtime.number_checks import NumberOutOfRange

log = logging.getLogger(__name__)

# Of an owner, in a field's name.
_OWNER_CHARS = 32
# Decoded values that are kept, with their field, and the largest of them.
_KEPT = 8192
_KEPT_NBYTES = 1024

Name = tuple[bytes, bytes]  # owner and key of an object, 16 bytes each


@dataclass(frozen=True, slots=True)
class Record:
    """A record as read. ``value`` are its bytes in Redis, which ``swap`` compares. ``body`` is shared: it
    must not be changed."""

    body: store_pb2.ObjectRecord
    value: bytes

    @property
    def storage(self) -> int:
        return self.body.info.storage

    @property
    def name(self) -> Name:
        return self.body.owner, self.body.info.key


class RecordValues:
    """Seals and opens values. To verify and decode one takes longer than to read it: the results are kept,
    by all its bytes and the field that it was read from."""

    def __init__(self, seals: Seals, key_of: Callable[[int], str]) -> None:
        """``key_of``: the Redis key of a bucket."""
        self._seals = seals
        self._key_of = key_of
        self._kept: OrderedDict[tuple[bytes, bytes], Record] = OrderedDict()

    def payload(self, record: store_pb2.ObjectRecord) -> bytes:
        """The record without what the header of its value says, sealed."""
        body = store_pb2.ObjectRecord()
        body.CopyFrom(record)
        body.ClearField("version")
        body.ClearField("expires_ms")
        field = field_of((record.owner, record.info.key))
        return self._seals.seal(b"O", self._place(field), body.SerializeToString(), life=record.info.storage)

    def record(self, field: bytes, value: bytes) -> Record | None:
        """None: there is none, or it cannot be used (logged and counted); the next put replaces it."""
        if not value:
            return None
        known = self._kept.get((field, value))
        if known is not None:
            self._kept.move_to_end((field, value))
            return known
        try:
            record = self._decoded(field, value)
        except (ValueError, DecodeError, NumberOutOfRange, EntryRefused) as error:
            skipped_entries.labels(getattr(error, "reason", "unreadable")).inc()
            log.error("the record of an object in Redis was skipped: %s: %.200r", error, value)
            return None
        if len(value) <= _KEPT_NBYTES:
            self._kept[field, value] = record
            if len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        return record

    def _decoded(self, field: bytes, value: bytes) -> Record:
        version, expires_ms, storage, sealed = value.split(b" ", 3)
        if len(field) != _OWNER_CHARS + KEY_NBYTES:
            raise ValueError(f"its field has {len(field)} bytes")
        life, _, payload = self._seals.open(b"O", self._place(field), sealed)
        if life != int(storage, 16):
            raise EntryRefused("forged", f"it was written for the storage {life:016x}")
        body = store_pb2.ObjectRecord.FromString(payload)
        body.version, body.expires_ms = int(version), int(expires_ms)
        check_message(body)
        return Record(body, value)

    def _place(self, field: bytes) -> bytes:
        """What a payload is sealed for: the hash and its field."""
        return self._key_of(bucket_of(field[_OWNER_CHARS:])).encode() + b":" + field


def bucket_of(key: bytes) -> int:
    return key[0] % NUM_BUCKETS


def field_of(name: Name) -> bytes:
    return name[0].hex().encode() + name[1]
