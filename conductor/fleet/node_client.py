"""The connection to one node: calls, token stream and liveness."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterable, Awaitable, Callable, Sequence
from typing import Any, Protocol, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import Message

from moonpool.protos import node_pb2, node_pb2_grpc
from moonpool.runtime import rpc
from moonpool.runtime.errors import MoonpoolError, NodeUnavailable, RemoteError
from moonpool.runtime.service.vital import cancel_and_wait, restarted

log = logging.getLogger(__name__)

_CANCEL_TIMEOUT_S = 5.0
_SWITCH_TIMEOUT_S = 5.0
# The files of an adapter are read meanwhile.
_ADAPTER_TIMEOUT_S = 60.0
# Of one node, whatever it says.
_MOST_ADAPTERS = 1 << 16
# The call only begins a drain.
_DRAIN_TIMEOUT_S = 5.0
# How long closing waits for cancels in flight.
_CLOSE_WAIT_S = 0.5
# Pauses before a broken token stream is opened again: the first and the longest.
_REOPEN_FIRST_S = 0.05
_REOPEN_LONGEST_S = 1.0
# Undelivered cancels kept for an unreachable node.
_MAX_CANCELS = 4096
# How much later than the loss of its connection the last tokens of a node may be read.
_LAST_TOKENS_S = 0.25

RequestKey = tuple[str, int]  # request id, attempt
_Reply = TypeVar("_Reply", bound=Message)


class Dependent(Protocol):
    """An attempt that depends on a node. Its methods must not block."""

    def put(self, token: node_pb2.TokenOut) -> None:
        """The decode node produced ``token``."""

    def fail(self, error: NodeUnavailable) -> None:
        """The node is gone: nothing more will come from it."""


class NodeClient:
    """A channel to a node. Its gRPC connection is the node's liveness, without Redis; on the same host calls
    and tokens go over a Unix socket beside it.

    ``on_change`` is called after each change of ``connected``. Calls raise ``NodeUnavailable`` or
    ``RemoteError``.
    """

    def __init__(self, node_id: str, address: str, on_change: Callable[[], None]) -> None:
        self.node_id = node_id
        self.address = address
        self.connected = False
        self._on_change = on_change
        self._channel = rpc.channel(address, direct=True)
        self._node = node_pb2_grpc.NodeStub(self._channel)
        self._roles = node_pb2_grpc.RolesStub(self._channel)
        self._adapters = node_pb2_grpc.AdaptersStub(self._channel)
        self._prefill = node_pb2_grpc.PrefillNodeStub(self._channel)
        self._dependents: dict[RequestKey, Dependent] = {}
        self._cancels: dict[RequestKey, None] = {}  # not yet delivered; ordered
        self._canceller: asyncio.Task[None] | None = None
        self._watcher: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._watcher = restarted(
            self._watch,
            f"watch {self.node_id}",
            "watch of a node",
            lambda: self._set_connected(False, "the watch of it failed"),
        )

    async def close(self) -> None:
        """Drop the connection. Calls in flight fail with ``NodeUnavailable``. Idempotent."""
        watcher, self._watcher = self._watcher, None
        if watcher is None:
            return
        # First: it must not connect to the next process at its address.
        await cancel_and_wait(watcher)
        if self.connected and self._canceller is not None:
            # With its cancels the node need not wait until it misses us.
            await asyncio.wait((self._canceller,), timeout=_CLOSE_WAIT_S)
        await cancel_and_wait(self._canceller)
        self._set_connected(False, "the conductor closed the connection")
        await self._channel.close(None)

    def abandon(self, reason: str) -> None:
        """Fail all attached attempts though the connection still stands."""
        dependents, self._dependents = self._dependents, {}
        for dependent in dependents.values():
            dependent.fail(NodeUnavailable(self.node_id, reason))

    def attach(self, key: RequestKey, dependent: Dependent) -> None:
        """Send tokens of ``key``, and the loss of the node, to ``dependent``."""
        self._dependents[key] = dependent

    def detach(self, key: RequestKey) -> None:
        """Drop further tokens of ``key``. Idempotent."""
        self._dependents.pop(key, None)

    async def prefill(self, request: node_pb2.PrefillRequest, timeout_s: float) -> node_pb2.PrefillReply:
        """Cancelling this call cancels the work on the node."""
        return await self._ask(self._prefill.Prefill, request, timeout_s, metadata=rpc.request_metadata())

    async def replicate(
        self, source: node_pb2.KvAddress, keys: Sequence[bytes], timeout_s: float, *, surplus: bool = True
    ) -> node_pb2.ReplicateReply:
        """Have the node read its missing blocks of a chain from ``source``. ``surplus``: they are
        evicted first once they are unused."""
        request = node_pb2.ReplicateRequest(source=source, keys=b"".join(keys), surplus=surplus)
        return await self._ask(self._node.Replicate, request, timeout_s)

    async def evict(self, keys: Sequence[bytes], num_blocks: int, timeout_s: float) -> int:
        """Have the node drop the last blocks of a chain. Returns how many it dropped."""
        request = node_pb2.EvictRequest(keys=b"".join(keys), num_blocks=num_blocks)
        reply: node_pb2.EvictReply = await self._ask(self._node.Evict, request, timeout_s)
        return reply.num_blocks

    async def hint(self, request: node_pb2.HintRequest, timeout_s: float) -> int:
        """Have the node keep a chain, or let it go. Returns how many of its blocks."""
        reply: node_pb2.HintReply = await self._ask(self._node.Hint, request, timeout_s)
        return reply.num_blocks

    async def switch(self, role: str) -> node_pb2.SwitchReply:
        """Have the node change its role, without waiting for requests of the former one."""
        return await self._ask(self._roles.Switch, node_pb2.SwitchRequest(role=role), _SWITCH_TIMEOUT_S)

    async def load_adapter(self, request: node_pb2.LoadAdapterRequest) -> node_pb2.Adapter:
        """Have the node read and check a LoRA adapter, and know it by its name."""
        return await self._ask(self._adapters.Load, request, _ADAPTER_TIMEOUT_S)

    async def unload_adapter(self, name: str) -> node_pb2.Adapter:
        """Have the node forget a LoRA adapter. An unknown name is no error."""
        await self._ask(self._adapters.Unload, node_pb2.UnloadAdapterRequest(name=name), _ADAPTER_TIMEOUT_S)
        return node_pb2.Adapter(name=name)

    async def list_adapters(self) -> list[node_pb2.Adapter]:
        """The LoRA adapters that the node knows, by name."""
        found: list[node_pb2.Adapter] = []
        more = True
        while more:
            request = node_pb2.ListAdaptersRequest(after=found[-1].name if found else "")
            reply: node_pb2.ListAdaptersReply = await self._ask(
                self._adapters.List, request, _ADAPTER_TIMEOUT_S
            )
            found += reply.adapters
            more = reply.more and len(reply.adapters) > 0 and len(found) < _MOST_ADAPTERS
        return found

    async def drain(self) -> None:
        """Have the node accept nothing new, finish its requests and end."""
        await self._ask(self._node.Drain, node_pb2.DrainRequest(), _DRAIN_TIMEOUT_S)

    async def _ask(
        self, call: Callable[..., Awaitable[_Reply]], request: Message, timeout_s: float, **options: Any
    ) -> _Reply:
        with rpc.node_errors(self.node_id):
            return await call(request, timeout=timeout_s, **options)

    def cancel(self, key: RequestKey) -> None:
        """Have the node stop ``key``, now or when it is reachable again. Returns at once."""
        self._cancels[key] = None
        if len(self._cancels) > _MAX_CANCELS:
            del self._cancels[next(iter(self._cancels))]
        self._deliver_cancels()

    async def _watch(self) -> None:
        """Follow the state of the channel, and keep it connected so that a loss is noticed."""
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
            rpc.lose(self._channel)
            # Tokens may have been lost with the stream: every request on the node is placed again.
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
                await self._ask(self._node.Cancel, request, _CANCEL_TIMEOUT_S)
            except NodeUnavailable:
                return  # sent again when the node is back
            except MoonpoolError as error:
                # For example, the request has ended.
                log.debug("cancel of %s attempt %d: %s", *key, error)
            self._cancels.pop(key, None)


class DecodeClient(NodeClient):
    """A decode node. One token stream serves all requests; it is the liveness, too."""

    def __init__(
        self,
        node_id: str,
        address: str,
        on_change: Callable[[], None],
        *,
        conductor_id: str,
        on_step: Callable[[node_pb2.StepTokens, int], None],
        on_late: Callable[[float], None] = lambda seconds: None,
    ) -> None:
        """``on_step``: called with each message and the number of its tokens that were delivered.
        ``on_late``: called with the seconds that the node took for one that was not."""
        super().__init__(node_id, address, on_change)
        self._conductor_id = conductor_id
        self._on_step = on_step
        self._on_late = on_late
        self._followed = False  # whether the latest stream brought a message
        self._decode = node_pb2_grpc.DecodeNodeStub(self._channel)

    async def decode(self, request: node_pb2.DecodeRequest, timeout_s: float) -> node_pb2.DecodeReply:
        return await self._ask(self._decode.Decode, request, timeout_s, metadata=rpc.request_metadata())

    async def _watch(self) -> None:
        pause_s = _REOPEN_FIRST_S
        while True:
            await self._channel.channel_ready()
            stream = self._decode.Tokens(node_pb2.TokensRequest(conductor_id=self._conductor_id))
            self._set_connected(True, "")
            following = asyncio.create_task(self._follow(stream))
            losing = asyncio.create_task(self._loss())
            try:
                await asyncio.wait((following, losing), return_when=asyncio.FIRST_COMPLETED)
                # A node that ends has sent its last tokens before it closes the connection.
                await asyncio.wait((following,), timeout=_LAST_TOKENS_S)
                reason = (following if following.done() else losing).result()
            finally:
                await cancel_and_wait(following, losing)
                stream.cancel()
            if self._followed:
                pause_s = _REOPEN_FIRST_S
            self._set_connected(False, reason)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _REOPEN_LONGEST_S)

    async def _follow(self, stream: AsyncIterable[node_pb2.StepTokens]) -> str:
        """Deliver its messages. Returns why it ended."""
        self._followed = False
        try:
            with rpc.node_errors(self.node_id):
                async for step in stream:
                    self._followed = True
                    self._deliver(step)
        except NodeUnavailable as error:
            return error.reason
        except RemoteError as error:
            return error.details
        except asyncio.CancelledError:
            # gRPC ends streams in this way, too, when it closes their channel.
            if (task := asyncio.current_task()) is None or task.cancelling():
                raise
            return "its token stream was cancelled here"
        return "it closed the token stream"

    async def _loss(self) -> str:
        """Return when the gRPC connection is lost, whatever becomes of a direct stream."""
        ready = grpc.ChannelConnectivity.READY
        while (state := self._channel.get_state()) is ready:
            await self._channel.wait_for_state_change(state)
        return "the connection broke"

    def _deliver(self, step: node_pb2.StepTokens) -> None:
        dependents, num_delivered = self._dependents, 0
        for token in step.tokens:
            key = (token.request_id, token.attempt)
            dependent = dependents.get(key)
            if dependent is not None:
                dependent.put(token)
                num_delivered += 1
                continue
            if token.busy_s:
                self._on_late(token.busy_s)
            if not token.finish_reason:
                # The attempt was given up. A node that was stopped (SIGSTOP) for longer than its lease has
                # missed that.
                self.cancel(key)
        self._on_step(step, num_delivered)
