"""What another conductor needs to go on with a stream, in Redis:

    {ns}:stream:NAME  list  its head, and then its tokens; each entry encrypted under a key of the cluster

The prompt is not there: a client that resumes sends its request again, and the head has a digest of it. A
list lives ``RESUME_S`` longer than its stream. No token waits for Redis: what is new is written by a task of
its own, heads at once and tokens every ``_PERIOD_S``. If a conductor dies before tokens were written, its
streams go on from those before.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from hashlib import blake2b
from hmac import compare_digest
from typing import Any, Final

import orjson
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from moonpool.conductor.errors import StreamForged, StreamGone
from moonpool.kvstore.errors import IndexUnavailable
from moonpool.kvstore.index.redis.kv_index import KVIndex
from moonpool.kvstore.index.redis.lua_scripts import Script
from moonpool.kvstore.index.redis.seal import key_of_cluster
from moonpool.runtime.service.vital import cancel_and_wait, restarted

log = logging.getLogger(__name__)

RESUME_S: Final = 60.0
"""How long a stream may be resumed after its latest token."""
MAX_TOKENS: Final = 1 << 17
"""Of a stream, all choices together; a longer one can no longer be resumed."""
TOKEN_CHARS: Final = 32
_PERIOD_S = 0.1
_NAME_NBYTES, _MAC_NBYTES, _NONCE_NBYTES = 12, 12, 12
# Streams in one call of Redis.
_BATCH = 64


@dataclass(frozen=True, slots=True)
class StreamHead:
    """What a stream began with. ``digest``: of its request; ``seeds``: one a choice."""

    answer_id: str
    created: int
    tenant: str
    digest: str
    seeds: tuple[int, ...]
    began_unix_s: float


@dataclass(frozen=True, slots=True)
class StreamPast:
    """A stream so far. ``tokens[i]``, ``cached[i]``: of choice ``i``; clients may have seen later tokens."""

    head: StreamHead
    tokens: tuple[tuple[int, ...], ...]
    cached: tuple[int, ...]


@dataclass(slots=True, eq=False)
class StreamRecord:
    """One stream. ``token``: what resumes it, for its client alone."""

    token: str
    place: str  # in Redis
    head: bytes
    tokens: list[list[int]]  # by choice
    cached: list[int]
    num_written: list[int]
    on_news: Callable[[], None]
    num_entries: int = 0  # in Redis
    num_tokens: int = 0
    renewed_s: float = 0.0
    ended: bool = False
    ended_s: float = math.inf  # seen by ``flush``

    @classmethod
    def new(cls, head: StreamHead, token: str, place: str, on_news: Callable[[], None]) -> StreamRecord:
        """Of a stream without tokens."""
        num = len(head.seeds)
        tokens: list[list[int]] = [[] for _ in range(num)]
        return cls(token, place, orjson.dumps(asdict(head)), tokens, [0] * num, [0] * num, on_news)

    def add(self, choice: int, token_id: int, cached: int) -> None:
        """A token that does not end its choice. ``cached``: tokens of the prompt that were."""
        self.tokens[choice].append(token_id)
        self.cached[choice] = cached
        self.num_tokens += 1
        self.on_news()

    def end(self) -> None:
        """No more tokens come. What is there stays for ``RESUME_S``."""
        self.ended = True

    @property
    def has_news(self) -> bool:
        """Whether ``unwritten`` has an entry."""
        return not self.num_entries or any(map(int.__gt__, map(len, self.tokens), self.num_written))

    def unwritten(self) -> tuple[bytes, list[int]]:
        """The next entry, empty if there is nothing new, and how many tokens are written with it."""
        counts = list(map(len, self.tokens))
        new = [
            (choice, start, self.cached[choice], tokens[start:])
            for choice, (tokens, start) in enumerate(zip(self.tokens, self.num_written, strict=True))
            if len(tokens) > start
        ]
        if not self.num_entries:
            return orjson.dumps({"head": orjson.Fragment(self.head), "new": new}), counts
        return (orjson.dumps({"new": new}) if new else b""), counts

    def rewrite(self) -> None:
        """Redis has lost entries."""
        self.num_entries = 0
        self.num_written = [0] * len(self.tokens)


class StreamRecords:
    """Streams that other conductors may resume. ``start`` before streams begin."""

    def __init__(self, index: KVIndex) -> None:
        """Raises ``ConfigError``: this process has the key of one role only."""
        self._index = index
        key = key_of_cluster("streams to resume")
        self._cipher = AESGCM(key)
        self._mac = blake2b(b"tokens", key=key, digest_size=_MAC_NBYTES)
        self._open: dict[StreamRecord, None] = {}
        self._news, self._begun = asyncio.Event(), asyncio.Event()
        self._turn = asyncio.Lock()
        self._tasks: list[asyncio.Task[None]] = []
        self._clock = asyncio.get_running_loop().time

    def start(self) -> None:
        self._tasks = [
            restarted(self._run, "records of streams"),
            restarted(self._write_heads, "heads of streams"),
        ]

    async def close(self) -> None:
        """Idempotent. What was not written is lost."""
        await cancel_and_wait(*self._tasks)

    def begin(self, head: StreamHead) -> StreamRecord:
        """Record a new stream, from its beginning. ``end`` it."""
        name = os.urandom(_NAME_NBYTES)
        token = urlsafe_b64encode(name + self._mac_of(name)).decode()
        record = StreamRecord.new(head, token, self._place(name), self._news.set)
        self._open[record] = None
        self._news.set()
        self._begun.set()
        return record

    async def read(self, token: str) -> StreamPast:
        """The stream that ``token`` resumes.

        Raises:
            StreamForged: no conductor of this cluster has made the token.
            StreamGone: it began too long ago, was too long, or nothing of it was written.
            IndexUnavailable: Redis does not answer.
        """
        place = self._place(self._verified(token))
        entries = [self._decrypted(place, data) for data in await self._index.command("LRANGE", place, 0, -1)]
        return past_of(entries)

    async def flush(self, *, heads_only: bool = False) -> None:
        """Write what is new, and renew what would expire.

        Raises ``IndexUnavailable``: tried again later, for ``RESUME_S`` after the end of a stream.
        """
        async with self._turn:
            now_s, due = self._clock(), list[StreamRecord]()
            for record in [one for one in self._open if not (heads_only and one.num_entries)]:
                if record.ended:
                    record.ended_s = min(record.ended_s, now_s)
                is_over = record.ended and not record.has_news
                if record.num_tokens > MAX_TOKENS or is_over or now_s - record.ended_s > RESUME_S:
                    del self._open[record]
                elif record.has_news or now_s - record.renewed_s > RESUME_S / 3:
                    due.append(record)
            for first in range(0, len(due), _BATCH):
                await self._write(due[first : first + _BATCH], now_s)

    async def _write(self, due: Sequence[StreamRecord], now_s: float) -> None:
        news = [record.unwritten() for record in due]
        args: list[object] = [round(RESUME_S * 1000)]
        args += [
            self._encrypted(record.place, entry) if entry else b""
            for record, (entry, _) in zip(due, news, strict=True)
        ]
        lengths = await self._index.run("streams", _PUSH, [record.place for record in due], args)
        for record, (entry, counts), length in zip(due, news, lengths, strict=True):
            record.num_entries += bool(entry)
            record.num_written, record.renewed_s = counts, now_s
            if int(length) < record.num_entries:
                record.rewrite()
                self._news.set()

    async def _run(self) -> None:
        lost = False
        while True:
            try:
                async with asyncio.timeout(RESUME_S / 6):
                    await self._news.wait()
            except TimeoutError:
                pass  # some may have to be renewed
            self._news.clear()
            try:
                await self.flush()
                lost = False
            except IndexUnavailable as error:
                if not lost:
                    log.warning("streams cannot be resumed elsewhere for now: %s", error)
                lost = True
                self._news.set()
            await asyncio.sleep(_PERIOD_S)

    async def _write_heads(self) -> None:
        while True:
            await self._begun.wait()
            self._begun.clear()
            with suppress(IndexUnavailable):
                # Otherwise they are written with the tokens.
                await self.flush(heads_only=True)

    # ------------------------------------------------------------------ tokens and entries

    def _place(self, name: bytes) -> str:
        return f"{{{self._index.namespace}}}:stream:{name.hex()}"

    def _mac_of(self, name: bytes) -> bytes:
        mac = self._mac.copy()
        mac.update(name)
        return mac.digest()

    def _verified(self, token: str) -> bytes:
        try:
            raw = urlsafe_b64decode(token)
        except ValueError:
            raise StreamForged from None
        name, mac = raw[:_NAME_NBYTES], raw[_NAME_NBYTES:]
        if not compare_digest(mac, self._mac_of(name)):
            raise StreamForged
        return name

    def _encrypted(self, place: str, entry: bytes) -> bytes:
        nonce = os.urandom(_NONCE_NBYTES)
        return nonce + self._cipher.encrypt(nonce, entry, place.encode())

    def _decrypted(self, place: str, data: bytes) -> dict[str, Any]:
        try:
            entry = self._cipher.decrypt(data[:_NONCE_NBYTES], data[_NONCE_NBYTES:], place.encode())
        except (InvalidTag, ValueError):
            # Of another key, or written by something else.
            log.error("an entry of a stream in Redis cannot be read: %s", place)
            raise StreamGone from None
        found: dict[str, Any] = orjson.loads(entry)
        return found


def past_of(entries: Sequence[dict[str, Any]]) -> StreamPast:
    """The stream with these entries of its record, in order. Raises ``StreamGone``: the first is missing."""
    heads = [entry["head"] for entry in entries if "head" in entry]
    if not heads:
        raise StreamGone
    head = StreamHead(**heads[0] | {"seeds": tuple(heads[0]["seeds"])})
    tokens = [list[int]() for _ in head.seeds]
    cached = [0] * len(head.seeds)
    for choice, start, num_cached, new in (one for entry in entries for one in entry["new"]):
        cached[choice] = num_cached
        # An entry was written twice if Redis' answer was lost.
        if start <= len(tokens[choice]) < start + len(new):
            tokens[choice] += new[len(tokens[choice]) - start :]
    return StreamPast(head, tuple(map(tuple, tokens)), tuple(cached))


# KEYS lists | ARGV ttl_ms entries (empty: only renew)
_PUSH = Script(
    """
local lengths = {}
for i, key in ipairs(KEYS) do
  if ARGV[i + 1] ~= '' then redis.call('RPUSH', key, ARGV[i + 1]) end
  redis.call('PEXPIRE', key, ARGV[1])
  lengths[i] = redis.call('LLEN', key)
end
return lengths
"""
)
