"""The records of objects in Redis: the only truth of what a name means."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from secrets import token_hex
from typing import Any

from redis.exceptions import ConnectionError

from moonpool.kvstore.errors import IndexUnavailable, raise_one
from moonpool.kvstore.index.redis.kv_index import KVIndex
from moonpool.kvstore.index.redis.redis_calls import pairs
from moonpool.kvstore.objects import record_scripts as scripts
from moonpool.kvstore.objects.errors import ChangeUnknown, RecordsLost, RecordsUnavailable
from moonpool.kvstore.objects.record_values import Name, Record, RecordValues, bucket_of, field_of
from moonpool.protos import store_pb2

# An answer of Redis within this time is taken as a sign that it answers.
_FRESH_S = 1.0
_SCAN_COUNT = 512
# Most objects of one call: it holds Redis for about a millisecond.
_BATCH = 256


@dataclass(slots=True)
class _Bucket:
    key: str
    generation: bytes = b""  # that we know; empty: none yet
    lost: bytes = b""  # Redis lost this bucket: its new generation; empty: it did not
    open_s: float = 0.0  # when a lost bucket is used again


class Records:
    """Every method raises ``RecordsUnavailable``: Redis does not answer, nothing has changed; and its
    subclass ``RecordsLost`` while the records are restored after Redis lost its data. Those that change
    records raise ``ChangeUnknown``: Redis did not answer, or not for all of them; the change may have been
    made or may still be, in part, too.
    """

    def __init__(
        self, index: KVIndex, *, restoring_s: float, generations: Mapping[int, bytes] | None = None
    ) -> None:
        """``index``: the connection to Redis and the namespace. ``restoring_s``: how long nodes may take to
        notice a loss and to restore what they have. ``generations``: by bucket, as this node last knew
        them."""
        self._index = index
        self._restoring_s = restoring_s
        self._buckets = [
            _Bucket(f"{index.namespace}:objects:{number}") for number in range(scripts.NUM_BUCKETS)
        ]
        for number, generation in (generations or {}).items():
            self._buckets[number].generation = generation
        self._values = RecordValues(index.seals, lambda number: self._buckets[number].key)
        self._answered_s = float("-inf")
        self._ahead_ms = 0.0  # Redis's clock less ours
        # Called with a bucket's number and generation when they are known, to be remembered over a restart.
        self.on_generation: Callable[[int, bytes], None] = lambda number, generation: None

    # ------------------------------------------------------------------ reading

    async def check(self) -> None:
        """Raise ``RecordsUnavailable`` unless Redis answered lately or does so now."""
        if time.monotonic() - self._answered_s > _FRESH_S:
            await self._call(0, scripts.read, [])

    async def read(self, names: Sequence[Name]) -> list[Record | None]:
        """The record of each, one round trip for all; None: there is no such object."""
        found = await self._each(names, scripts.read, lambda name: [field_of(name)])
        return [
            self._values.record(field_of(name), value) for name, (value,) in zip(names, found, strict=True)
        ]

    async def scan(self, cursor: int, owner: bytes | None = None) -> tuple[list[Record], int]:
        """A page of all records, or of an owner's, and the next cursor; 0: the first, and after the last one.
        A record that stays unchanged meanwhile comes at least once."""
        number, at = cursor % scripts.NUM_BUCKETS, cursor // scripts.NUM_BUCKETS
        bucket = self._buckets[number]
        await self._call(number, scripts.read, [])
        match = f"{owner.hex()}*" if owner is not None else "*"
        try:
            reply = await self._index.command("HSCAN", bucket.key, at, "MATCH", match, "COUNT", _SCAN_COUNT)
        except IndexUnavailable as error:
            raise RecordsUnavailable(str(error)) from error
        following, fields = int(reply[0]), reply[1]
        now_ms = self.now_ms()
        found = [
            record
            for field, value in pairs(fields)
            if field not in (b"generation", b"lost_ms")
            and (record := self._values.record(field, value)) is not None
            if not record.body.expires_ms or record.body.expires_ms > now_ms
        ]
        if following == 0:
            number += 1
        if number == scripts.NUM_BUCKETS:
            return found, 0
        return found, following * scripts.NUM_BUCKETS + number

    def now_ms(self) -> float:
        """Redis's clock as far as it is known, in milliseconds since 1970."""
        return time.time() * 1000 + self._ahead_ms

    # ------------------------------------------------------------------ changes

    async def put(
        self, records: Sequence[tuple[store_pb2.ObjectRecord, int]]
    ) -> list[tuple[Record, Record | None]]:
        """Make each record (with its time to live in ms, 0: forever) that of its object. Returns the records
        with the version and expiry that Redis gave them, and the former ones. The bytes must be in place."""

        def args(each: tuple[store_pb2.ObjectRecord, int]) -> list[object]:
            record, ttl_ms = each
            return [
                field_of((record.owner, record.info.key)),
                _hex(record.info.storage),
                ttl_ms,
                self._values.payload(record),
            ]

        found = await self._each(records, scripts.put, args, lambda each: (each[0].owner, each[0].info.key))
        done: list[tuple[Record, Record | None]] = []
        for (put, _), (value, former) in zip(records, found, strict=True):
            field = field_of((put.owner, put.info.key))
            record = self._values.record(field, value)
            if record is None:
                raise ChangeUnknown(f"the record of {put.info.name!r} was changed by another process")
            done.append((record, self._values.record(field, former)))
        return done

    async def remove(self, objects: Sequence[tuple[Name, int]]) -> list[tuple[Record | None, int]]:
        """Delete the records that name this storage; returns them, and what the others name now (0: there is
        none). Repeating it is harmless."""
        found = await self._each(
            objects, scripts.remove, lambda each: [field_of(each[0]), _hex(each[1])], lambda each: each[0]
        )
        return [
            (self._values.record(field_of(name), value), int(left or b"0", 16))
            for (name, _), (value, left) in zip(objects, found, strict=True)
        ]

    async def swap(
        self, former: Record, places: Iterable[str], copies: int | None = None, *, restoring: bool = False
    ) -> bool:
        """Change the places of exactly this record (and ``copies``); without places it is deleted. False: it
        has changed meanwhile, and is left as it is."""
        body = store_pb2.ObjectRecord()
        body.CopyFrom(former.body)
        if copies is not None:
            body.copies = copies
        del body.places[:]
        body.places.extend(places)
        payload = self._values.payload(body) if body.places else b""
        number = bucket_of(former.body.info.key)
        args = [field_of(former.name), former.value, payload]
        (done,) = await self._call(number, scripts.swap, args, restoring=restoring)
        return bool(done)

    # ------------------------------------------------------------------ a Redis that lost its data

    def lost_buckets(self) -> list[int]:
        return [number for number, bucket in enumerate(self._buckets) if bucket.lost]

    async def look(self) -> None:
        """Notice lost buckets, also without a request for them."""
        calls = (
            self._call(number, scripts.read, [])
            for number, bucket in enumerate(self._buckets)
            if not bucket.lost
        )
        with suppress(RecordsLost):
            await asyncio.gather(*calls)

    async def restore(self, record: store_pb2.ObjectRecord) -> Record:
        """Write a record that this node knows to a lost bucket. Returns the one that is there afterwards:
        this, or that of another node if it is as new."""
        args = [
            field_of((record.owner, record.info.key)),
            record.version,
            record.expires_ms,
            _hex(record.info.storage),
            self._values.payload(record),
        ]
        number = bucket_of(record.info.key)
        (value,) = await self._call(number, scripts.restore, args, restoring=True)
        found = self._values.record(field_of((record.owner, record.info.key)), value)
        if found is None:
            raise ChangeUnknown(f"the record of {record.info.name!r} was changed by another process")
        return found

    def restored(self, number: int) -> bool:
        """This node has restored what it knows of a bucket. True: others had the time to, too; it is used
        again."""
        bucket = self._buckets[number]
        if not bucket.lost or time.monotonic() < bucket.open_s:
            return False
        bucket.generation, bucket.lost = bucket.lost, b""
        self.on_generation(number, bucket.generation)
        return True

    # ------------------------------------------------------------------ calls

    async def _each(
        self,
        items: Sequence[Any],
        script: scripts.RecordScript,
        args_of: Callable[[Any], list[Any]],
        name_of: Callable[[Any], Name] = lambda name: name,
    ) -> list[list[bytes]]:
        """Run a script over many items, one call for each bucket; returns the answers for each item."""
        by_bucket: dict[int, list[int]] = {}
        for at, item in enumerate(items):
            by_bucket.setdefault(bucket_of(name_of(item)[1]), []).append(at)
        parts = [
            (number, places[first : first + _BATCH])
            for number, places in by_bucket.items()
            for first in range(0, len(places), _BATCH)
        ]
        calls = [(number, [arg for at in places for arg in args_of(items[at])]) for number, places in parts]
        found = await self._calls(calls, script)
        errors = [each for each in found if isinstance(each, Exception)]
        if script.failure is ChangeUnknown and 0 < len(errors) < len(found):
            errors.append(ChangeUnknown(f"a part was changed: {errors[0]}"))
        # An unknown outcome must not be taken for a refusal.
        raise_one(errors, ChangeUnknown)
        answers: list[list[bytes]] = [[]] * len(items)
        for (_, places), reply in zip(parts, found, strict=True):
            assert isinstance(reply, list)
            count = len(reply) // len(places)
            for i, at in enumerate(places):
                answers[at] = reply[i * count : (i + 1) * count]
        return answers

    async def _call(
        self, number: int, script: scripts.RecordScript, args: Sequence[object], *, restoring: bool = False
    ) -> list[Any]:
        (reply,) = await self._calls([(number, args)], script, restoring=restoring)
        if isinstance(reply, BaseException):
            raise reply
        return reply

    async def _calls(
        self,
        calls: Sequence[tuple[int, Sequence[object]]],
        script: scripts.RecordScript,
        *,
        restoring: bool = False,
    ) -> list[list[Any] | Exception]:
        """Run a script on buckets, with arguments for each; returns the answers or errors."""
        for number, _ in calls:
            if self._buckets[number].lost and not restoring:
                raise RecordsLost(self._restoring_s)
        closed_ms = 0 if restoring else round(1000 * self._restoring_s)
        known = [self._buckets[number].lost or self._buckets[number].generation for number, _ in calls]
        posted = [
            ([self._buckets[number].key], [generation, token_hex(8), closed_ms, *args])
            for (number, args), generation in zip(calls, known, strict=True)
        ]
        began_ms = time.time() * 1000
        replies = await self._index.run_all(f"{script.name} of objects' records", script, posted)
        return [
            self._taken(number, generation, reply, began_ms, script.failure, restoring)
            for (number, _), generation, reply in zip(calls, known, replies, strict=True)
        ]

    def _taken(
        self,
        number: int,
        known: bytes,
        reply: Sequence[Any] | IndexUnavailable,
        began_ms: float,
        failure: Callable[[str], Exception],
        restoring: bool,
    ) -> list[Any] | Exception:
        """What a script answered, without what it says of the bucket; or the error that it means."""
        if isinstance(reply, IndexUnavailable):
            error = RecordsUnavailable(str(reply)) if _was_refused(reply) else failure(str(reply))
            error.__cause__ = reply
            return error
        self._answered_s = time.monotonic()
        bucket = self._buckets[number]
        if reply[0] == b"LOST":
            # Others may have noticed before. What is known here is restored first, also if that is late.
            left_s = self._restoring_s if restoring else int(reply[2]) / 1000
            bucket.lost, bucket.open_s = reply[1], time.monotonic() + left_s
            return RecordsLost(self._restoring_s)
        if not known:
            bucket.generation = reply[1]
            self.on_generation(number, bucket.generation)
        self._ahead_ms = int(reply[2]) - (began_ms + time.time() * 1000) / 2
        return list(reply[3:])


def _was_refused(error: IndexUnavailable) -> bool:
    """Whether nothing was sent: there was no connection."""
    # redis-py connects before it sends, and does not try again. It says so in the text alone.
    return isinstance(error.__cause__, ConnectionError) and " connecting to " in str(error.__cause__)


def _hex(storage: int) -> str:
    return f"{storage:016x}"
