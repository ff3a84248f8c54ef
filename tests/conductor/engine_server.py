"""An OpenAI server with vLLM's extensions and made-up tokens, registered as the connector registers vLLM."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import orjson
from aiohttp import web
from grpc.aio import ServicerContext

from moonpool.kvstore.blocks.keys import BlockKey
from moonpool.kvstore.blocks.tier import Tier
from moonpool.kvstore.blocks.vllm_keys import VllmChain
from moonpool.kvstore.index.node_publisher import IndexPublisher
from moonpool.kvstore.index.redis.engine_facts import VLLM, EngineFacts
from moonpool.kvstore.index.redis.node_record import STAGES, NodeRecord
from moonpool.protos import node_pb2, node_pb2_grpc
from moonpool.runtime import rpc
from moonpool.runtime.config.options import IndexOptions
from tests.conductor.core_nodes import LEASE_TTL_S, MODEL, Cluster, next_token

FINGERPRINT = bytes(range(16))
NONE_HASH = bytes(32)
KEY = "a key"

Script = Callable[["EngineServer", dict[str, Any], int], Awaitable[None]]


def chain(salt: str = "") -> VllmChain:
    return VllmChain(FINGERPRINT, NONE_HASH, salt)


def keys_of(prompt: list[int], salt: str = "") -> list[BlockKey]:
    return chain(salt).extend(np.array(prompt, np.int32), MODEL.block_size, None)[0]


async def obedient(engine: EngineServer, body: dict[str, Any], index: int) -> None:
    """A script without faults."""


class EngineServer(node_pb2_grpc.NodeServicer):
    """``script(engine, body, index)`` runs before each token: it may wait, raise or kill."""

    def __init__(self, node_id: str, script: Script = obedient, *, role: str = "both", **facts: Any) -> None:
        self.node_id, self.script, self.role = node_id, script, role
        self.bodies: list[dict[str, Any]] = []
        self.aborted: list[str] = []
        self.held: dict[BlockKey, Tier] = {}
        self.stop_at = -1  # index of the token that ends a sequence by itself
        self.num_running = 0
        self.hands_over = True
        self.model = "served"
        self.keeps = False  # full blocks of what it served
        self.is_silent = False  # of cached tokens, so that nothing is learned of prefills
        self.num_cached_tokens = 0
        self.copied: list[node_pb2.ReplicateRequest] = []  # by the store node inside
        self._facts = facts
        self._site: web.AppRunner | None = None
        self._store: rpc.Server | None = None

    async def listen(self, port: int = 0) -> str:
        """Serve without an entry in the index; returns the URL."""
        app = web.Application()
        app.add_routes(
            [
                web.get("/v1/models", self._models),
                web.get("/metrics", self._metrics),
                web.post("/v1/completions", self._complete),
            ]
        )
        runner = self._site = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.0)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        self.port = runner.addresses[0][1]
        return f"http://127.0.0.1:{self.port}"

    async def start(self, cluster: Cluster, port: int = 0) -> EngineServer:
        url = await self.listen(port)
        [probe], _ = chain().extend(np.arange(MODEL.block_size, dtype=np.int32), MODEL.block_size, None)
        facts = EngineFacts(
            VLLM,
            url,
            block_size=MODEL.block_size,
            block_nbytes=4096,
            fingerprint=FINGERPRINT.hex(),
            max_model_len=MODEL.max_model_len,
            vocab_size=MODEL.vocab_size,
            hash_algorithm="sha256",
            none_hash=NONE_HASH.hex(),
            probe=probe.hex(),
        )
        facts = replace(facts, **self._facts)
        record = NodeRecord(
            self.node_id,
            time.time_ns(),
            self.role,
            stages=STAGES,
            model="m",
            layout=facts.fingerprint,
            rpc_address=f"127.0.0.1:{await self._serve_store()}",
            kv_address=node_pb2.KvAddress(node_id=self.node_id).SerializeToString(),
            extra=facts.add_to({}),
        )
        options = IndexOptions(lease_ttl_s=LEASE_TTL_S, publish_interval_s=0.001)
        self.publisher = IndexPublisher(
            cluster.index, lambda: record, options, lambda: list(self.held.items())
        )
        await self.publisher.start()
        return self

    async def _serve_store(self) -> int:
        add = node_pb2_grpc.add_NodeServicer_to_server
        self._store, port = await rpc.serve([(add, self)], "127.0.0.1", 0)
        return port

    async def Replicate(
        self, request: node_pb2.ReplicateRequest, context: ServicerContext[Any, Any]
    ) -> node_pb2.ReplicateReply:
        self.copied.append(request)
        return node_pb2.ReplicateReply()

    async def die(self) -> None:
        """Every connection breaks at once; its entry in Redis stays until its lease lapses."""
        site, self._site = self._site, None
        if site is not None:
            for connection in list(site.server.connections if site.server else ()):
                if connection.transport is not None:
                    connection.transport.abort()
            await site.cleanup()
        store, self._store = self._store, None
        if store is not None:
            await store.stop(None)

    async def hold(self, keys: list[BlockKey]) -> None:
        for key in keys:
            self.held[key] = Tier.HOST
            self.publisher.stored(key, Tier.HOST)
        await self.publisher.flush()

    async def _models(self, http: web.Request) -> web.Response:
        self._authenticate(http)
        return web.json_response({"data": [{"id": self.model}]})

    async def _metrics(self, http: web.Request) -> web.Response:
        labels = 'engine="0",model_name="served"'
        return web.Response(
            text=f'vllm:cache_config_info{{block_size="16",num_gpu_blocks="1000",engine="0"}} 1.0\n'
            f"vllm:num_requests_running{{{labels}}} {float(self.num_running)}\n"
            f"vllm:num_requests_waiting{{{labels}}} 0.0\n"
            f"vllm:kv_cache_usage_perc{{{labels}}} 0.25\n"
        )

    def _authenticate(self, http: web.Request) -> None:
        if http.headers.get("Authorization") != f"Bearer {KEY}":
            raise web.HTTPUnauthorized

    async def _complete(self, http: web.Request) -> web.StreamResponse:
        self._authenticate(http)
        body = await http.json()
        self.bodies.append(body)
        prompt: list[int] = list(body["prompt"])
        answer = web.StreamResponse()
        answer.content_type = "text/event-stream"
        self.num_running += 1
        try:
            if not body["stream"]:
                return await self._prefill(body)
            for index in range(body["max_tokens"]):
                await self.script(self, body, index)
                if not answer.prepared:
                    await answer.prepare(http)
                prompt.append(next_token(prompt))
                stops = index == self.stop_at
                last = "stop" if stops else "length" if index == body["max_tokens"] - 1 else None
                choice: dict[str, Any] = {"index": 0, "token_ids": prompt[-1:], "finish_reason": last}
                if index == 0:
                    choice["prompt_token_ids"] = body["prompt"]
                if "logprobs" in body:
                    name = f"token_id:{prompt[-1]}"
                    choice["logprobs"] = {"token_logprobs": [-0.5], "top_logprobs": [{name: -0.5}]}
                await self._say(answer, {"choices": [choice]})
                if last:
                    break
            held = keys_of(body["prompt"], body.get("cache_salt", ""))
            cached = MODEL.block_size * sum(key in self.held for key in held)
            self.num_cached_tokens += cached
            if self.keeps:
                await self.hold([key for key in keys_of(prompt[:-1]) if key not in self.held])
            usage: dict[str, Any] = {"prompt_tokens": len(body["prompt"])}
            if not self.is_silent:
                usage["prompt_tokens_details"] = {"cached_tokens": cached}
            await self._say(answer, {"choices": [], "usage": usage})
            await answer.write(b"data: [DONE]\n\n")
            return answer
        except asyncio.CancelledError:
            self.aborted.append(body["request_id"])
            raise
        finally:
            self.num_running -= 1

    async def _prefill(self, body: dict[str, Any]) -> web.Response:
        await self.script(self, body, 0)
        params = dict(body["kv_transfer_params"])
        params.pop("cache_hint", None)
        assert params == {"do_remote_decode": True} and body["max_tokens"] == 1
        choice = {"index": 0, "finish_reason": "length", "text": "x"}
        details = {"cached_tokens": 0}
        given = {"do_remote_prefill": True, "remote_engine_id": self.node_id}
        return web.json_response(
            {
                "choices": [choice],
                "usage": {"prompt_tokens_details": details},
                "kv_transfer_params": given if self.hands_over else None,
            }
        )

    async def _say(self, answer: web.StreamResponse, chunk: dict[str, Any]) -> None:
        await answer.write(b"data: " + orjson.dumps(chunk) + b"\n\n")


@asynccontextmanager
async def engines(cluster: Cluster, *servers: EngineServer) -> AsyncIterator[None]:
    """Start engines, which the conductor knows then."""
    for server in servers:
        await server.start(cluster)
    try:
        for server in servers:
            await cluster.until(lambda server=server: state_of(cluster, server.node_id))
        yield
    finally:
        for server in servers:
            await server.die()
            await server.publisher.close()


def state_of(cluster: Cluster, node_id: str) -> str:
    """As the conductor shows it; empty: it is not known, or not reachable yet."""
    nodes = cluster.conductor.cluster()["nodes"]
    state = next((node["state"] for node in nodes if node["node_id"] == node_id), "")
    return "" if state == "unreachable" else str(state)
