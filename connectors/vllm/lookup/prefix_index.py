"""The index, followed in a thread of the engine's scheduler."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from typing import TypeVar

from moonpool.connectors.service_thread import OnceAMinute, ServiceThread
from moonpool.kvstore.blocks.keys import BlockKey
from moonpool.kvstore.errors import IndexUnavailable
from moonpool.kvstore.index.mirror import IndexMirror
from moonpool.kvstore.index.redis.client import connect
from moonpool.kvstore.index.redis.kv_index import KVIndex
from moonpool.runtime.config.options import IndexOptions

log = logging.getLogger(__name__)

Answer = TypeVar("Answer")

_RETRY_S = 1.0
# Longest that the scheduler waits for an answer from memory: the thread may be held up by a busy machine.
_ANSWER_S = 0.02


@dataclass(frozen=True, slots=True)
class Holder:
    node_id: str
    num_blocks: int  # of the chain's first ones
    address: bytes  # KvAddress, packed
    num_on_disk: int = 0  # of its blocks, the last ones


class PrefixIndex:
    """A copy of the index; without Redis it answers from what it has. Close it."""

    def __init__(self, options: IndexOptions, answer_s: float = _ANSWER_S) -> None:
        self._options = options
        self._answer_s = answer_s
        self._mirror: IndexMirror | None = None
        self._warnings = OnceAMinute()
        self._thread = ServiceThread("index", self._live)

    def holders(self, keys: Sequence[BlockKey]) -> list[Holder]:
        """The nodes with a prefix of this chain. Empty if it is not known in time."""
        return self._ask(lambda mirror: _holders(mirror, keys), [])

    def in_other_layout(self, own: bytes, name: Callable[[bytes], BlockKey]) -> str:
        """A node that has a block under the fingerprint of another layout than ``own``; empty: none is known.
        ``name(fingerprint)``: the block's key there."""
        return self._ask(lambda mirror: _in_other_layout(mirror, own, name), "")

    def address_of(self, node_id: str) -> bytes:
        """The packed KvAddress of a node; empty: it is not known."""
        mirror = self._mirror
        # One look-up in a dict, which the other thread may change meanwhile.
        record = None if mirror is None else mirror.nodes.get(node_id)
        return b"" if record is None else record.kv_address

    def _ask(self, question: Callable[[IndexMirror], Answer], unknown: Answer) -> Answer:
        """The engine's scheduler asks: it waits for a moment at most, and never fails."""
        if self._mirror is None:
            return unknown
        answer: Future[Answer] = Future()

        def find() -> None:
            try:
                answer.set_result(unknown if self._mirror is None else question(self._mirror))
            except Exception as error:
                answer.set_exception(error)

        try:
            self._thread.loop.call_soon_threadsafe(find)
            return answer.result(self._answer_s)
        except FutureTimeout:
            return unknown
        except Exception as error:
            # The engine serves on without the cache.
            self._warnings.say(f"the index was not asked: {error!r}")
            return unknown

    def close(self) -> None:
        self._thread.close()

    async def _live(self, ending: asyncio.Event) -> None:
        redis = connect(self._options.redis_url)
        mirror = IndexMirror(
            KVIndex(redis, self._options.namespace),
            lease_ttl_s=self._options.lease_ttl_s,
            on_status=lambda sentence: log.warning("the index: %s", sentence),
        )
        ended = asyncio.ensure_future(ending.wait())
        try:
            while not ended.done():
                try:
                    await mirror.start()
                except IndexUnavailable as error:
                    self._warnings.say(f"nothing is loaded until Redis answers: {error}")
                    await asyncio.wait((ended,), timeout=_RETRY_S)
                    continue
                self._mirror = mirror
                await ended
        finally:
            self._mirror = None
            ended.cancel()
            await mirror.close()
            await redis.aclose()


def _holders(mirror: IndexMirror, keys: Sequence[BlockKey]) -> list[Holder]:
    prefixes = {name: length for name, length in mirror.longest_prefix(keys).items() if name in mirror.nodes}
    slow = mirror.slow_blocks(keys, prefixes)
    return [
        Holder(name, length, address, slow.get(name, (0, 0))[1])
        for name, length in prefixes.items()
        if (address := mirror.nodes[name].kv_address)
    ]


def _in_other_layout(mirror: IndexMirror, own: bytes, name: Callable[[bytes], BlockKey]) -> str:
    others = {record.layout for record in mirror.nodes.values()} - {"", own.hex()}
    for layout in others:
        try:
            fingerprint = bytes.fromhex(layout)
        except ValueError:
            continue  # this node's blocks are not known; others' are
        holder = next(iter(mirror.longest_prefix([name(fingerprint)])), "")
        if holder:
            return holder
    return ""
