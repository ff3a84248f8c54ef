"""The conductor's connection to one node: its calls, its token stream, and whether it is there."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Protocol

import grpc
import grpc.aio

from moonpool.protos import node_pb2, node_pb2_grpc
from moonpool.runtime import rpc
from moonpool.runtime.errors import MoonpoolError, NodeUnavailable, RemoteError

log = logging.getLogger(__name__)

_CANCEL_TIMEOUT_S = 5.0
# How long closing waits for cancels on their way.
_FAREWELL_S = 0.5
# How soon a broken token stream is opened again: the first try, and the longest pause between tries.
_REOPEN_FIRST_S = 0.05
_REOPEN_LONGEST_S = 1.0
# Cancels kept for a node that cannot be reached now; a node that forgot them has forgotten the requests too.
_MOST_CANCELS_KEPT = 4096

RequestKey = tuple[str, int]  # request id, attempt


class Dependent(Protocol):
    """One attempt of one request, as the clients of its nodes see it. Neither method may block."""

    def put(self, token: node_pb2.TokenOut) -> None:
        """The decode node produced this."""

    def fail(self, error: NodeUnavailable) -> None:
        """A node it depends on is gone: nothing more will come from there."""


class NodeClient:
    """A node's gRPC channel and its liveness, which needs no Redis: the connection itself tells.

    ``connected`` is false from the moment the connection is known to be broken until there is one again.
    Every change is told to ``on_change``. Calls raise ``NodeUnavailable`` or ``RemoteError``.
    """

    def __init__(self, node_id: str, address: str, on_change: Callable[[], None]) -> None:
        self.node_id = node_id
        self.address = address
        self.connected = False
        self._on_change = on_change
        self._channel = rpc.channel(address)
        self._node = node_pb2_grpc.NodeStub(self._channel)
        self._prefill = node_pb2_grpc.PrefillNodeStub(self._channel)
        self._dependents: dict[RequestKey, Dependent] = {}
        self._cancels: dict[RequestKey, None] = {}  # not yet delivered; ordered
        self._canceller: asyncio.Task[None] | None = None
        self._watcher: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._watcher = asyncio.create_task(self._watch(), name=f"watch {self.node_id}")

    async def close(self) -> None:
        """Drop the connection. Calls in flight fail with ``NodeUnavailable``. Idempotent."""
        watcher, self._watcher = self._watcher, None
        if watcher is None:
            return
        tasks = [task for task in (watcher, self._canceller) if task is not None]
        if self.connected and self._canceller is not None:
            # A node that is told now need not find out by itself that we are gone.
            await asyncio.wait((self._canceller,), timeout=_FAREWELL_S)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._set_connected(False, "the conductor let it go")
        await self._channel.close(None)

    def abandon(self, reason: str) -> None:
        """Everyone attached hears that the node is gone, though its connection still stands."""
        dependents, self._dependents = self._dependents, {}
        for dependent in dependents.values():
            dependent.fail(NodeUnavailable(self.node_id, reason))

    def attach(self, key: RequestKey, dependent: Dependent) -> None:
        """From now on ``dependent`` hears of what the node produces for ``key``, and when it is gone."""
        self._dependents[key] = dependent

    def detach(self, key: RequestKey) -> None:
        """Whatever still comes for ``key`` is dropped from now on. Idempotent."""
        self._dependents.pop(key, None)

    async def prefill(self, request: node_pb2.PrefillRequest, timeout_s: float) -> node_pb2.PrefillReply:
        """Cancelling this cancels the work on the node."""
        with rpc.node_errors(self.node_id):
            reply: node_pb2.PrefillReply = await self._prefill.Prefill(
                request, timeout=timeout_s, metadata=rpc.request_metadata()
            )
        return reply

    async def replicate(
        self, source: node_pb2.KvAddress, keys: Sequence[bytes], timeout_s: float
    ) -> node_pb2.ReplicateReply:
        """Have the node read what it lacks of a chain from ``source``, and keep it as long as it is used."""
        request = node_pb2.ReplicateRequest(source=source, keys=b"".join(keys), surplus=True)
        with rpc.node_errors(self.node_id):
            reply: node_pb2.ReplicateReply = await self._node.Replicate(request, timeout=timeout_s)
        return reply

    async def evict(self, keys: Sequence[bytes], num_blocks: int, timeout_s: float) -> int:
        """Have the node drop the last blocks of a chain; how many went."""
        request = node_pb2.EvictRequest(keys=b"".join(keys), num_blocks=num_blocks)
        with rpc.node_errors(self.node_id):
            reply: node_pb2.EvictReply = await self._node.Evict(request, timeout=timeout_s)
        return reply.num_blocks

    def cancel(self, key: RequestKey) -> None:
        """Tell the node to stop ``key``, now or when it can be reached again. Returns at once."""
        self._cancels[key] = None
        if len(self._cancels) > _MOST_CANCELS_KEPT:
            del self._cancels[next(iter(self._cancels))]
        self._deliver_cancels()

    async def _watch(self) -> None:
        """Follow the channel's state. A closed connection is opened again at once, so that a loss shows."""
        ready, broken = grpc.ChannelConnectivity.READY, grpc.ChannelConnectivity.TRANSIENT_FAILURE
        while True:
            state = self._channel.get_state(try_to_connect=True)
            if state == ready:
                self._set_connected(True, "")
            elif state == broken:
                self._set_connected(False, "the connection broke")
            await self._channel.wait_for_state_change(state)

    def _set_connected(self, connected: bool, reason: str) -> None:
        if connected == self.connected:
            return
        self.connected = connected
        if not connected:
            log.info("%s at %s is gone: %s", self.node_id, self.address, reason)
            # What a decode node sent may have been lost with the stream: every request on it begins again.
            self.abandon(reason)
        else:
            self._deliver_cancels()
        self._on_change()

    def _deliver_cancels(self) -> None:
        if self.connected and self._cancels and (self._canceller is None or self._canceller.done()):
            self._canceller = asyncio.create_task(self._send_cancels(), name=f"cancel on {self.node_id}")

    async def _send_cancels(self) -> None:
        while self._cancels and self.connected:
            key = next(iter(self._cancels))
            request = node_pb2.CancelRequest(request_id=key[0], attempt=key[1])
            try:
                with rpc.node_errors(self.node_id):
                    await self._node.Cancel(request, timeout=_CANCEL_TIMEOUT_S)
            except NodeUnavailable:
                return  # kept: sent again when the node is back
            except MoonpoolError as error:
                # The node knows better, for example that the request has ended.
                log.debug("cancel of %s attempt %d: %s", *key, error)
            self._cancels.pop(key, None)


class DecodeClient(NodeClient):
    """A decode node: its one token stream is shared by all requests, and is its liveness too."""

    def __init__(
        self,
        node_id: str,
        address: str,
        on_change: Callable[[], None],
        *,
        conductor_id: str,
        on_step: Callable[[node_pb2.StepTokens, int], None],
    ) -> None:
        """``on_step`` gets each message, and how many of its tokens an attempt was still waiting for."""
        super().__init__(node_id, address, on_change)
        self._conductor_id = conductor_id
        self._on_step = on_step
        self._decode = node_pb2_grpc.DecodeNodeStub(self._channel)

    async def decode(self, request: node_pb2.DecodeRequest, timeout_s: float) -> node_pb2.DecodeReply:
        with rpc.node_errors(self.node_id):
            reply: node_pb2.DecodeReply = await self._decode.Decode(
                request, timeout=timeout_s, metadata=rpc.request_metadata()
            )
        return reply

    async def _watch(self) -> None:
        pause_s = _REOPEN_FIRST_S
        while True:
            await self._channel.channel_ready()
            stream = self._decode.Tokens(node_pb2.TokensRequest(conductor_id=self._conductor_id))
            self._set_connected(True, "")
            reason = "it closed the token stream"
            try:
                with rpc.node_errors(self.node_id):
                    async for step in stream:
                        pause_s = _REOPEN_FIRST_S
                        self._deliver(step)
            except NodeUnavailable as error:
                reason = error.reason
            except RemoteError as error:
                reason = error.details
            finally:
                stream.cancel()
            self._set_connected(False, reason)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _REOPEN_LONGEST_S)

    def _deliver(self, step: node_pb2.StepTokens) -> None:
        dependents, num_delivered = self._dependents, 0
        for token in step.tokens:
            key = (token.request_id, token.attempt)
            dependent = dependents.get(key)
            if dependent is not None:
                dependent.put(token)
                num_delivered += 1
            elif not token.finish_reason:
                # An attempt that was given up. A node that was away for longer than its lease, as SIGSTOP and
                # SIGCONT make it, has not heard of that.
                self.cancel(key)
        self._on_step(step, num_delivered)
