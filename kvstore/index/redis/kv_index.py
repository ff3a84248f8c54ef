"""The global index in Redis: the blocks of each node and epoch.

Replaying a node's log gives the blocks it holds; the stream tells mirrors what changes. Both are written in
one step. Every entry belongs to a node and its epoch: when the lease expires or a new epoch registers, they
are dropped at once with the node's log.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from secrets import token_hex
from typing import Any

from moonpool.kvstore.blocks.keys import BlockKey
from moonpool.kvstore.blocks.tier import Tier
from moonpool.kvstore.errors import ChangesCorrupt, EntryCorrupt, EpochSuperseded, NodeUnknown, StoreError
from moonpool.kvstore.index.redis import lua_scripts as scripts
from moonpool.kvstore.index.redis.changes import REMOVED, decode, encode, pick
from moonpool.kvstore.index.redis.entries import Event, LogPage, NodeEntries, Registration, skipped, text
from moonpool.kvstore.index.redis.node_record import NodeRecord, RecordCorrupt
from moonpool.kvstore.index.redis.redis_calls import RedisCalls
from moonpool.kvstore.index.redis.seal import Seals


@dataclass(frozen=True, slots=True)
class StreamPosition:
    """The end of the stream. Another ``instance`` is another history: discard the former state."""

    instance: str
    seq: int
    lapsed: tuple[str, ...]  # nodes with an expired lease that are not dropped yet


class KVIndex(RedisCalls):
    """Every method raises ``IndexUnavailable`` if Redis does not answer within ``timeout_s``; the call may
    have taken effect. Repeating any call is harmless."""

    def __init__(
        self,
        redis: Any,
        namespace: str = "moonpool",
        *,
        history_nbytes: int = 32 << 20,
        timeout_s: float = 3.0,
        seals: Seals | None = None,
        unix_clock: Callable[[], float] = time.time,
    ) -> None:
        """``redis``: a ``redis.asyncio`` Redis or RedisCluster without decoded responses; not closed here.
        ``history_nbytes``: how much of the stream is kept for mirrors that fall behind. ``seals``: by default
        those of this process's cluster. Raises ``ConfigError``: this process has only a role's key."""
        if not namespace or set(namespace) & set("{}"):
            raise StoreError(f"index namespace must be non-empty and without braces, got {namespace!r}")
        self.namespace = namespace
        # Entries of nodes that cannot be read, as they were when that was said.
        self.unreadable: dict[str, bytes] = {}
        self.seals = seals or Seals()
        self._history = history_nbytes
        super().__init__(redis, timeout_s)
        tag = f"{{{namespace}}}"
        self._meta, self._events = f"{tag}:meta", f"{tag}:events"
        self._marks, self._leases = f"{tag}:marks", f"{tag}:leases"
        self._node_prefix, self._log_prefix = f"{tag}:node:", f"{tag}:log:"
        self._entries = NodeEntries(self.seals, self._node_prefix, self._log_prefix, unix_clock)
        self._registered: dict[str, Registration] = {}  # by this process

    async def register(self, record: NodeRecord, ttl_s: float, *, complete: bool = True) -> int:
        """Begin an epoch of a node, or the current one again: the index has none of its blocks afterwards.

        ``complete=False``: blocks it held before follow; mirrors keep what they knew of this epoch until
        ``publish_changes(..., complete=True)``. Returns the start position of its log. Raises
        ``EpochSuperseded``: a newer epoch is registered; nothing has changed.
        """
        node_id, epoch, before = record.node_id, record.epoch, self._registered.get(record.node_id)
        own = Registration(node_id, epoch, self._entries.now_ms())
        if before is not None:
            own.life = max(own.life, before.life + 1)
        joined = self._entries.record(own, record, _ms(ttl_s), joins=True)
        kept = self._entries.record(own, record, _ms(ttl_s))
        done = self._entries.complete(own) if complete else b""
        keys = [*self._own(node_id), self._leases, self._events, self._meta, self._marks]
        args = [node_id, epoch, kept, _ms(ttl_s), token_hex(8), self._history, done, joined]
        reply = self._checked(await self.run("register", scripts.register, keys, args), node_id, epoch)
        own.position = int(reply[2])
        self._registered[node_id] = own
        return own.position

    async def heartbeat(self, record: NodeRecord, ttl_s: float) -> None:
        """Renew the lease and replace the record. Raises ``NodeUnknown``, ``EpochSuperseded``."""
        node_id, epoch = record.node_id, record.epoch
        own = await self._registration(node_id, epoch)
        kept = self._entries.record(own, record, _ms(ttl_s))
        keys = [*self._own(node_id), self._leases, self._events, self._meta, self._marks]
        args = [node_id, epoch, kept, _ms(ttl_s), self._history, own.position]
        self._checked(await self.run("heartbeat", scripts.heartbeat, keys, args), node_id, epoch)

    async def publish(
        self,
        node_id: str,
        epoch: int,
        stored: Iterable[tuple[BlockKey, Tier]] = (),
        removed: Iterable[BlockKey] = (),
    ) -> None:
        """Publish in one step the blocks a node holds and those it does not. A key in both counts as removed.
        Others repair a node's entries with it after a stale hit.

        Raises ``NodeUnknown``, ``EpochSuperseded``; nothing has changed then. ``EntryCorrupt``: the node was
        registered by another process, and its record cannot be used.
        """
        gone, held = set(removed), dict(stored)
        for key in gone & held.keys():
            del held[key]
        await self.publish_changes(node_id, epoch, encode(held, gone))

    async def publish_changes(
        self,
        node_id: str,
        epoch: int,
        changes: bytes,
        *,
        quiet: bytes = b"",
        base: int = 0,
        trim: int = 0,
        complete: bool = False,
    ) -> None:
        """``publish`` of encoded changes. ``quiet`` replaces the ``trim`` oldest batches of the log in the
        same step, without telling mirrors, if the log still starts at ``base``."""
        own = await self._registration(node_id, epoch)
        keys = [*self._own(node_id), self._events, self._meta, self._marks]
        done = self._entries.complete(own) if complete else b""
        while True:
            position = own.position
            news = self._entries.batch(own, position, changes)
            again = self._entries.batch(own, position + bool(changes), quiet)
            args = [node_id, epoch, news, again, base, trim, self._history, done, position]
            reply = self._checked(await self.run("publish", scripts.publish, keys, args), node_id, epoch)
            # MOVED: a batch of another process is there, or of an own call with a lost answer.
            own.position = int(reply[1])
            if reply[0] == b"OK":
                return

    async def deregister(self, node_id: str, epoch: int) -> bool:
        """Drop the node and its blocks. False: it was not registered in this epoch."""
        return await self.drop(node_id, epoch, reason="left", only_lapsed=False)

    async def drop(
        self,
        node_id: str,
        epoch: int,
        *,
        life: int | None = None,
        reason: str = "lapsed",
        only_lapsed: bool = True,
    ) -> bool:
        """Drop a node, if ``only_lapsed`` only after its lease has ended. False: nothing was dropped.

        ``life``: of its registration; None: it is read, which raises ``EntryCorrupt`` if the record cannot be
        used.
        """
        try:
            found = Registration(node_id, epoch, life) if life else await self._registration(node_id, epoch)
        except (NodeUnknown, EpochSuperseded):
            return False
        keys = [*self._own(node_id), self._leases, self._events, self._meta, self._marks]
        args = [node_id, epoch, self._entries.left(found, reason), int(only_lapsed), self._history]
        reply = await self.run("drop", scripts.drop, keys, args)
        return bool(reply[0] == b"OK")

    async def drop_unread(self, node_id: str) -> bool:
        """``drop`` a node whose lease has ended, also if its record has expired, which ``read_log`` refuses.
        A lease without a record goes too. False: no node was dropped, or its record cannot be used."""
        reply = await self.run("read_log", scripts.read, [*self._own(node_id), self._meta], [0, 0])
        try:
            found = self._entries.registration(node_id, reply) if reply else Registration(node_id, 0, 1)
        except EntryCorrupt:
            return False
        return await self.drop(node_id, found.epoch, life=found.life)

    async def watch(self) -> StreamPosition:
        keys = [self._meta, self._leases, self._events, self._marks]
        instance, seq, lapsed = await self.run("watch", scripts.watch, keys, [token_hex(8)])
        return StreamPosition(text(instance), int(seq), tuple(map(text, lapsed)))

    async def node_ids(self) -> list[str]:
        return [text(name) for name in await self.command("ZRANGE", self._leases, 0, -1)]

    async def nodes(self) -> dict[str, NodeRecord]:
        """Every registered node's record, including expired ones until they are dropped. Corrupt ones are
        left out, logged and counted."""
        found: dict[str, NodeRecord] = {}
        for node_id in await self.node_ids():
            try:
                page = await self.read_log(node_id, 0, 0)
            except EntryCorrupt:
                continue
            if page is not None:
                found[node_id] = page.record
        return found

    async def read_log(self, node_id: str, position: int = 0, count: int = 64) -> LogPage | None:
        """Up to ``count`` batches of a node's log from an absolute position; None: no such node. Refused
        batches are logged and counted. Raises ``EntryCorrupt``: the record cannot be used; that is logged
        and counted whenever what is in Redis has changed."""
        keys = [*self._own(node_id), self._meta]
        reply = await self.run("read_log", scripts.read, keys, [position, count])
        if not reply:
            self.unreadable.pop(node_id, None)
            return None
        try:
            if reply[0] == b"CORRUPT":
                raise RecordCorrupt(f"Redis has no readable entry of node {node_id}: {text(reply[1])}")
            return self._entries.page(node_id, position, reply)
        except EntryCorrupt as error:
            self.skip_record(node_id, b" ".join(reply[:2]), error)
            raise

    def skip_record(self, node_id: str, entry: bytes, error: EntryCorrupt) -> None:
        """Log and count that a node's record cannot be used, unless that was said of the same ``entry``."""
        if self.unreadable.get(node_id) != entry:
            self.unreadable[node_id] = entry
            skipped("the record", node_id, error)

    async def read_events(self, after: int, count: int, block_s: float = 0.0) -> list[Event]:
        """Events after a number, in order, waiting up to ``block_s`` for the first. Its number shows whether
        some are missing."""
        args: list[object] = ["XREAD", "COUNT", count]
        if block_s > 0:
            args += ["BLOCK", _ms(block_s)]
        reply = await self.command(*args, "STREAMS", self._events, f"{after}-0", extra_s=block_s)
        return [self._entries.event(entry) for entry in _entries(reply)]

    async def event(self, seq: int) -> Event | None:
        reply = await self.command("XRANGE", self._events, f"{seq}-0", f"{seq}-0")
        return self._entries.event(reply[0]) if reply else None

    async def snapshot(self) -> dict[str, dict[BlockKey, Tier]]:
        """The blocks of every node, by replaying every log; slow, for checks. Corrupt records and batches are
        left out, logged and counted."""
        held: dict[str, dict[BlockKey, Tier]] = {}
        for node_id in await self.node_ids():
            try:
                page = await self.read_log(node_id, 0, 1 << 30)
            except EntryCorrupt:
                continue
            if page is None:
                continue
            held[node_id] = {}
            for batch in page.batches:
                try:
                    replay([batch], held[node_id])
                except ChangesCorrupt as error:
                    skipped("a batch in the log", node_id, error)
        return held

    def now_ms(self) -> int:
        """This host's clock, in milliseconds since 1970."""
        return self._entries.now_ms()

    def expired(self, number: int) -> bool:
        """Whether a record valid until ``number`` should have been renewed, whichever clock is right."""
        return self._entries.expired(number)

    async def _registration(self, node_id: str, epoch: int) -> Registration:
        """Ours, or what Redis has of another process's. Raises ``NodeUnknown``, ``EpochSuperseded``,
        ``EntryCorrupt``."""
        own = self._registered.get(node_id)
        if own is not None and own.epoch == epoch:
            return own
        page = await self.read_log(node_id, 0, 0)
        if page is None or page.epoch < epoch:
            raise NodeUnknown(node_id, epoch)
        if page.epoch > epoch:
            raise EpochSuperseded(node_id, epoch, page.epoch)
        return Registration(node_id, epoch, page.life, page.number, page.base)

    def _own(self, node_id: str) -> tuple[str, str]:
        return self._node_prefix + node_id, self._log_prefix + node_id

    @staticmethod
    def _checked(reply: Sequence[Any], node_id: str, epoch: int) -> Sequence[Any]:
        if reply[0] == b"SUPERSEDED":
            raise EpochSuperseded(node_id, epoch, int(reply[1]))  # digits: see ``newer`` in the scripts
        if reply[0] in (b"UNKNOWN", b"OLDER"):
            raise NodeUnknown(node_id, epoch, has_lost=reply[0] == b"OLDER")
        return reply


def replay(
    batches: Iterable[bytes], held: dict[BlockKey, Tier] | None = None, part: int = 0, num_parts: int = 1
) -> dict[BlockKey, Tier]:
    """The blocks a node holds after these batches of changes; ``held``: before, it is changed. Only keys with
    a last byte of ``part`` modulo ``num_parts``. Raises ``ChangesCorrupt`` after applying the groups before.
    """
    held = {} if held is None else held
    for batch in batches:
        for op, packed in decode(batch):
            for key in map(BlockKey, pick(packed, part, num_parts)):
                if op == REMOVED:
                    held.pop(key, None)
                else:
                    held[key] = Tier(op)
    return held


def _ms(seconds: float) -> int:
    return max(1, round(seconds * 1000))


def _entries(reply: Any) -> list[Any]:
    """The entries of the stream in an XREAD reply: None, ``[[name, entries]]``, or ``{name: [entries]}``
    (RESP3)."""
    if not reply:
        return []
    if isinstance(reply, Mapping):
        return [entry for entries in next(iter(reply.values())) for entry in entries]
    return list(reply[0][1])
