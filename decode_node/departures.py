"""Running requests on their way to another decode node: followed, stopped, and gone or resumed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

from moonpool.engine.batching.sequence import Sequence, State
from moonpool.engine.batching.step_plan import StepEvent
from moonpool.engine.node.handover import Handover, HandoverFailed
from moonpool.engine.node.node import EngineNode, Key
from moonpool.protos import node_pb2

STANDS_STILL_S = 1.0
"""How long a stopped request waits to be cancelled, before it goes on. A follower uses nothing that it has
not read within this time, by its own clock, from its call of ``Yield`` on: the last block changes again."""


class Departures:
    """The source's side of migrations. One per decode node, on its event loop."""

    def __init__(self, node: EngineNode) -> None:
        self._node = node
        self._handovers: dict[Key, Handover] = {}

    def __len__(self) -> int:
        return len(self._handovers)

    async def chunks(
        self, sequence: Sequence, request: node_pb2.FollowRequest
    ) -> AsyncGenerator[node_pb2.KvChunk]:
        """Yield the sequence's blocks and tokens while it decodes, and the rest after ``stop``.

        Raises HandoverFailed: it does not decode, is followed already, or ended meanwhile. However the
        iteration ends, a sequence that was stopped and not cancelled goes on.
        """
        self._check(sequence, request)
        node = self._node
        grants, ttl_s = node.store.tiers.grants, node.config.store.lease_ttl_s
        handover = Handover(node.memory, node.kv_address, grants, ttl_s=ttl_s)
        self._handovers[sequence.key] = handover
        sequence.stays_whole = True
        handover.progress(sequence, sequence.num_computed_tokens)
        try:
            async with aclosing(handover.chunks(request.follower, request.num_tokens)) as chunks:
                async for chunk in chunks:
                    yield chunk
        finally:
            del self._handovers[sequence.key]
            sequence.stays_whole = False
            self._node.engine.resume(sequence)

    def stop(self, sequence: Sequence) -> None:
        """Stop the sequence after its step; ``chunks`` sends the rest then. Raises HandoverFailed."""
        handover = self._handovers.get(sequence.key)
        if handover is None:
            raise HandoverFailed(f"request {sequence.request_id} has no follower")
        self._check_decodes(sequence)
        # The follower may be stopped before it has read the rest.
        asyncio.get_running_loop().call_later(STANDS_STILL_S, handover.taken.set)
        if self._node.engine.withdraw(sequence):
            handover.stand_still(sequence)

    def on_step(self, event: StepEvent) -> bool:
        """Tell the follower of a step. Return whether the sequence stands still now."""
        sequence = event.sequence
        handover = self._handovers.get(sequence.key)
        if handover is None:
            return False
        if event.finish_reason or event.preempted or event.ended_life:
            handover.fail(HandoverFailed(f"request {sequence.request_id} ended or was preempted"))
            handover.taken.set()
        elif sequence.state is State.KEPT_FOR_TRANSFER:
            handover.stand_still(sequence)
            return True
        elif event.num_computed_tokens % self._node.memory.layout.block_size == 0:
            handover.progress(sequence, event.num_computed_tokens)
        return False

    def cancelled(self, key: Key) -> None:
        """The request was cancelled: its new node has it, or its client is gone."""
        handover = self._handovers.get(key)
        if handover is not None:
            handover.fail(HandoverFailed("the request was cancelled"))
            handover.taken.set()

    def renew(self) -> None:
        """Prolong the grants of followers. Call it more often than every ``ttl_s``."""
        for handover in self._handovers.values():
            handover.renew()

    def _check(self, sequence: Sequence, request: node_pb2.FollowRequest) -> None:
        if sequence.key in self._handovers:
            raise HandoverFailed(f"request {sequence.request_id} is on its way to another node")
        self._check_decodes(sequence)
        if not sequence.num_prompt_tokens <= request.num_tokens <= sequence.num_tokens:
            raise HandoverFailed(
                f"request {sequence.request_id} has {sequence.num_tokens} tokens, not {request.num_tokens}"
            )
        if self._node.engine.config.widest_window or sequence.packs:
            raise HandoverFailed("windows have passed blocks, which were released: place it again")

    def _check_decodes(self, sequence: Sequence) -> None:
        if sequence.state is not State.DECODING:
            raise HandoverFailed(f"request {sequence.request_id} does not decode now: {sequence.state.name}")
