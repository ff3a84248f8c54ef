"""A running request on its way to another decode node."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from contextvars import copy_context
from dataclasses import dataclass
from typing import Protocol

from moonpool.conductor.admission.tenants import Tenant
from moonpool.conductor.errors import MigrationFailed
from moonpool.conductor.fleet.member import Member
from moonpool.conductor.fleet.node_client import RequestKey
from moonpool.protos import node_pb2
from moonpool.runtime.errors import MoonpoolError

# The longest from the call of the target until it decodes. The request goes on meanwhile.
LIMIT_S = 60.0


@dataclass(frozen=True, slots=True)
class MigrationPlan:
    """``cause``: asked, or the name of a decision. ``key``: of the request on ``target``."""

    cause: str
    key: RequestKey
    target: Member
    request: node_pb2.DecodeRequest
    expected_tokens: int  # it will probably produce there
    num_blocks: int  # of KV in the end, probably
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Migrated:
    """A request that decodes on ``target``. ``first_index``: of its first token from there.
    ``downtime_s``: between its last token from ``source`` and that one, as the conductor got them."""

    source: str
    target: str
    cause: str
    received: node_pb2.KvReceived
    first_index: int
    downtime_s: float


class Movable(Protocol):
    """A request in flight, as decisions about its place see it."""

    @property
    def decodes_on(self) -> Member | None:
        """The decode node that it could leave now; None: it does not decode, or is on its way."""

    @property
    def waits_on(self) -> tuple[Member, bool] | None:
        """The decode node where it has no blocks yet, and whether it lacks nothing else; None: it decodes,
        is to be placed, or has no decode node."""

    @property
    def priority(self) -> int:
        """Lower goes first."""

    @property
    def client(self) -> Tenant:
        """Its tenant."""

    @property
    def prefill_key(self) -> RequestKey | None:
        """What its current attempt is called by nodes; None: it has none."""

    def place_again(self, reason: str) -> None:
        """Place it again if its prompt still waits: its prefill node has not answered."""

    def outlook(self) -> tuple[int, int]:
        """Its tokens, and those that it will probably still produce."""

    async def migrate(self, target: Member, cause: str) -> Migrated:
        """Go on with the request on ``target``, without a gap or a repetition in its stream.

        Raises MigrationFailed: it goes on where it was, or from its lineage, or has ended.
        """


class Migration:
    """Calls the target, and keeps its tokens until the source's have all arrived. Attached to the target.

    ``done``: resolved by the target's first token, or with MigrationFailed. Until ``switched`` the
    source goes on with the request after any failure.
    """

    def __init__(self, plan: MigrationPlan, on_news: Callable[[], None]) -> None:
        """``on_news``: called when the target has everything, and when this has failed."""
        self.plan = plan
        self.tokens: list[node_pb2.TokenOut] = []  # of the target
        self.received: node_pb2.KvReceived | None = None
        self.switched = False
        self.failed = False
        self.done: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self.first_index = -1  # of the target's first token, once it has everything
        self._on_news = on_news
        self._call: asyncio.Task[None] | None = None

    def start(self) -> None:
        plan, target = self.plan, self.plan.target
        num_tokens = len(plan.request.work.token_ids) // 4
        target.load.begin_decode(
            plan.key,
            num_tokens,
            expected_tokens=plan.expected_tokens,
            num_blocks=plan.num_blocks,
            starts_in_s=0.0,
            lasts_s=target.view.cost.profile.step_s(target.view.num_running + 1, num_tokens)
            * plan.expected_tokens,
            tbt_s=plan.request.work.tbt_s or math.inf,
        )
        target.client.attach(plan.key, self)
        self._call = asyncio.create_task(self._decode(), context=copy_context())

    def fail(self, error: MoonpoolError) -> None:
        """The request stays on its source. Idempotent; does nothing once the target has it."""
        if self.switched or self.failed:
            return
        self.failed = True
        target, key = self.plan.target, self.plan.key
        target.client.detach(key)
        target.load.end_decode(key, len(self.tokens))
        target.decode_client.cancel(key)
        if self._call is not None:
            self._call.cancel()
        self.give_up(str(error))
        self._on_news()

    def give_up(self, reason: str) -> None:
        """Resolve ``done`` with MigrationFailed, unless it is resolved."""
        if not self.done.done():
            self.done.set_exception(MigrationFailed(self.plan.key[0], self.plan.target.node_id, reason))
            self.done.exception()  # perhaps no caller reads it

    # ------------------------------------------------------------------ called by the target's client

    def put(self, token: node_pb2.TokenOut) -> None:
        if token.finish_reason in (node_pb2.FINISH_ERROR, node_pb2.FINISH_CANCELLED):
            self.fail(MoonpoolError(token.error or "cancelled by the node"))
            return
        if token.HasField("received"):
            self.received, self.first_index = token.received, token.index
            self.plan.target.load.decoding(self.plan.key)
        else:
            self.tokens.append(token)
        self._on_news()

    async def _decode(self) -> None:
        plan = self.plan
        try:
            await plan.target.decode_client.decode(plan.request, plan.timeout_s)
        except MoonpoolError as error:
            self.fail(error)
