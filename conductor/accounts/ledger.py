"""What tenants used, and how long nodes were there, by day in Redis:

    {ns}:usage:DAY            hash  "TENANT:FIELD" -> a sum; "name:TENANT" -> its name, encrypted
    {ns}:usage:DAY:nodes      hash  "first:NODE@EPOCH", "last:NODE@EPOCH" -> its totals then, JSON
    {ns}:usage:flushed:ID     hash  number of the latest batch of a conductor: each is added once

``DAY`` is that of UTC, ``TENANT`` a keyed digest. Days are kept for ``KEEP_DAYS``. No request waits for
Redis: a task of its own adds what has come together. Each conductor writes the totals of all nodes, which are
the same.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, date, datetime
from hashlib import blake2b
from typing import Any, Final

import orjson
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from prometheus_client import Counter as Metric

from moonpool.conductor.accounts.node_totals import NodeTotals
from moonpool.conductor.accounts.spent import USEFUL, WASTES, Spent
from moonpool.kvstore.errors import IndexUnavailable
from moonpool.kvstore.eviction.tenant_metrics import TenantLabels
from moonpool.kvstore.index.redis.kv_index import KVIndex
from moonpool.kvstore.index.redis.lua_scripts import Script
from moonpool.kvstore.index.redis.node_record import NodeRecord
from moonpool.kvstore.index.redis.redis_calls import pairs
from moonpool.kvstore.index.redis.seal import key_of_cluster
from moonpool.runtime.service.vital import cancel_and_wait, restarted

log = logging.getLogger(__name__)

KEEP_DAYS: Final = 35
MOST_TENANTS: Final = 1000
"""With Prometheus series of their own."""
MAX_FIELDS: Final = 1 << 14
"""Of a day's hash: a thousand tenants. Those that come later are one, ``OTHERS``."""
MAX_NODES: Final = 4096
"""Starts of nodes that a day remembers."""
OTHERS: Final = "(others)"
PERIOD_S: Final = 2.0
_OTHERS_DIGEST = "others"
_COUNTS = ("requests", "prompt_tokens", "output_tokens")
_SECONDS = ("prefill_s", "decode_s")
FIELDS: Final = (*_COUNTS, *_SECONDS, USEFUL, *WASTES)
_NONCE_NBYTES = 12

spent_seconds = Metric(
    "moonpool_spent_seconds",
    "Seconds of nodes' steps by what came of them: useful, or why they were wasted (docs/operations.md)",
    ["model_name", "tenant", "use"],
)


@dataclass(slots=True)
class DayUsage:
    """One day. ``tenants``: sums by ``FIELDS``, by name. ``nodes``: of each start of a node."""

    day: str
    tenants: dict[str, Counter[str]] = field(default_factory=dict)
    nodes: dict[str, NodeTotals] = field(default_factory=dict)


class Ledger:
    """Of one model, by one conductor, added to those of the others. ``start`` it."""

    def __init__(
        self,
        index: KVIndex,
        model: str,
        conductor_id: str,
        records: Callable[[], Iterable[NodeRecord]],
        unix_clock: Callable[[], float] = time.time,
    ) -> None:
        """``records``: of the nodes. Raises ``ConfigError``: this process has the key of one role only."""
        self._index, self._model, self._records, self._clock = index, model, records, unix_clock
        key = key_of_cluster("usage of tenants")
        self._labels = TenantLabels(MOST_TENANTS)
        self._cipher = AESGCM(key)
        self._digest: Callable[[bytes], Any] = lambda name: blake2b(name, key=key, digest_size=8)
        self._flushed = f"{{{index.namespace}}}:usage:flushed:{conductor_id}"
        self._pending: dict[str, dict[str, Counter[str]]] = {}  # by day, by tenant
        self._sending: tuple[str, dict[str, Counter[str]]] | None = None  # its day; perhaps it was added
        self._number = 1  # of the batch that is sent, or the next one
        self._latest: dict[str, NodeTotals] = {}  # by node and epoch, as of the latest flush
        self._turn = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = restarted(self._run, "usage of tenants")

    async def close(self) -> None:
        """Write what is left, unless Redis does not answer. Idempotent."""
        task, self._task = self._task, None
        if task is None:
            return
        await cancel_and_wait(task)
        try:
            await self.flush()
        except IndexUnavailable as error:
            log.warning("the usage of the last seconds is lost: %s", error)

    def add(self, tenant: str, spent: Spent, prompt_tokens: int, output_tokens: int) -> None:
        """A request has ended. ``tenant``: the name of a configured one, or empty."""
        uses = spent.uses()
        self._add(
            tenant,
            {"requests": 1, "prompt_tokens": prompt_tokens, "output_tokens": output_tokens}
            | {"prefill_s": spent.prefill_s, "decode_s": spent.decode_s}
            | uses,
        )
        for use, seconds in uses.items():
            spent_seconds.labels(self._model, tenant and self._labels.of(tenant), use).inc(seconds)

    def add_late(self, seconds: float) -> None:
        """A node worked for a request that has ended, or for an attempt that was given up."""
        self._add("", {"abandoned": seconds, "decode_s": seconds})
        spent_seconds.labels(self._model, "", "abandoned").inc(seconds)

    def _add(self, tenant: str, amounts: Mapping[str, float]) -> None:
        self._pending.setdefault(self._today(), {}).setdefault(tenant, Counter()).update(amounts)

    async def flush(self) -> None:
        """Write what is new. Raises ``IndexUnavailable``: tried again with the next call."""
        async with self._turn:
            while self._sending is not None or self._pending:
                if self._sending is None:
                    day = min(self._pending)
                    self._sending = (day, self._pending.pop(day))
                await self._send(*self._sending)
                self._sending, self._number = None, self._number + 1
            await self._note_nodes()

    async def read(self, days: Iterable[str], tenant: str | None = None) -> list[DayUsage]:
        """Usage of all conductors, as of the latest flush of each. ``tenant``: of it alone, without nodes.

        Raises ``IndexUnavailable``.
        """
        await self.flush()
        return [await self._read_day(day, tenant) for day in days]

    async def _read_day(self, day: str, tenant: str | None) -> DayUsage:
        usage, place = DayUsage(day), self._place(day)
        names: dict[str, str] = {_OTHERS_DIGEST: OTHERS}
        sums: dict[str, Counter[str]] = {}
        for key, value in pairs(await self._index.command("HGETALL", place)):
            head, _, rest = key.decode().partition(":")
            if head == "name":
                names[rest] = self._name(place, rest, value)
            elif rest in FIELDS:
                sums.setdefault(head, Counter()).update({rest: float(value)})
        for digest, counter in sums.items():
            if (name := names.get(digest)) is not None and tenant in (None, name):
                usage.tenants[name] = counter
        if tenant is None:
            usage.nodes = _nodes(dict(pairs(await self._index.command("HGETALL", f"{place}:nodes"))))
        return usage

    # ------------------------------------------------------------------ writing

    async def _run(self) -> None:
        lost = False
        while True:
            try:
                await self.flush()
                lost = False
            except IndexUnavailable as error:
                if not lost:
                    log.warning("usage is not written for now: %s", error)
                lost = True
            await asyncio.sleep(PERIOD_S)

    async def _send(self, day: str, tenants: Mapping[str, Counter[str]]) -> None:
        place = self._place(day)
        args: list[object] = [self._number, KEEP_DAYS * 86_400_000, MAX_FIELDS]
        for tenant, amounts in tenants.items():
            digest = self._digest(tenant.encode()).hexdigest()
            name = self._sealed(place, digest, tenant)
            for kind, amount in amounts.items():
                args += [digest, name, kind, f"{amount:.9f}"]
        await self._index.run("usage", _ADD, [place, self._flushed], args)

    async def _note_nodes(self) -> None:
        day, before = self._today(), self._latest
        self._latest = {}
        args: list[object] = [KEEP_DAYS * 86_400_000, 2 * MAX_NODES]
        for record in list(self._records()):
            if (totals := NodeTotals.of(record)) is None:
                continue
            name = f"{record.node_id}@{record.epoch}"
            # What the day begins with, unless another conductor has said that already.
            began_today = _day_of(record.epoch / 1e9) == day
            first = before.get(name) or (totals.at_start() if began_today else totals)
            self._latest[name] = totals
            args += [name, orjson.dumps(asdict(first)), orjson.dumps(asdict(totals))]
        if self._latest:
            await self._index.run("usage of nodes", _NOTE, [f"{self._place(day)}:nodes"], args)

    # ------------------------------------------------------------------ names

    def _today(self) -> str:
        return _day_of(self._clock())

    def _place(self, day: str) -> str:
        return f"{{{self._index.namespace}}}:usage:{day}"

    def _sealed(self, place: str, digest: str, name: str) -> bytes:
        nonce = os.urandom(_NONCE_NBYTES)
        return nonce + self._cipher.encrypt(nonce, name.encode(), f"{place}:{digest}".encode())

    def _name(self, place: str, digest: str, data: bytes) -> str:
        try:
            sealed, nonce = data[_NONCE_NBYTES:], data[:_NONCE_NBYTES]
            return self._cipher.decrypt(nonce, sealed, f"{place}:{digest}".encode()).decode()
        except (InvalidTag, ValueError):
            # Of another key, or written by something else.
            log.error("the name of a tenant in Redis cannot be read: %s in %s", digest, place)
            return f"(unreadable {digest})"


def days_back(last: date, count: int) -> list[str]:
    """The last ``count`` days up to ``last``, newest first; fewer at the beginning of the calendar."""
    newest = last.toordinal()
    return [date.fromordinal(day).isoformat() for day in range(newest, max(newest - count, 0), -1)]


def _day_of(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s, UTC).date().isoformat()


def _nodes(found: Mapping[bytes, bytes]) -> dict[str, NodeTotals]:
    totals = {}
    for key, value in found.items():
        kind, _, name = key.decode().partition(":")
        first, last = found.get(b"first:" + name.encode()), value
        if kind == "last" and first is not None:
            totals[name] = NodeTotals(**orjson.loads(last)).since(NodeTotals(**orjson.loads(first)))
    return totals


# KEYS usage flushed | ARGV number ttl_ms max_fields, then for each sum: tenant name field amount
_ADD = Script(
    """
if tonumber(redis.call('HGET', KEYS[2], 'number') or '0') >= tonumber(ARGV[1]) then return 0 end
for i = 4, #ARGV, 4 do
  local tenant = ARGV[i]
  if not redis.call('HGET', KEYS[1], 'name:' .. tenant) then
    if redis.call('HLEN', KEYS[1]) >= tonumber(ARGV[3]) then tenant = 'others'
    else redis.call('HSET', KEYS[1], 'name:' .. tenant, ARGV[i + 1]) end
  end
  redis.call('HINCRBYFLOAT', KEYS[1], tenant .. ':' .. ARGV[i + 2], ARGV[i + 3])
end
redis.call('HSET', KEYS[2], 'number', ARGV[1])
redis.call('PEXPIRE', KEYS[1], ARGV[2])
redis.call('PEXPIRE', KEYS[2], 86400000)
return 1
"""
)

# KEYS nodes | ARGV ttl_ms max_fields, then for each node: name first last
_NOTE = Script(
    """
for i = 3, #ARGV, 3 do
  if redis.call('HGET', KEYS[1], 'last:' .. ARGV[i]) or redis.call('HLEN', KEYS[1]) < tonumber(ARGV[2]) then
    redis.call('HSETNX', KEYS[1], 'first:' .. ARGV[i], ARGV[i + 1])
    redis.call('HSET', KEYS[1], 'last:' .. ARGV[i], ARGV[i + 2])
  end
end
redis.call('PEXPIRE', KEYS[1], ARGV[1])
return 1
"""
)
