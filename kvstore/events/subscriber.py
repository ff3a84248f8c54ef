"""The KV events of one engine over ZeroMQ, with replay of missed batches."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator

import zmq
import zmq.asyncio

from moonpool.kvstore.errors import StoreError
from moonpool.kvstore.events import metrics
from moonpool.kvstore.events.messages import EventBatch, EventCorrupt, decode

_log = logging.getLogger(__name__)

_END = -1


class EndpointInvalid(StoreError):
    """ZeroMQ cannot use this address; ``str(error)`` names it."""


class Lost:
    """Events are missing for good: discard everything known of the engine."""


LOST = Lost()


class EventSource:
    """Subscribes to an engine's PUB socket, and replays missed batches if it has a replay socket."""

    def __init__(
        self,
        endpoint: str,
        replay_endpoint: str = "",
        *,
        topic: str = "",
        replay_timeout_s: float = 2.0,
        max_queued: int = 100_000,
    ) -> None:
        """``endpoint``: such as ``tcp://host:5557``. Raises ``EndpointInvalid``."""
        self._context = zmq.asyncio.Context()
        self._replay_endpoint = replay_endpoint
        self._replay_timeout_s = replay_timeout_s
        self._last: int | None = None  # number of the last batch
        self._socket = self._context.socket(zmq.SUB)
        self._socket.set(zmq.RCVHWM, max_queued)
        self._socket.subscribe(topic)
        self._connect(self._socket, endpoint)

    def _connect(self, socket: zmq.asyncio.Socket, endpoint: str) -> None:
        try:
            socket.connect(endpoint)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise EndpointInvalid(
                f"cannot connect to {endpoint!r}: {error}; an address is like tcp://10.0.0.7:5557"
            ) from error

    def close(self) -> None:
        self._context.destroy(linger=0)

    async def batches(self) -> AsyncIterator[EventBatch | Lost]:
        """Run forever. ``LOST`` comes before the first batch after a gap, and when the engine restarts."""
        for batch in await self._catch_up(0):
            yield batch
        while True:
            frames = await self._socket.recv_multipart()
            if len(frames) < 3 or len(frames[-2]) != 8:
                metrics.corrupt_batches.inc()
                _log.warning("ignored a message of %d frames: not a KV event", len(frames))
                continue
            seq = int.from_bytes(frames[-2], "big")
            async for each in self._in_order(seq, frames[-1]):
                yield each

    async def _in_order(self, seq: int, payload: bytes) -> AsyncIterator[EventBatch | Lost]:
        last = self._last
        if last is not None and seq <= last:
            if seq > 0:
                return  # known from the replay
            _log.warning("the engine restarted: its numbers are at %d after %d", seq, last)
            self._last = None
            yield LOST
        elif (last is None and seq > 0) or (last is not None and seq > last + 1):
            first = 0 if last is None else last + 1
            for batch in await self._catch_up(first):
                yield batch
            if self._last is not None and seq <= self._last:
                return
            if (self._last if self._last is not None else first - 1) + 1 < seq:
                metrics.lost_batches.inc(seq - (first if self._last is None else self._last + 1))
                if last is not None:
                    _log.warning("events up to %d are missing and cannot be replayed", seq - 1)
                    yield LOST
        if (one := self._decoded(payload)) is not None:
            yield one
        self._last = seq

    async def _catch_up(self, first: int) -> list[EventBatch]:
        """The batches the engine still has from number ``first``, up to a gap."""
        if not self._replay_endpoint:
            return []
        found: list[EventBatch] = []
        socket = self._context.socket(zmq.DEALER)
        try:
            self._connect(socket, self._replay_endpoint)
            await socket.send_multipart([b"", first.to_bytes(8, "big")])
            async with asyncio.timeout(self._replay_timeout_s):
                while True:
                    frames = await socket.recv_multipart()
                    seq = int.from_bytes(frames[-2], "big", signed=True)
                    if seq == _END:
                        break
                    if seq != first and not (self._last is None and not found):
                        continue
                    if (batch := self._decoded(frames[-1])) is not None:
                        found.append(batch)
                    self._last, first = seq, seq + 1
                    metrics.replayed_batches.inc()
        except TimeoutError:
            _log.warning("no replay from %s within %g s", self._replay_endpoint, self._replay_timeout_s)
        finally:
            socket.close(linger=0)
        return found

    @staticmethod
    def _decoded(payload: bytes) -> EventBatch | None:
        metrics.batches.inc()
        try:
            return decode(payload)
        except EventCorrupt as error:
            metrics.corrupt_batches.inc()
            _log.error("a batch of KV events was skipped: %s", error)
            return None
