"""The decode node's service: take over prompts, generate, send tokens to the conductors."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

from opentelemetry.context import Context

from moonpool.decode_node.outbox import Outbox
from moonpool.decode_node.takeover import take_over
from moonpool.engine.batching.sequence import Sequence
from moonpool.engine.batching.step_plan import StepEvent
from moonpool.engine.node.messages import sequence_of, token_out
from moonpool.engine.node.metrics import DECODE_TOKENS, RECEIVED_BLOCKS, RECEIVED_BYTES
from moonpool.engine.node.node import EngineNode, Key
from moonpool.engine.node.service import RpcContext, node_servicers
from moonpool.kvstore.blocks import keys as block_keys
from moonpool.protos import node_pb2, node_pb2_grpc
from moonpool.runtime import rpc
from moonpool.runtime.config.options import Config
from moonpool.runtime.errors import LifeEnded, MoonpoolError, RemoteError
from moonpool.runtime.observing import tracing
from moonpool.runtime.security import process
from moonpool.runtime.security.roles import Caller, NotPermitted

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Request:
    conductor_id: str
    sequence: Sequence
    takeover: asyncio.Task[None]
    began_s: float
    parent_span: Context


class DecodeNode(EngineNode, node_pb2_grpc.DecodeNodeServicer):
    """Serves ``protos.DecodeNode``."""

    role = "decode"

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._requests: dict[Key, _Request] = {}
        self._outboxes: dict[str, Outbox] = {}
        self._owners: dict[str, Caller] = {}  # of the outboxes, where callers prove who they are

    def servicers(self) -> list[rpc.Servicer]:
        self.engine.on_step = self._on_step
        return [*node_servicers(self), (node_pb2_grpc.add_DecodeNodeServicer_to_server, self)]

    def num_requests(self) -> int:
        return len(self._requests)

    async def stop(self) -> None:
        for key in list(self._requests):
            self.cancel(key)

    def restart(self) -> None:
        super().restart()
        # Unsent messages belong to the last start.
        self._outboxes.clear()
        self._owners.clear()

    def cancel(self, key: Key) -> None:
        request = self._requests.pop(key, None)
        if request is not None:
            request.takeover.cancel()
            self.engine.cancel(*key)

    def sweep(self) -> None:
        super().sweep()
        for conductor_id, outbox in list(self._outboxes.items()):
            if outbox.unread_s < self.config.node.orphan_s:
                continue
            orphans = [key for key, r in self._requests.items() if r.conductor_id == conductor_id]
            if orphans:
                log.warning(
                    "conductor %s does not read: %d requests are cancelled", conductor_id, len(orphans)
                )
            for key in orphans:
                self.cancel(key)
            del self._outboxes[conductor_id]
            self._owners.pop(conductor_id, None)

    async def Decode(self, request: node_pb2.DecodeRequest, context: RpcContext) -> node_pb2.DecodeReply:
        self.check_takes_work()
        self._check_owner(request.conductor_id)
        work = request.work
        sequence = sequence_of(work, arrived_s=time.monotonic())
        self.tenants.charge(work, sequence.keys, self.store.tiers)
        num_local = len(self.engine.pool.match(block_keys.unpack(work.block_keys)))
        takeover = asyncio.create_task(self._take_over(request, sequence))
        self._requests[sequence.key] = _Request(
            request.conductor_id, sequence, takeover, time.monotonic(), tracing.current_context()
        )
        return node_pb2.DecodeReply(
            num_cached_tokens=num_local * self.engine.pool.block_size, epoch=self.epoch
        )

    async def Tokens(
        self, request: node_pb2.TokensRequest, context: RpcContext
    ) -> AsyncIterator[node_pb2.StepTokens]:
        self._check_owner(request.conductor_id)
        async for message in self._outbox(request.conductor_id).messages():
            yield message

    async def _take_over(self, request: node_pb2.DecodeRequest, sequence: Sequence) -> None:
        """Read the blocks and start decoding. Errors go to the conductor."""
        key, engine = sequence.key, self.engine
        try:
            async with asyncio.timeout(request.work.deadline_unix_s - self.clock()):
                finished, received = await take_over(
                    engine,
                    self.exchange,
                    self.store,
                    sequence,
                    request.prefill_address,
                    deadline_s=self.config.transfer.deadline_s,
                    follower=self.node_id,
                )
            RECEIVED_BYTES.inc(received.nbytes)
            RECEIVED_BLOCKS.labels("read").inc(received.num_blocks)
            RECEIVED_BLOCKS.labels("local").inc(received.num_local_blocks)
            if not finished:
                engine.add(sequence)
        except BaseException as error:
            engine.release(sequence)
            self._requests.pop(key, None)
            if not isinstance(error, Exception):
                raise
            if isinstance(error, MoonpoolError | TimeoutError):
                reason = str(error) or "the request's deadline passed"
                log.warning("%s was not taken over: %s", sequence.request_id, reason)
            else:
                # A defect. The conductor must learn of it, or the request would wait until its deadline.
                reason = f"{type(error).__name__}: {error}"
                log.exception("%s was not taken over", sequence.request_id)
            self._outbox(request.conductor_id).put(
                node_pb2.TokenOut(
                    request_id=key[0],
                    attempt=key[1],
                    finish_reason=node_pb2.FINISH_ERROR,
                    error=reason,
                    # The prefill node's.
                    ended_life=isinstance(error, RemoteError) and error.kind == LifeEnded.__name__,
                )
            )
            return
        self._outbox(request.conductor_id).put(
            node_pb2.TokenOut(request_id=key[0], attempt=key[1], received=received)
        )
        if finished:
            engine.release(sequence)
            self._requests.pop(key, None)

    def _on_step(self, events: list[StepEvent]) -> None:
        batches: dict[str, list[node_pb2.TokenOut]] = {}
        num_tokens = 0
        for event in events:
            key = event.sequence.key
            request = self._requests.get(key)
            if request is None:
                continue  # cancelled
            num_tokens += event.token_id >= 0
            if event.token_id >= 0 or event.finish_reason or event.preempted or event.ended_life:
                batches.setdefault(request.conductor_id, []).append(token_out(event))
            if event.finish_reason:
                ago_s = time.monotonic() - request.began_s
                tracing.record_span("decode", ago_s=ago_s, seconds=ago_s, within=request.parent_span)
                del self._requests[key]
        DECODE_TOKENS.inc(num_tokens)
        for conductor_id, tokens in batches.items():
            self._outbox(conductor_id).put_step(tokens)

    def _describe_load(self, message: node_pb2.StepTokens) -> None:
        stats = self.engine.stats()
        message.num_running = stats.num_running
        message.num_waiting = stats.num_waiting
        message.num_context_tokens = stats.num_context_tokens
        message.num_free_blocks = stats.num_available_blocks

    def _check_owner(self, conductor_id: str) -> None:
        """The first caller that uses an id owns it. Raises ``NotPermitted`` for others: they would take its
        users' tokens."""
        who = process.caller.get()
        if who is not None and self._owners.setdefault(conductor_id, who) != who:
            raise NotPermitted(f"{who.name} is not {conductor_id}: the id belongs to another conductor")

    def _outbox(self, conductor_id: str) -> Outbox:
        outbox = self._outboxes.get(conductor_id)
        if outbox is None:
            outbox = self._outboxes[conductor_id] = Outbox(self.clock, self._describe_load)
        return outbox
