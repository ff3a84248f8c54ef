"""One attempt of a request: calls to its prefill and decode node, and their tokens in order."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Coroutine
from contextvars import copy_context
from dataclasses import dataclass, field
from typing import Any

from moonpool.conductor.accounts.spent import Spent
from moonpool.conductor.fleet.member import Member
from moonpool.conductor.fleet.node_client import RequestKey
from moonpool.conductor.placing.placement import Placement
from moonpool.conductor.requests.life import LOST, REFUSED
from moonpool.conductor.requests.migration import LIMIT_S, Migrated, Migration, MigrationPlan
from moonpool.protos import node_pb2
from moonpool.runtime.errors import LifeEnded, MoonpoolError, NodeUnavailable, RemoteError
from moonpool.runtime.failures import FailureClass
from moonpool.runtime.observing.log import request_id

# Statuses of a healthy node that cannot serve the request now; and of a request that no node can serve.
_REFUSALS = ("RESOURCE_EXHAUSTED", "UNAVAILABLE", "FAILED_PRECONDITION", "ABORTED", "DEADLINE_EXCEEDED")
_INVALID = ("INVALID_ARGUMENT", "OUT_OF_RANGE", "UNIMPLEMENTED")


class AttemptFailed(Exception):
    """The attempt failed. The request may be placed again, preferably not on ``nodes``."""

    def __init__(self, failure: FailureClass, cause: str, reason: str, *nodes: str) -> None:
        super().__init__(reason)
        self.failure = failure
        self.cause = cause  # one word: lost, ended_life, refused, error, disorder or QUEUE
        self.reason = reason
        self.nodes = nodes


class AttemptInvalid(Exception):
    """A node found the request itself invalid: it would fail on every node."""


@dataclass(slots=True)
class AttemptPlan:
    """The nodes and messages of one attempt. A migration changes ``key`` and ``decode``."""

    key: RequestKey
    placement: Placement
    prefill: Member
    decode: Member | None  # None: the prefill's token is the last one
    prefill_request: node_pb2.PrefillRequest
    decode_request: node_pb2.DecodeRequest
    expected_tokens: int  # it will probably produce
    num_blocks: int  # of KV in the end, probably
    timeout_s: float
    spent: Spent = field(default_factory=Spent)  # of the request


class Attempt:
    """Both calls start at once: the decode node reserves and follows while the prefill node computes.

    ``first`` and then ``token`` return tokens. They raise ``AttemptFailed``, ``AttemptInvalid`` or the error
    of ``abort``, after all earlier tokens. ``close`` stops the work on the nodes, without waiting for them.
    """

    def __init__(self, plan: AttemptPlan) -> None:
        self.plan = plan
        self.kv_received = False  # the decode node no longer needs the prefill node
        self.num_cached_tokens: int | None = None  # of the prompt, where only the end of the stream tells
        self._reply: node_pb2.PrefillReply | None = None
        self._tokens: deque[node_pb2.TokenOut] = deque()
        self._failure: Exception | None = None
        self._news = asyncio.Event()
        self._num_delivered = 0
        self._finished = False  # ended by the decode node itself
        self._calls: list[asyncio.Task[None]] = []
        self._closed = False
        self._migration: Migration | None = None
        self._next_index = -1  # of the next token from the decode node; -1: none has come
        self._last_token_s = 0.0  # by the loop's time
        self._heard_s = 0.0  # the latest message of it, or its start; by the loop's time
        self.silent_s = 0.0  # from then to its failure

    def start(self) -> None:
        plan = self.plan
        placement = plan.placement
        self._heard()
        work = plan.prefill_request.work
        plan.prefill.load.begin_prefill(
            plan.key,
            placement.prefill.compute_s,
            placement.patience_s,
            work.tenant,
            len(work.token_ids) // 4 - placement.prefill.prefix_tokens,
            placement.prefill.starts_in_s,
        )
        if plan.decode is not None:
            estimate = placement.decode
            assert estimate is not None
            plan.decode.load.begin_decode(
                plan.key,
                len(plan.decode_request.work.token_ids) // 4,
                expected_tokens=plan.expected_tokens,
                num_blocks=plan.num_blocks,
                starts_in_s=placement.prefill.ttft_s + estimate.transfer_s,
                lasts_s=estimate.total_s - estimate.transfer_s,
                tbt_s=plan.decode_request.work.tbt_s or math.inf,
            )
            plan.decode.client.attach(plan.key, self)
            # The prefill node is needed until its blocks are on the decode node.
            plan.prefill.client.attach(plan.key, self)
        context = copy_context()
        context.run(request_id.set, plan.key[0])
        for call in self._work():
            task = asyncio.create_task(call, context=context)
            task.add_done_callback(self._call_done)
            self._calls.append(task)

    def _work(self) -> list[Coroutine[Any, Any, None]]:
        """The calls, in the order of ``plan``'s nodes. The first token waits for the first one."""
        decode = self.plan.decode
        return [self._prefill()] if decode is None else [self._prefill(), self._decode(decode)]

    async def first(self) -> node_pb2.PrefillReply:
        while self._reply is None:
            if self._failure is not None:
                raise self._failure
            await self._news.wait()
            self._news.clear()
        return self._reply

    async def token(self) -> node_pb2.TokenOut:
        while not self._tokens:
            if self._failure is not None:
                raise self._failure
            await self._news.wait()
            self._news.clear()
        return self._tokens.popleft()

    @property
    def stays(self) -> str:
        """Why it cannot move to another decode node now; empty: it can."""
        if self._closed or self._failure is not None or self._finished or self.plan.decode is None:
            return "it has ended"
        if not self.kv_received or self._next_index < 0:
            return "it does not decode yet"
        return "it is on its way to another node already" if self._migration is not None else ""

    @property
    def waits_on(self) -> tuple[Member, bool] | None:
        """The decode node that has not yet confirmed the blocks, and whether they are computed, or will be
        on it."""
        if self._closed or self._failure is not None or self.kv_received or self.plan.decode is None:
            return None
        return self.plan.decode, self._reply is not None or self.plan.decode is self.plan.prefill

    @property
    def waits_for_prefill(self) -> bool:
        """Whether nothing of it has come from its nodes."""
        return self._reply is None and self._failure is None and not self._closed and not self.kv_received

    async def migrate(self, plan: MigrationPlan) -> Migrated:
        """Have ``plan.target`` go on with the request, while it runs. ``stays`` is empty.

        Raises MigrationFailed. A cancellation gives the migration up, unless the target has the request.
        """
        assert not self.stays and self.plan.decode is not None
        source = self.plan.decode.node_id
        migration = self._migration = Migration(plan, self._on_migration)
        migration.start()
        try:
            async with asyncio.timeout(LIMIT_S):
                downtime_s = await asyncio.shield(migration.done)
        except TimeoutError:
            migration.fail(MoonpoolError(f"the target did not decode it within {LIMIT_S:g} s"))
            downtime_s = await migration.done
        finally:
            migration.fail(MoonpoolError("it was given up"))
            self._migration = None
        assert migration.received is not None
        received, index = migration.received, migration.first_index
        return Migrated(source, plan.target.node_id, plan.cause, received, index, downtime_s)

    def abort(self, error: Exception) -> None:
        """Make ``first`` and ``token`` raise ``error``. Only the first call has an effect."""
        if self._failure is None:
            self._failure = error
            self.silent_s = asyncio.get_running_loop().time() - self._heard_s
            self._news.set()

    def _heard(self) -> None:
        self._heard_s = asyncio.get_running_loop().time()

    def close(self) -> None:
        """Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._migration is not None:
            self._migration.fail(MoonpoolError("the attempt has ended"))
            self._migration.give_up("the attempt has ended")
        plan = self.plan
        for call in self._calls:
            call.cancel()
        plan.prefill.load.end_prefill(plan.key)
        plan.prefill.client.detach(plan.key)
        if plan.decode is not None:
            if not self.kv_received:
                # It still holds blocks for the decode node, even if its call has ended.
                plan.prefill.client.cancel(plan.key)
            plan.decode.load.end_decode(plan.key, self._num_delivered)
            plan.decode.client.detach(plan.key)
            if not self._finished:
                plan.decode.client.cancel(plan.key)

    # ------------------------------------------------------------------ called by node clients

    def put(self, token: node_pb2.TokenOut) -> None:
        self._num_delivered += 1
        self._heard()
        self.plan.spent.decoded(token)
        if token.HasField("received"):
            self.kv_received = True
            if self.plan.decode is not self.plan.prefill:
                self.plan.prefill.client.detach(self.plan.key)
            if self.plan.decode is not None:
                self.plan.decode.load.decoding(self.plan.key)
                self.plan.decode.produced_first()
        if token.finish_reason:
            self._finished = True
            if token.finish_reason in (node_pb2.FINISH_ERROR, node_pb2.FINISH_CANCELLED):
                self._on_given_up(token)
                return
            if self.plan.decode is not None:
                self.plan.decode.breaker.succeeded()
        self._tokens.append(token)
        self._news.set()
        if token.has_token and token.index >= self._next_index:
            self._count(token.index)

    def fail(self, error: NodeUnavailable) -> None:
        self._member(error.node_id).breaker.lost()
        self.abort(AttemptFailed(error.failure, LOST, str(error), error.node_id))

    # ------------------------------------------------------------------ migration

    def _count(self, index: int) -> None:
        """The decode node has sent the token ``index``."""
        now_s, migration = asyncio.get_running_loop().time(), self._migration
        if migration is not None and migration.switched and not migration.done.done():
            migration.done.set_result(now_s - self._last_token_s)
        self._next_index, self._last_token_s = index + 1, now_s
        if migration is not None:
            self._on_migration()

    def _on_migration(self) -> None:
        """Go on with the target, once it has everything and the source's tokens have all arrived."""
        migration = self._migration
        if migration is None or migration.switched or migration.failed or self._closed:
            return
        if not 0 <= migration.first_index <= self._next_index:
            return
        plan, source = self.plan, self.plan.decode
        assert source is not None
        migration.switched = True
        source.load.end_decode(plan.key, self._num_delivered)
        source.client.detach(plan.key)
        source.decode_client.cancel(plan.key)
        plan.decode, plan.key = migration.plan.target, migration.plan.key
        self._num_delivered = 0
        plan.decode.client.attach(plan.key, self)
        for token in migration.tokens:
            self.put(token)

    # ------------------------------------------------------------------ the calls

    async def _prefill(self) -> None:
        plan = self.plan
        reply = await plan.prefill.client.prefill(plan.prefill_request, plan.timeout_s)
        num_tokens = len(plan.prefill_request.work.token_ids) // 4
        plan.spent.prefilled(reply.token, num_tokens, reply.num_cached_tokens)
        if plan.prefill.load.prefilled_alone(plan.key):
            plan.prefill.prefilled(num_tokens, reply.num_cached_tokens, reply.compute_s)
        plan.prefill.load.end_prefill(plan.key)
        plan.prefill.breaker.succeeded()
        plan.prefill.produced_first()
        self._reply = reply
        self._heard()
        self._news.set()

    async def _decode(self, member: Member) -> None:
        await member.decode_client.decode(self.plan.decode_request, self.plan.timeout_s)

    def _call_done(self, call: asyncio.Task[None]) -> None:
        if call.cancelled():
            if not self._closed:
                # grpc.aio cancels the calls of a channel that is closed: the node restarted elsewhere.
                member = self.plan.prefill if call is self._calls[0] else self.plan.decode
                assert member is not None
                self.fail(NodeUnavailable(member.node_id, "its connection was closed"))
            return
        match error := call.exception():
            case None:
                pass
            case NodeUnavailable():
                self.fail(error)
            case RemoteError():
                self._on_error(error)
            case Exception():
                self.abort(error)  # a defect: it ends the request

    # ------------------------------------------------------------------ failures

    def _on_error(self, error: RemoteError) -> None:
        if error.kind == LifeEnded.__name__:
            self.abort(AttemptFailed(error.failure, "ended_life", str(error), error.node_id))
        elif error.status in _INVALID:
            self.abort(AttemptInvalid(str(error)))
        elif error.status in _REFUSALS:
            self.abort(AttemptFailed(error.failure, REFUSED, str(error), error.node_id))
        else:
            self._member(error.node_id).breaker.erred()
            self.abort(AttemptFailed(error.failure, "error", str(error), error.node_id))

    def _on_given_up(self, token: node_pb2.TokenOut) -> None:
        """The decode node ended the request without finishing it."""
        decode, prefill = self.plan.decode, self.plan.prefill
        assert decode is not None
        reason = f"node {decode.node_id}: {token.error or 'cancelled by the node'}"
        failure = FailureClass.of_wire(token.failure)
        if token.ended_life:
            ended = decode if self.kv_received else prefill
            how = f"node {ended.node_id}: {token.error}"
            self.abort(AttemptFailed(failure, "ended_life", how, ended.node_id))
        elif token.invalid:
            self.abort(AttemptInvalid(token.error))
        elif self.kv_received:
            decode.breaker.erred()
            self.abort(AttemptFailed(failure, "error", reason, decode.node_id))
        else:
            # The hand-over failed. Either node may be the cause: avoid both, blame neither.
            self.abort(AttemptFailed(failure, "error", reason, decode.node_id, prefill.node_id))

    def _member(self, node_id: str) -> Member:
        decode = self.plan.decode
        return decode if decode is not None and decode.node_id == node_id else self.plan.prefill
