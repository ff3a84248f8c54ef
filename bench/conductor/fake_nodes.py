"""Nodes that compute nothing, over real gRPC: the time of a request is then the conductor's."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from typing import Any

import uvloop
from grpc.aio import ServicerContext

from moonpool.conductor.fleet.served_model import ServedModel
from moonpool.kvstore.index.node_publisher import IndexPublisher
from moonpool.kvstore.index.redis.client import connect
from moonpool.kvstore.index.redis.kv_index import KVIndex
from moonpool.kvstore.index.redis.node_record import NodeLoad, NodeRecord, TierFill
from moonpool.protos import node_pb2, node_pb2_grpc
from moonpool.runtime import rpc
from moonpool.runtime.config.options import Config, IndexOptions
from moonpool.runtime.machine.description import versions_of

new_event_loop = uvloop.new_event_loop

# Ordinary words of the vocabulary: neither special tokens nor single bytes.
_FIRST_TOKEN, _NUM_TOKENS = 300, 1500
# Steps that may wait for the conductor, as a real node's batch does.
_AHEAD = 4
# Their heartbeats may come all at once, and a client has a limit of connections.
_NODES_A_CLIENT = 64
# As many figures of transfers and evictions as real nodes publish.
_PATH = {"nbytes": 1 << 40, "seconds": 1234.567891, "batches": 123456}
_PATH |= {"failures": 7, "retries": 7, "in_flight": 1}
_PATHS = {path: _PATH | {"buckets": [[10.0**-n, 1 << n] for n in range(11)]} for path in ("shm", "tcp")}
_EVICTED = {
    tier: {"below": 1 << 20, "dropped": 1 << 19, "surplus": 1 << 18} for tier in ("pool", "host", "ssd")
}


class FakeNode(
    node_pb2_grpc.PrefillNodeServicer, node_pb2_grpc.DecodeNodeServicer, node_pb2_grpc.NodeServicer
):
    """A node of either role: the methods that a conductor calls."""

    def __init__(self, role: str, number: int, delay_s: float, record: NodeRecord) -> None:
        self._role = role
        self._delay_s = delay_s
        self._record = replace(record, node_id=f"{role}-{number}", role=role)
        self._address = ""
        self._steps: defaultdict[str, asyncio.Queue[node_pb2.StepTokens]]  # by conductor
        self._steps = defaultdict(lambda: asyncio.Queue(_AHEAD))
        self._running: dict[tuple[str, int], node_pb2.DecodeRequest] = {}
        self._indices: dict[tuple[str, int], int] = {}
        self._wake = asyncio.Event()

    async def start(self, index: KVIndex, options: IndexOptions) -> None:
        decode = self._role == "decode"
        add = (
            node_pb2_grpc.add_DecodeNodeServicer_to_server
            if decode
            else node_pb2_grpc.add_PrefillNodeServicer_to_server
        )
        node = (node_pb2_grpc.add_NodeServicer_to_server, self)
        self._server, port = await rpc.serve([(add, self), node], "127.0.0.1", 0, direct=True)
        self._address = f"127.0.0.1:{port}"
        self._publisher = IndexPublisher(index, self.record, options, list)
        await self._publisher.start()
        if decode:
            self._loop = asyncio.create_task(self._decode())

    def record(self) -> NodeRecord:
        return replace(self._record, rpc_address=self._address)

    async def Prefill(
        self, request: node_pb2.PrefillRequest, context: ServicerContext[Any, Any]
    ) -> node_pb2.PrefillReply:
        if self._delay_s:
            await asyncio.sleep(self._delay_s)
        return node_pb2.PrefillReply(token=_token(request.work, 0), compute_s=self._delay_s)

    async def Decode(
        self, request: node_pb2.DecodeRequest, context: ServicerContext[Any, Any]
    ) -> node_pb2.DecodeReply:
        key = (request.work.request_id, request.work.attempt)
        self._running[key], self._indices[key] = request, 1
        self._wake.set()
        return node_pb2.DecodeReply(epoch=self._record.epoch)

    async def Tokens(
        self, request: node_pb2.TokensRequest, context: ServicerContext[Any, Any]
    ) -> AsyncIterator[node_pb2.StepTokens]:
        while True:
            yield await self._steps[request.conductor_id].get()

    async def Cancel(
        self, request: node_pb2.CancelRequest, context: ServicerContext[Any, Any]
    ) -> node_pb2.CancelReply:
        self._running.pop((request.request_id, request.attempt), None)
        return node_pb2.CancelReply()

    async def _decode(self) -> None:
        while True:
            if not self._running:
                self._wake.clear()
                await self._wake.wait()
            if self._delay_s:
                # Twice: the prefill, which runs at the same time, and the decode itself.
                started, self._running = self._running, {}
                asyncio.get_running_loop().call_later(2 * self._delay_s, self._finish, started)
                continue
            tokens = defaultdict[str, list[node_pb2.TokenOut]](list)
            for key, request in list(self._running.items()):
                index = self._indices[key]
                self._indices[key] = index + 1
                tokens[request.conductor_id].append(_token(request.work, index))
                if index + 1 >= request.work.sampling.max_tokens:
                    del self._running[key], self._indices[key]
            await self._put(tokens)

    def _finish(self, started: dict[tuple[str, int], node_pb2.DecodeRequest]) -> None:
        tokens = defaultdict[str, list[node_pb2.TokenOut]](list)
        for request in started.values():
            tokens[request.conductor_id] += [
                _token(request.work, index) for index in range(1, request.work.sampling.max_tokens)
            ]
        self._sending = asyncio.ensure_future(self._put(tokens))

    async def _put(self, tokens: Mapping[str, list[node_pb2.TokenOut]]) -> None:
        for conductor_id, own in tokens.items():
            await self._steps[conductor_id].put(self._step(own))

    def _step(self, tokens: list[node_pb2.TokenOut]) -> node_pb2.StepTokens:
        return node_pb2.StepTokens(
            tokens=tokens, num_running=len(self._running), num_free_blocks=4096, num_steps=1
        )


def _token(work: node_pb2.Work, index: int) -> node_pb2.TokenOut:
    last = index + 1 >= work.sampling.max_tokens
    token = node_pb2.TokenOut(
        request_id=work.request_id,
        attempt=work.attempt,
        index=index,
        token_id=_FIRST_TOKEN + 7 * index % _NUM_TOKENS,
        has_token=True,
        finish_reason=node_pb2.FINISH_LENGTH if last else node_pb2.FINISH_NONE,
    )
    if index == 1:
        token.received.CopyFrom(node_pb2.KvReceived(nbytes=4096, seconds=1e-4, num_blocks=1))
    return token


class FakeNodes:
    """Nodes of each role in one process. ``delay_s``: of a prefill and of a whole decode; 0: none."""

    def __init__(self, redis_url: str, namespace: str, delay_s: float, counts: dict[str, int]) -> None:
        self._options = IndexOptions(redis_url=redis_url, namespace=namespace)
        self._delay_s = delay_s
        self._counts = counts

    async def start(self) -> None:
        config = Config()
        model = ServedModel.from_checkpoint(config.model.directory, block_size=config.engine.block_size)
        layout = next(name for name, layout in model.layouts().items() if layout.dtype == "float32")
        record = NodeRecord(
            "",
            time.time_ns(),
            "",
            model="fake",
            layout=layout,
            load=NodeLoad(num_blocks=1 << 20, free_blocks=1 << 20),
            profile={"prefill_base_s": max(self._delay_s, 1e-4), "decode_base_s": 1e-4},
            tiers={"host": TierFill(1 << 20, 1 << 19), "ssd": TierFill(1 << 22, 1 << 21)},
            extra={"versions": versions_of(("moonpool", "torch")), "paths": _PATHS, "evicted": _EVICTED},
        )
        self._nodes = [
            FakeNode(role, number, self._delay_s, record)  # type: ignore[abstract]
            for role, count in self._counts.items()
            for number in range(count)
        ]
        for number, node in enumerate(self._nodes):
            if number % _NODES_A_CLIENT == 0:
                index = KVIndex(connect(self._options.redis_url), self._options.namespace)
            await node.start(index, self._options)
