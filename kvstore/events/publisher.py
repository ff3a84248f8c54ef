"""Our blocks as KV events, for routers and tools of vLLM."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict, deque
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import zmq
import zmq.asyncio
import zmq.auth.asyncio

from moonpool.kvstore.blocks.keys import BlockKey
from moonpool.kvstore.blocks.tier import Tier
from moonpool.kvstore.events import curve, metrics
from moonpool.kvstore.events.curve import EndpointInvalid
from moonpool.kvstore.events.messages import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    KvEvent,
    encode,
)
from moonpool.runtime.config.options import EventsOptions
from moonpool.runtime.security import process
from moonpool.runtime.service.vital import cancel_and_wait, vital

_log = logging.getLogger(__name__)

_MEDIA = {Tier.POOL: "GPU", Tier.HOST: "CPU", Tier.SSD: "STORAGE"}
_END = (-1).to_bytes(8, "big", signed=True)
# Described blocks that are not stored yet; more than the running prompts of any pool.
_MAX_DESCRIBED = 1 << 16
# What subscribers send: their topics, and the numbers they missed.
_MAX_RECEIVED_NBYTES = 4096


_Block = tuple[BlockKey | None, bytes]  # the key before it, and its tokens as int32


class EventPublisher:
    """A listener of ``IndexPublisher`` that sends changes every ``events.interval_s``.

    ``block_hashes`` are our keys (16 bytes). Call ``describe`` with a block's tokens before it is stored;
    blocks without tokens are not announced. Slow subscribers miss batches and use the replay socket.
    """

    def __init__(self, options: EventsOptions, block_size: int, *, rank: int = 0) -> None:
        """``rank``: the number of this replica."""
        self.endpoint = self.replay_endpoint = ""  # as bound
        self._options = options
        self._block_size = block_size
        self._rank = rank
        self._described: OrderedDict[BlockKey, _Block] = OrderedDict()
        self._announced: dict[BlockKey, tuple[str, _Block]] = {}  # with the medium it was announced in
        self._pending: list[KvEvent] = []
        self._sent: deque[tuple[bytes, bytes]] = deque(maxlen=options.replay_batches)
        self._next_seq = 0
        self._tasks: list[asyncio.Task[None]] = []
        self._authenticator: zmq.auth.asyncio.AsyncioAuthenticator | None = None

    async def start(self) -> None:
        """Bind; beyond this machine with CURVE. Raises ``EndpointInvalid``, ``ConfigError``."""
        endpoints = [self._options.zmq_endpoint, self._options.replay_endpoint]
        security = process.current()
        keys = [curve.keys_for(each, security, "use tcp://127.0.0.1 or ipc://") for each in endpoints if each]
        self._context = zmq.asyncio.Context()
        if used := next((each for each in keys if each is not None), None):
            self._authenticator = curve.authenticate(self._context, used)
        self._pub = self._context.socket(zmq.PUB)
        self.endpoint = self._bind(self._pub, endpoints[0], keys[0])
        self._tasks = [vital(self._send_forever(), "KV events")]
        if endpoints[1]:
            self._router = self._context.socket(zmq.ROUTER)
            # It drops what a subscriber's queue has no room for: that must be all batches and the end.
            self._router.set(zmq.SNDHWM, self._options.replay_batches + 1)
            self.replay_endpoint = self._bind(self._router, endpoints[1], keys[1])
            self._tasks.append(vital(self._replay_forever(), "replay of KV events"))
        # Subscribers of a former process on this address must forget its blocks.
        self._pending.append(AllBlocksCleared())

    def _bind(self, socket: zmq.asyncio.Socket, endpoint: str, keys: curve.CurveKeys | None) -> str:
        socket.set(zmq.MAXMSGSIZE, _MAX_RECEIVED_NBYTES)
        curve.serve(socket, keys)
        try:
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            self._destroy()
            raise EndpointInvalid(f"cannot publish KV events at {endpoint!r}: {error}") from error
        return socket.get_string(zmq.LAST_ENDPOINT)

    async def close(self) -> None:
        await cancel_and_wait(*self._tasks)
        if self._tasks:
            self._tasks = []
            self._destroy()

    def _destroy(self) -> None:
        if self._authenticator is not None:
            self._authenticator.stop()
            self._authenticator = None
        self._context.destroy(linger=0)

    def describe(self, keys: Sequence[BlockKey], token_ids: npt.NDArray[np.int32], first: int = 0) -> None:
        """``keys``: a chain from its start; ``token_ids``: all its tokens. Blocks from ``first`` on may be
        stored soon."""
        size = self._block_size
        for number in range(first, min(len(keys), len(token_ids) // size)):
            key = keys[number]
            if key not in self._announced and key not in self._described:
                tokens = token_ids[number * size : (number + 1) * size].tobytes()
                self._described[key] = (keys[number - 1] if number else None, tokens)
        while len(self._described) > _MAX_DESCRIBED:
            self._described.popitem(last=False)

    def stored(self, key: BlockKey, tier: Tier) -> None:
        medium = _MEDIA[tier]
        before, block = self._announced.get(key, ("", None))
        block = block or self._described.pop(key, None)
        if block is None or before == medium:
            return
        self._announced[key] = (medium, block)
        self._announce_stored(key, block, medium)
        if before:
            self._announce_removed(key, before)

    def removed(self, key: BlockKey) -> None:
        medium, _ = self._announced.pop(key, ("", None))
        if medium:
            self._announce_removed(key, medium)

    def _announce_stored(self, key: BlockKey, block: _Block, medium: str) -> None:
        parent, tokens = block[0], np.frombuffer(block[1], np.int32).tolist()
        last = self._pending[-1] if self._pending else None
        if isinstance(last, BlockStored) and last.medium == medium and parent == last.block_hashes[-1]:
            hashes, all_tokens = [*last.block_hashes, key], [*last.token_ids, *tokens]
            self._pending[-1] = BlockStored(
                hashes, last.parent_block_hash, all_tokens, self._block_size, medium=medium
            )
        else:
            self._pending.append(BlockStored([key], parent, tokens, self._block_size, medium=medium))

    def _announce_removed(self, key: BlockKey, medium: str) -> None:
        last = self._pending[-1] if self._pending else None
        if isinstance(last, BlockRemoved) and last.medium == medium:
            self._pending[-1] = BlockRemoved([*last.block_hashes, key], medium)
        else:
            self._pending.append(BlockRemoved([key], medium))

    async def _send_forever(self) -> None:
        topic = self._options.topic.encode()
        while True:
            await asyncio.sleep(self._options.interval_s)
            if not self._pending:
                continue
            events, self._pending = self._pending, []
            payload = encode(EventBatch(time.time(), events, self._rank))
            seq = self._next_seq.to_bytes(8, "big")
            self._next_seq += 1
            self._sent.append((seq, payload))
            await self._pub.send_multipart([topic, seq, payload])
            metrics.published_batches.inc()

    async def _replay_forever(self) -> None:
        topic = self._options.topic.encode()
        while True:
            frames = await self._router.recv_multipart()
            if len(frames) != 3 or len(frames[2]) != 8:
                _log.warning("ignored a replay request of %d frames; it has 3", len(frames))
                continue
            client, _, start = frames
            for seq, payload in list(self._sent):
                if seq >= start:
                    await self._router.send_multipart([client, b"", topic, seq, payload])
            await self._router.send_multipart([client, b"", b"", _END, b""])
