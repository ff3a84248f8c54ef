"""The KV events of one engine over ZeroMQ, with replay of missed batches."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator

import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from moonpool.kvstore.events import curve, metrics
from moonpool.kvstore.events.curve import EndpointInvalid
from moonpool.kvstore.events.messages import EventBatch, EventCorrupt, decode
from moonpool.runtime.security import process

_log = logging.getLogger(__name__)

_END = -1
# Of one frame: 65,536 blocks of 16 tokens have about 8 MiB. The connection of a larger one is closed.
_MAX_BATCH_NBYTES = 32 << 20
_MAX_QUEUED = 100_000


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
        plain: bool = False,
        replay_timeout_s: float = 2.0,
    ) -> None:
        """``endpoint``: such as ``tcp://host:5557``. ``plain``: the engine has no CURVE.

        Raises:
            EndpointInvalid: not an address, or events would pass a network in clear without ``plain``.
            ConfigError: our key is only a role's.
        """
        security = process.current()
        self._keys = {
            each: None
            if plain
            else curve.keys_for(each, security, "say that this engine has no CURVE (--plain)")
            for each in (endpoint, replay_endpoint)
            if each
        }
        self._context = zmq.asyncio.Context()
        self._replay_endpoint = replay_endpoint
        self._replay_timeout_s = replay_timeout_s
        self._endpoint = endpoint
        self._next = 0  # number after that of the last batch
        self._last_payload = b""
        self._last_ts = 0.0
        self._live: int | None = None  # number of the last batch from the socket, not from a replay
        self._socket = self._context.socket(zmq.SUB)
        self._socket.set(zmq.RCVHWM, _MAX_QUEUED)
        self._socket.subscribe(topic)
        self._monitor = self._socket.get_monitor_socket(zmq.Event.DISCONNECTED)
        self._connect(self._socket, endpoint)

    def _connect(self, socket: zmq.asyncio.Socket, endpoint: str) -> None:
        socket.set(zmq.MAXMSGSIZE, _MAX_BATCH_NBYTES)
        curve.connect(socket, self._keys[endpoint])
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
        """Run forever. ``LOST`` comes before the first batch after a gap, when the engine restarts, and for a
        batch that cannot be read."""
        async for each in self._catch_up():
            yield each
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
        live, self._live = self._live, seq
        # Messages of the socket come once and in order. An older number is of a new life, or was replayed.
        if (live is not None and seq <= live) or (seq < self._next and self._is_newer(payload)):
            yield self._begin_again(f"its numbers went back from {self._next - 1} to {seq}")
        expected = self._next
        if await self._reconnected() or seq > expected:
            async for each in self._catch_up():
                yield each
        if seq < self._next:
            return
        if expected:
            metrics.lost_batches.inc(max(seq - max(expected, self._next), 0))
        if seq > self._next > 0:
            yield self._begin_again(f"events {self._next} to {seq - 1} are missing and cannot be replayed")
        yield self._note(seq, payload)

    async def _reconnected(self) -> bool:
        """Whether the connection broke since the last call: the engine may have restarted."""
        broke = False
        while await self._monitor.poll(0):
            event = parse_monitor_message(await self._monitor.recv_multipart())
            broke = broke or event["event"] == zmq.Event.DISCONNECTED
        return broke

    async def _catch_up(self) -> AsyncIterator[EventBatch | Lost]:
        """Batches that the engine still has and that were not received. After ``LOST`` all that it has: the
        last batch received is not among them, or differs."""
        found = await self._replay(max(self._next - 1, 0))
        if self._next > 0:
            if found[:1] != [(self._next - 1, self._last_payload)]:
                yield self._begin_again(f"it cannot replay what came after {self._next - 1}")
                found = await self._replay(0)
            else:
                found = found[1:]
        for seq, payload in found:
            metrics.replayed_batches.inc()
            yield self._note(seq, payload)

    def _begin_again(self, reason: str) -> Lost:
        _log.warning("all blocks of the engine at %s are forgotten: %s", self._endpoint, reason)
        metrics.restarts.inc()
        self._next, self._last_payload, self._last_ts = 0, b"", 0.0
        return LOST

    async def _replay(self, first: int) -> list[tuple[int, bytes]]:
        """(number, payload) of the batches the engine still has from number ``first``; empty: it does not
        answer."""
        if not self._replay_endpoint:
            return []
        found: list[tuple[int, bytes]] = []
        socket = self._context.socket(zmq.DEALER)
        try:
            self._connect(socket, self._replay_endpoint)
            await socket.send_multipart([b"", first.to_bytes(8, "big")])
            async with asyncio.timeout(self._replay_timeout_s):
                while True:
                    frames = await socket.recv_multipart()
                    if len(frames) < 2 or len(frames[-2]) != 8:
                        metrics.corrupt_batches.inc()
                        _log.warning("ignored a replayed message of %d frames", len(frames))
                        continue
                    seq = int.from_bytes(frames[-2], "big", signed=True)
                    if seq == _END:
                        return found
                    if seq >= first and (not found or seq == found[-1][0] + 1):
                        found.append((seq, frames[-1]))
        except TimeoutError:
            _log.warning("no replay from %s within %g s", self._replay_endpoint, self._replay_timeout_s)
            return []
        finally:
            socket.close(linger=0)

    def _is_newer(self, payload: bytes) -> bool:
        """Whether a batch was published after the last one."""
        try:
            return decode(payload).ts > self._last_ts
        except EventCorrupt:
            return False

    def _note(self, seq: int, payload: bytes) -> EventBatch | Lost:
        """``payload`` is the last batch now. ``LOST``: it cannot be read."""
        self._next, self._last_payload = seq + 1, payload
        metrics.batches.inc()
        try:
            batch = decode(payload)
        except EventCorrupt as error:
            metrics.corrupt_batches.inc()
            _log.error("all blocks of the engine at %s are forgotten: %s", self._endpoint, error)
            return LOST
        self._last_ts = batch.ts
        return batch
