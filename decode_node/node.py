"""The decode node's service: take over requests, generate, send tokens to the conductors, hand on."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass

import grpc.aio
from opentelemetry.context import Context, get_current

from moonpool.decode_node.departures import STANDS_STILL_S, Departures
from moonpool.decode_node.outbox import DIRECT_INTERVAL_S, INTERVAL_S, MAX_UNREAD_NBYTES, Outbox
from moonpool.decode_node.takeover import HandoverBroken, Source, Taken, take_over
from moonpool.engine.batching.sequence import Sequence
from moonpool.engine.batching.step_plan import StepEvent
from moonpool.engine.errors import DuplicateSequence
from moonpool.engine.node.handover import HandoverFailed
from moonpool.engine.node.messages import sequence_of, time_left_s
from moonpool.engine.node.metrics import DECODE_TOKENS, RECEIVED_BLOCKS, RECEIVED_BYTES
from moonpool.engine.node.node import EngineNode, Key
from moonpool.engine.node.service import RpcContext, node_servicers
from moonpool.kvstore.blocks import keys as block_keys
from moonpool.protos import node_pb2, node_pb2_grpc
from moonpool.runtime import rpc
from moonpool.runtime.config.options import Config
from moonpool.runtime.errors import LifeEnded, MoonpoolError, RemoteError, failure_of
from moonpool.runtime.failures import FailureClass
from moonpool.runtime.observing import tracing
from moonpool.runtime.security import process
from moonpool.runtime.security.roles import Caller, NotPermitted
from moonpool.runtime.structure.grammars import StructureInvalid, StructureUnsupported

log = logging.getLogger(__name__)


# Conductors of one cluster; each has an outbox.
MAX_CONDUCTORS = 256


class TooManyConductors(MoonpoolError):
    """A conductor cannot be served besides the others. It gets no tokens."""

    code = "RESOURCE_EXHAUSTED"
    failure = FailureClass.CONDUCTOR


class TokensUnread(MoonpoolError):
    """A conductor does not read its tokens. Its requests on this node have been cancelled."""

    code = "RESOURCE_EXHAUSTED"
    failure = FailureClass.CONDUCTOR


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
    stages: tuple[str, ...] = ("decode",)

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._requests: dict[Key, _Request] = {}
        self._outboxes: dict[str, Outbox] = {}
        self._departures = Departures(self)
        self._owners: dict[str, Caller] = {}  # of the outboxes, where callers prove who they are

    def servicers(self) -> list[rpc.Servicer]:
        self.engine.on_step = self.on_decodes
        return [*node_servicers(self), (node_pb2_grpc.add_DecodeNodeServicer_to_server, self)]

    def num_requests(self) -> int:
        return len(self._requests)

    def is_behind(self) -> bool:
        return any(outbox.is_behind for outbox in self._outboxes.values())

    async def stop(self) -> None:
        for key in list(self._requests):
            self.cancel(key)
        for outbox in self._outboxes.values():
            outbox.finish()

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
            self._departures.cancelled(key)

    def sweep(self) -> None:
        self._departures.renew()
        super().sweep()
        self.leave_conductors()

    def leave_conductors(self) -> None:
        """Cancel the requests of conductors that do not read, connected or not, and end their streams: a
        conductor that goes on places its requests again."""
        for conductor_id, outbox in list(self._outboxes.items()):
            unread_s, nbytes = outbox.unread_s, outbox.unread_nbytes
            if unread_s < self.config.node.orphan_s and nbytes <= MAX_UNREAD_NBYTES:
                continue
            orphans = [key for key, r in self._requests.items() if r.conductor_id == conductor_id]
            if orphans:
                log.warning(
                    "conductor %s has read nothing for %.1f s, and %d bytes wait for it: its %d requests are "
                    "cancelled",
                    conductor_id,
                    unread_s,
                    nbytes,
                    len(orphans),
                )
            for key in orphans:
                self.cancel(key)
            outbox.end(TokensUnread(f"no message was read for {unread_s:.1f} s, and {nbytes} bytes wait"))
            del self._outboxes[conductor_id]
            self._owners.pop(conductor_id, None)

    async def Decode(self, request: node_pb2.DecodeRequest, context: RpcContext) -> node_pb2.DecodeReply:
        self.check_takes_work()
        self._check_owner(request.conductor_id)
        work = request.work
        received_s = time.monotonic()
        sequence = sequence_of(work, arrived_s=received_s)
        if sequence.key in self._requests:
            raise DuplicateSequence(*sequence.key)
        self.tenants.charge(work, sequence.keys, self.store.tiers)
        num_local = len(self.engine.pool.match(block_keys.unpack(work.block_keys)))
        takeover = asyncio.create_task(self._take_over(request, sequence))
        self._requests[sequence.key] = _Request(
            request.conductor_id, sequence, takeover, received_s, get_current()
        )
        return node_pb2.DecodeReply(
            num_cached_tokens=num_local * self.engine.pool.block_size, epoch=self.epoch
        )

    async def Tokens(
        self, request: node_pb2.TokensRequest, context: RpcContext
    ) -> AsyncIterator[node_pb2.StepTokens]:
        self._check_owner(request.conductor_id)
        outbox = self._outbox(request.conductor_id)
        outbox.interval_s = DIRECT_INTERVAL_S if context.peer() == rpc.DIRECT_PEER else INTERVAL_S
        async for message in outbox.messages():
            yield message

    async def FollowDecode(
        self, request: node_pb2.FollowRequest, context: RpcContext
    ) -> AsyncIterator[node_pb2.KvChunk]:
        sequence = self._running(request.request_id, request.attempt)
        async with aclosing(self._departures.chunks(sequence, request)) as chunks:
            async for chunk in chunks:
                yield chunk

    async def Yield(self, request: node_pb2.YieldRequest, context: RpcContext) -> node_pb2.YieldReply:
        self._departures.stop(self._running(request.request_id, request.attempt))
        return node_pb2.YieldReply()

    def _running(self, request_id: str, attempt: int) -> Sequence:
        request = self._requests.get((request_id, attempt))
        if request is None:
            raise HandoverFailed(
                f"request {request_id}, attempt {attempt}, does not run on node {self.node_id}"
            )
        return request.sequence

    async def prefilled_here(self, sequence: Sequence) -> node_pb2.TokenOut:
        """Take over a prompt that this node computes itself. A node without prefills has none."""
        raise HandoverBroken

    async def _bring(self, request: node_pb2.DecodeRequest, sequence: Sequence) -> Taken:
        """Fill the sequence's blocks, and append the tokens that it lacks: see ``take_over``."""
        if request.migrates or request.prefill_address != self.rpc_address:
            return await take_over(
                self.engine,
                self.exchange,
                self.store,
                sequence,
                Source.of(request),
                deadline_s=self.config.transfer.deadline_s,
                follower=self.node_id,
            )
        token = await self.prefilled_here(sequence)
        received = node_pb2.KvReceived(num_local_blocks=len(sequence.block_table))
        if token.finish_reason != node_pb2.FINISH_NONE:
            return Taken(True, received)
        sequence.append(token.token_id)
        return Taken(False, received)

    async def _take_over(self, request: node_pb2.DecodeRequest, sequence: Sequence) -> None:
        """Read the blocks and start decoding. Errors go to the conductor."""
        key, engine, taken = sequence.key, self.engine, Taken(False, node_pb2.KvReceived())
        try:
            async with (
                asyncio.timeout(time_left_s(request.work, sequence.arrived_s)),
                self.with_adapter(request.work, sequence) as adapter,
            ):
                await self.prepare(sequence)
                taken = await self._bring(request, sequence)
                if adapter is not None:
                    await adapter.give(sequence)
                if not taken.finished:
                    engine.add(sequence)
            received = taken.received
            RECEIVED_BYTES.inc(received.nbytes)
            RECEIVED_BLOCKS.labels("read").inc(received.num_blocks)
            RECEIVED_BLOCKS.labels("local").inc(received.num_local_blocks)
        except BaseException as error:
            if taken.stream is not None:
                taken.stream.cancel()
            engine.release(sequence)
            if not isinstance(error, Exception):
                raise  # cancelled, and forgotten then: a later request may have the key
            self._requests.pop(key, None)
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
                    invalid=isinstance(error, StructureInvalid | StructureUnsupported),
                    # The prefill node's.
                    ended_life=isinstance(error, RemoteError) and error.kind == LifeEnded.__name__,
                    failure=failure_of(error).value,
                )
            )
            return
        self._outbox(request.conductor_id).put(
            node_pb2.TokenOut(
                request_id=key[0], attempt=key[1], received=received, index=sequence.num_output_tokens
            )
        )
        if taken.finished:
            engine.release(sequence)
            self._requests.pop(key, None)
        if taken.stream is not None:
            await _ended(taken.stream)

    def on_decodes(self, events: list[StepEvent], *, mixed: bool = False) -> None:
        """A step has advanced these sequences. ``mixed``: it also computed a part of a prompt."""
        batches: dict[str, list[node_pb2.TokenOut]] = {}
        num_tokens = 0
        stopped: set[str] = set()  # conductors that get their next token from another node
        for event in events:
            key = event.sequence.key
            request = self._requests.get(key)
            if request is None:
                continue  # cancelled
            num_tokens += event.token_id >= 0
            if event.token_id >= 0 or event.finish_reason or event.preempted or event.ended_life:
                batches.setdefault(request.conductor_id, []).append(self.work_time.tell(event))
            if len(self._departures) and self._departures.on_step(event):
                stopped.add(request.conductor_id)
            if event.finish_reason:
                ago_s = time.monotonic() - request.began_s
                tracing.record_span("decode", ago_s=ago_s, seconds=ago_s, within=request.parent_span)
                del self._requests[key]
        DECODE_TOKENS.inc(num_tokens)
        for conductor_id, tokens in batches.items():
            self._outbox(conductor_id).put_step(tokens, mixed=mixed, at_once=conductor_id in stopped)

    def _describe_load(self, message: node_pb2.StepTokens) -> None:
        stats = self.engine.stats()
        message.num_running = stats.num_running
        message.num_waiting = stats.num_waiting
        message.num_context_tokens = stats.num_context_tokens
        message.num_free_blocks = stats.num_available_blocks

    def _check_owner(self, conductor_id: str) -> None:
        """The first caller that uses an id owns it.

        Raises:
            NotPermitted: to others, who would take its users' tokens.
            TooManyConductors: until one of those that are served has read nothing for ``orphan_s``.
        """
        if conductor_id not in self._outboxes and len(self._outboxes) >= MAX_CONDUCTORS:
            raise TooManyConductors(f"{len(self._outboxes)} conductors read tokens here, the most")
        who = process.caller.get()
        if who is not None and self._owners.setdefault(conductor_id, who) != who:
            raise NotPermitted(f"{who.name} is not {conductor_id}: the id belongs to another conductor", who)

    def _outbox(self, conductor_id: str) -> Outbox:
        outbox = self._outboxes.get(conductor_id)
        if outbox is None:
            outbox = self._outboxes[conductor_id] = Outbox(time.monotonic, self._describe_load)
        return outbox


async def _ended(stream: grpc.aio.Call) -> None:
    """Keep the source's stream open until it ends: the source goes on with the request as soon as it is left,
    unless the conductor has cancelled it there by then."""
    ended = asyncio.ensure_future(stream.code())
    try:
        await asyncio.wait((ended,), timeout=2 * STANDS_STILL_S)
    finally:
        ended.cancel()
        stream.cancel()
