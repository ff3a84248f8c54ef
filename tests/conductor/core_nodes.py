"""A cluster whose nodes follow a script: real gRPC, a real Redis, made-up tokens, and faults on demand.

A node's next token is a digest of the whole lineage it was given, so a wrong lineage gives wrong tokens.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
import time
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import grpc
import numpy as np
import redis
from grpc.aio import ServicerContext

from moonpool.conductor.core import Conductor
from moonpool.conductor.fleet.providers.provider import Provider
from moonpool.conductor.fleet.served_model import ServedModel
from moonpool.conductor.observing.replica_groups import holders
from moonpool.conductor.request import GenerateRequest, SamplingParams, TokenEvent
from moonpool.kvstore.blocks.keys import BlockKey, unpack
from moonpool.kvstore.blocks.tier import Tier
from moonpool.kvstore.index.node_publisher import IndexPublisher
from moonpool.kvstore.index.redis.client import connect
from moonpool.kvstore.index.redis.kv_index import KVIndex
from moonpool.kvstore.index.redis.node_record import NodeLoad, NodeRecord
from moonpool.local.redis_server import find_redis
from moonpool.protos import node_pb2, node_pb2_grpc
from moonpool.runtime import rpc
from moonpool.runtime.config.options import ConductorOptions, IndexOptions, PlannerOptions
from moonpool.runtime.errors import LifeEnded, MoonpoolError
from moonpool.runtime.service.tied_command import tied_command
from tests.processes import stop

MODEL = ServedModel("tiny", 4096, 50_000, (1,), num_layers=2, num_kv_heads=1, head_dim=8, block_size=16)
LAYOUT = next(fp for fp, layout in MODEL.layouts().items() if layout.dtype == "float32")
LEASE_TTL_S = 1.0  # long enough that a busy machine renews it in time

Script = Callable[["ScriptedNode", node_pb2.Work, int], Awaitable[None]]


class Busy(MoonpoolError):
    code = "RESOURCE_EXHAUSTED"


class Broken(MoonpoolError):
    code = "INTERNAL"


class Wrong(MoonpoolError):
    code = "INVALID_ARGUMENT"


def next_token(token_ids: list[int]) -> int:
    return zlib.crc32(np.array(token_ids, "<i4").tobytes()) % MODEL.vocab_size


def continuation(prompt: list[int], count: int) -> list[int]:
    """What a correct cluster generates."""
    token_ids = list(prompt)
    for _ in range(count):
        token_ids.append(next_token(token_ids))
    return token_ids[len(prompt) :]


async def obedient(node: ScriptedNode, work: node_pb2.Work, index: int) -> None:
    """A script without faults."""


class ScriptedNode(
    node_pb2_grpc.PrefillNodeServicer,
    node_pb2_grpc.DecodeNodeServicer,
    node_pb2_grpc.NodeServicer,
    node_pb2_grpc.AdaptersServicer,
):
    """Either role. ``script(node, work, index)`` runs before each token: it may wait, raise or kill."""

    def __init__(
        self,
        index: KVIndex,
        node_id: str,
        role: str,
        script: Script = obedient,
        lease_ttl_s: float = LEASE_TTL_S,
    ) -> None:
        self.node_id, self.role, self.script = node_id, role, script
        self.held: dict[BlockKey, Tier] = {}
        self.load = NodeLoad(num_blocks=4096, free_blocks=4096)
        self.state, self.region, self.zone = "ready", "", ""
        self.profile = {"prefill_base_s": 1e-3, "prefill_token_s": 1e-5, "decode_base_s": 1e-3}
        self.num_cached_tokens, self.compute_s = 16, 1e-3  # of every prefill, as it says
        self.prefill_facts: dict[str, Any] = {}  # further fields of its replies
        self.spent: dict[str, float] = {}  # of every message with a token: fields of TokenOut
        self.works: list[node_pb2.Work] = []
        self.prefills: list[node_pb2.PrefillRequest] = []
        self.cancelled: list[tuple[str, int]] = []
        self.copied: list[tuple[str, int]] = []  # source, number of blocks
        self.prefetches = False  # clients ask for copies
        self.stop_at = -1  # index of the token that ends a sequence by itself; -1: none
        self.adapters: dict[str, node_pb2.Adapter] = {}
        self.num_listed = 0  # calls
        self.adapter_error: MoonpoolError | None = None
        self.dead = False
        self.direct = True  # it takes calls and sends tokens over a Unix socket, too
        self.deaf = False  # cancels do not reach it
        # Waits until a new request has its blocks.
        self.admit: Callable[[node_pb2.DecodeRequest], Awaitable[None]] | None = None
        # Takes a running request over: returns its tokens at the moment when its node stopped.
        self.take: Callable[[node_pb2.DecodeRequest], Awaitable[list[int]]] | None = None
        self.record = NodeRecord(node_id, time.time_ns(), role, layout=LAYOUT, model="tiny-1")
        options = IndexOptions(lease_ttl_s=lease_ttl_s, publish_interval_s=0.001)
        self.publisher = IndexPublisher(index, self._record, options, lambda: list(self.held.items()))
        self._outboxes: dict[str, asyncio.Queue[node_pb2.StepTokens]] = {}
        self._tasks: dict[tuple[str, int], asyncio.Task[None]] = {}
        self._stopping: asyncio.Task[None] | None = None

    async def start(self) -> ScriptedNode:
        await self.serve(0)
        try:
            await self.publisher.start()
        except BaseException:
            await self.stop_serving()
            raise
        return self

    async def serve(self, port: int) -> None:
        add = [
            node_pb2_grpc.add_PrefillNodeServicer_to_server,
            node_pb2_grpc.add_DecodeNodeServicer_to_server,
        ][self.role == "decode"]
        node = node_pb2_grpc.add_NodeServicer_to_server
        adapters = node_pb2_grpc.add_AdaptersServicer_to_server
        self._server, self.port = await rpc.serve(
            [(add, self), (node, self), (adapters, self)], "127.0.0.1", port, direct=self.direct
        )

    async def die(self) -> None:
        """As abrupt as it can be within one process: every connection breaks, and no more heartbeats."""
        if self.dead:
            return
        self.dead = True
        for task in list(self._tasks.values()):
            if task is not asyncio.current_task():
                task.cancel()
        publishing, self.publisher._task = self.publisher._task, None
        if publishing is not None:
            publishing.cancel()
        await self.stop_serving()

    async def leave(self) -> None:
        """A farewell. It may be cancelled."""
        self.dead = True
        try:
            await self.publisher.close()
        finally:
            await self.stop_serving()

    async def stop_serving(self) -> None:
        """Break every connection. May be called by one of the calls that this cancels: a server whose stop is
        cut off would keep gRPC from ever shutting down.
        """
        self._stopping = asyncio.create_task(self._server.stop(None))
        await asyncio.shield(self._stopping)

    async def stopped(self) -> None:
        if self._stopping is not None:
            await self._stopping

    def hold(self, keys: list[BlockKey]) -> None:
        for key in keys:
            self.held[key] = Tier.POOL
            self.publisher.stored(key)

    async def announce(self) -> None:
        self.publisher.announce()
        await self.publisher.flush()

    def _record(self) -> NodeRecord:
        address = f"127.0.0.1:{self.port}"
        kv = node_pb2.KvAddress(node_id=self.node_id, epoch=self.record.epoch, rpc_address=address)
        version = zlib.crc32(str(sorted((one.name, one.digest) for one in self.adapters.values())).encode())
        return replace(
            self.record,
            extra={**self.record.extra, "adapters": [version, len(self.adapters)]},
            rpc_address=address,
            state=self.state,
            region=self.region,
            zone=self.zone,
            load=self.load,
            profile=self.profile,
            kv_address=kv.SerializeToString(),
        )

    # ------------------------------------------------------------------ prefill

    async def Prefill(
        self, request: node_pb2.PrefillRequest, context: ServicerContext[Any, Any]
    ) -> node_pb2.PrefillReply:
        work = request.work
        self.works.append(work)
        self.prefills.append(request)
        index = len(work.token_ids) // 4 - work.num_prompt_tokens
        try:
            await self.script(self, work, index)
        except asyncio.CancelledError:
            self.cancelled.append((work.request_id, work.attempt))
            raise
        return node_pb2.PrefillReply(
            token=self.token(work, index, next_token(lineage(work))),
            num_cached_tokens=self.num_cached_tokens,
            compute_s=self.compute_s,
            **self.prefill_facts,
        )

    # ------------------------------------------------------------------ decode

    async def Decode(
        self, request: node_pb2.DecodeRequest, context: ServicerContext[Any, Any]
    ) -> node_pb2.DecodeReply:
        work = request.work
        self.works.append(work)
        key = (work.request_id, work.attempt)
        self._tasks[key] = asyncio.create_task(self._generate(request))
        return node_pb2.DecodeReply(epoch=self.record.epoch)

    async def Tokens(
        self, request: node_pb2.TokensRequest, context: ServicerContext[Any, Any]
    ) -> AsyncIterator[node_pb2.StepTokens]:
        outbox = self._outbox(request.conductor_id)
        while True:
            yield await outbox.get()

    async def Cancel(
        self, request: node_pb2.CancelRequest, context: ServicerContext[Any, Any]
    ) -> node_pb2.CancelReply:
        if self.deaf:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "stopped")
        key = (request.request_id, request.attempt)
        self.cancelled.append(key)
        if task := self._tasks.pop(key, None):
            task.cancel()
        return node_pb2.CancelReply()

    async def Replicate(
        self, request: node_pb2.ReplicateRequest, context: ServicerContext[Any, Any]
    ) -> node_pb2.ReplicateReply:
        # What a conductor copies by itself may go again, what a client asked for may not.
        assert request.surplus or self.prefetches, "a copy for good, and no request asked for one"
        keys = unpack(request.keys)
        new = [key for key in keys if key not in self.held]
        self.hold(new)
        self.copied.append((request.source.node_id, len(new)))
        return node_pb2.ReplicateReply(num_blocks=len(keys), num_read=len(new), nbytes=64 * len(new))

    async def Evict(
        self, request: node_pb2.EvictRequest, context: ServicerContext[Any, Any]
    ) -> node_pb2.EvictReply:
        for key in unpack(request.keys)[-request.num_blocks :]:
            del self.held[key]
            self.publisher.removed(key)
        return node_pb2.EvictReply(num_blocks=request.num_blocks)

    async def Load(
        self, request: node_pb2.LoadAdapterRequest, context: ServicerContext[Any, Any]
    ) -> node_pb2.Adapter:
        if self.adapter_error is not None:
            raise self.adapter_error
        self.adapters[request.name] = node_pb2.Adapter(
            name=request.name,
            digest=f"{zlib.crc32(request.path.encode()):032x}",
            path=request.path,
            rank=8,
            loaded_unix_s=request.loaded_unix_s,
        )
        return self.adapters[request.name]

    async def Unload(
        self, request: node_pb2.UnloadAdapterRequest, context: ServicerContext[Any, Any]
    ) -> node_pb2.UnloadAdapterReply:
        was_known = self.adapters.pop(request.name, None) is not None
        return node_pb2.UnloadAdapterReply(was_known=was_known)

    async def List(
        self, request: node_pb2.ListAdaptersRequest, context: ServicerContext[Any, Any]
    ) -> node_pb2.ListAdaptersReply:
        self.num_listed += 1
        names = [name for name in sorted(self.adapters) if name > request.after]
        found = [self.adapters[name] for name in names[:2]]
        return node_pb2.ListAdaptersReply(adapters=found, more=len(names) > 2)

    def tell(self, conductor_id: str, *tokens: node_pb2.TokenOut) -> None:
        running = len(self._tasks)
        self._outbox(conductor_id).put_nowait(
            node_pb2.StepTokens(
                tokens=tokens,
                num_running=running,
                num_waiting=self.load.num_waiting,
                num_free_blocks=self.load.free_blocks,
                num_steps=int(any(token.has_token for token in tokens)),
            )
        )

    def _outbox(self, conductor_id: str) -> asyncio.Queue[node_pb2.StepTokens]:
        return self._outboxes.setdefault(conductor_id, asyncio.Queue())

    def token(self, work: node_pb2.Work, index: int, token_id: int) -> node_pb2.TokenOut:
        last = index + 1 >= work.sampling.max_tokens
        reason = node_pb2.FINISH_LENGTH if last else node_pb2.FINISH_NONE
        return node_pb2.TokenOut(
            request_id=work.request_id,
            attempt=work.attempt,
            index=index,
            token_id=token_id,
            has_token=True,
            finish_reason=node_pb2.FINISH_STOP if index == self.stop_at else reason,
            **self.spent,
        )

    async def _generate(self, request: node_pb2.DecodeRequest) -> None:
        work, token_ids = request.work, lineage(request.work)
        if not request.migrates:
            if self.admit is not None:
                await self.admit(request)
            token_ids.append(next_token(token_ids))
        elif self.take is not None:
            token_ids = await self.take(request)
        received = node_pb2.KvReceived(nbytes=4096, seconds=1e-4, num_blocks=1, transport="shm")
        index = len(token_ids) - work.num_prompt_tokens
        self.tell(
            request.conductor_id,
            node_pb2.TokenOut(
                request_id=work.request_id, attempt=work.attempt, received=received, index=index
            ),
        )
        for index in range(len(token_ids) - work.num_prompt_tokens, work.sampling.max_tokens):
            try:
                await self.script(self, work, index)
            except MoonpoolError as error:
                self.tell(
                    request.conductor_id,
                    node_pb2.TokenOut(
                        request_id=work.request_id,
                        attempt=work.attempt,
                        finish_reason=node_pb2.FINISH_ERROR,
                        error=str(error),
                        ended_life=isinstance(error, LifeEnded),
                        failure=error.failure.value,
                    ),
                )
                return
            if self.dead:
                return
            token_ids.append(next_token(token_ids))
            self.tell(request.conductor_id, self.token(work, index, token_ids[-1]))
            # The rate is the consumer's own: each token is a message, as one request alone would have it.
            await asyncio.sleep(0)
        self._tasks.pop((work.request_id, work.attempt), None)


def lineage(work: node_pb2.Work) -> list[int]:
    return list(np.frombuffer(work.token_ids, "<i4").tolist())


class Cluster:
    """Nodes and one conductor."""

    def __init__(self, index: KVIndex, conductor: Conductor, lease_ttl_s: float = LEASE_TTL_S) -> None:
        self.index = index
        self.conductor = conductor
        self.lease_ttl_s = lease_ttl_s  # of its nodes
        self.nodes: dict[str, ScriptedNode] = {}
        self._former: list[ScriptedNode] = []  # earlier lives

    async def add(self, node_id: str, script: Script = obedient, **given: Any) -> ScriptedNode:
        """A node by its name ("p0" prefills, "d0" decodes, "s0" stores), which the conductor knows then.

        ``given``: attributes that it has before the conductor knows it, and may use it.
        """
        role = {"p": "prefill", "s": "store"}.get(node_id[0], "decode")
        node = ScriptedNode(self.index, node_id, role, script, self.lease_ttl_s)
        for name, value in given.items():
            setattr(node, name, value)
        await node.start()
        if node_id in self.nodes:
            self._former.append(self.nodes[node_id])
        self.nodes[node_id] = node
        await self.until(lambda: self.state(node_id) == "ready")
        return node

    async def stop(self) -> None:
        every = [*self._former, *self.nodes.values()]
        for node in every:
            await node.die()
        for node in every:
            await node.stopped()

    def state(self, node_id: str) -> str:
        """As the conductor sees it: that of this life."""
        epoch = str(self.nodes[node_id].record.epoch)
        nodes = [one for node in self.conductor.cluster()["nodes"] for one in holders(node)]
        return next((n["state"] for n in nodes if (n["node_id"], n["epoch"]) == (node_id, epoch)), "")

    async def until(self, condition: Callable[[], object], timeout_s: float = 60.0) -> None:
        async with asyncio.timeout(timeout_s):
            while not condition():  # noqa: ASYNC110 (other processes decide)
                await asyncio.sleep(0.002)

    async def told_profile(self, node: ScriptedNode) -> None:
        """Announce a node's profile, and wait until the conductor places by it."""
        await node.announce()
        view = self.conductor._deps.registry.members[node.node_id].view
        await self.until(lambda: view.cost.profile.prefill_base_s == node.profile["prefill_base_s"])

    async def generate(self, request: GenerateRequest) -> list[int]:
        """All its tokens, checked to be in order and to end once."""
        return [event.token_id for event in await self.events(request)]

    async def events(self, request: GenerateRequest) -> list[TokenEvent]:
        events: list[TokenEvent] = []
        async with contextlib.aclosing(self.conductor.generate(request)) as stream:
            async for event in stream:
                assert event.index == len(events)
                assert not events or events[-1].finish_reason is None
                events.append(event)
        assert events[-1].finish_reason is not None
        return events

    def names(self, request_id: str) -> list[str]:
        """Its timeline's events."""
        timeline = self.conductor.timeline(request_id)
        return [event.name for event in timeline.events] if timeline else []


PROMPT = list(range(100, 140))


def request(
    request_id: str = "r", prompt: list[int] | None = None, max_tokens: int = 8, **options: Any
) -> GenerateRequest:
    prompt = PROMPT if prompt is None else prompt
    sampling = options.pop("sampling", SamplingParams(max_tokens=max_tokens))
    return GenerateRequest(request_id, np.array(prompt, np.int32), sampling, **options)


class RedisProcess:
    """A redis-server that can be killed and started again, empty."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / "redis.sock"
        self.url = f"unix://{self._path}"

    def start(self) -> None:
        self._path.unlink(missing_ok=True)
        command = [str(find_redis().path), "--port", "0", "--unixsocket", str(self._path), "--save", ""]
        self._process = subprocess.Popen(tied_command(command), stdout=subprocess.DEVNULL)
        client = redis.Redis.from_url(self.url)
        while True:
            try:
                client.ping()
                break
            except redis.RedisError:
                assert self._process.poll() is None, "redis-server ended"
                time.sleep(0.005)
        client.close()

    def stop(self) -> None:
        """SIGSTOP: connections stand, and nothing is answered."""
        stop(self._process.pid)

    def resume(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


@contextmanager
def redis_process() -> Iterator[RedisProcess]:
    # A Unix socket's path must be short.
    with TemporaryDirectory(prefix="mp") as directory:
        process = RedisProcess(Path(directory))
        process.start()
        try:
            yield process
        finally:
            process.kill()


@asynccontextmanager
async def running(
    url: str,
    *node_ids: str,
    namespace: str = "test",
    lease_ttl_s: float = LEASE_TTL_S,
    provider: Provider | None = None,
    planner: PlannerOptions | None = None,
    region: str = "",
    **options: Any,
) -> AsyncIterator[Cluster]:
    """A cluster of these nodes on the Redis at ``url``; ``options`` are the conductor's."""
    client = connect(url)
    index_options = IndexOptions(redis_url=url, namespace=namespace, lease_ttl_s=lease_ttl_s)
    conductor = Conductor(
        MODEL, ConductorOptions(**options), index_options, provider=provider, planner=planner, region=region
    )
    cluster = Cluster(KVIndex(client, namespace), conductor, lease_ttl_s)
    await conductor.start()
    try:
        for node_id in node_ids:
            await cluster.add(node_id)
        yield cluster
    finally:
        await conductor.close()
        await cluster.stop()
        await client.aclose()
