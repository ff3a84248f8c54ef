"""A server of the OpenAI completions API that answers at once: enough to test a client against."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

MODEL = "fake"


class FakeServer:
    """Streams ``max_tokens`` tokens with ids 7, 8, …; keeps what it was asked. ``failing`` answers 429.

    Answers nobody until ``party`` requests are there together. ``first_id``: the id of the first token; each
    answer adds ``step`` to it. ``hanging`` answers when it closes. ``lost_scrapes``: the numbers, from 1 on,
    of those that get no metrics. Answers nobody before so many were asked for: ``scrapes_before``.
    """

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.failing = False
        self.party = 1
        self.first_id = 7
        self.step = 0
        self.hanging = False
        self.num_scrapes = 0
        self.lost_scrapes: Collection[int] = ()
        self.scrapes_before = 0
        self._closing = asyncio.Event()
        self._arrived = 0
        self._complete = asyncio.Event()
        self.url = ""

    @asynccontextmanager
    async def running(self) -> AsyncIterator[FakeServer]:
        app = web.Application()
        app.add_routes(
            [
                web.get("/v1/models", self._models),
                web.post("/v1/completions", self._completions),
                web.post("/v1/chat/completions", self._completions),
                web.post("/v1/prefetch", self._prefetch),
                web.get("/v1/cluster", self._cluster),
                web.get("/metrics", self._metrics),
                web.get("/v1/requests/{id}/timeline", self._timeline),
            ]
        )
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        self.url = f"http://{host}:{port}"
        try:
            yield self
        finally:
            self._closing.set()
            await runner.cleanup()

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": MODEL}]})

    async def _cluster(self, request: web.Request) -> web.Response:
        return web.json_response(
            {
                "block_size": 16,
                "nodes": [
                    {
                        "metrics_url": f"{self.url}/metrics",
                        "state": "ready",
                        "tiers": [{"name": "pool", "num_used_blocks": 0, "num_cached_blocks": 2}],
                    }
                ],
            }
        )

    async def _metrics(self, request: web.Request) -> web.Response:
        self.num_scrapes += 1
        if self.num_scrapes in self.lost_scrapes:
            return web.Response(status=503)
        lines = (
            'moonpool_model_seconds_sum{kind="decode"} 0.5',
            f'moonpool_step_tokens_sum{{kind="prompt"}} {30 * self.num_scrapes}.0',
            f'moonpool_step_tokens_sum{{kind="decoded"}} {10 * self.num_scrapes}.0',
            'moonpool_gpu_utilization_ratio{gpu="0"} 0.5',
            'moonpool_engine_requests{state="running"} 3.0',
            'moonpool_engine_requests{state="waiting"} 2.0',
            "process_cpu_seconds_total 1.5",
        )
        return web.Response(text="\n".join(lines) + "\n")

    async def _timeline(self, request: web.Request) -> web.Response:
        events: list[dict[str, Any]] = [
            {"event": "queued", "at_s": 0.0},
            {"event": "placed", "at_s": 0.0},
            {
                "event": "prefilled",
                "at_s": 0.0,
                "queued_s": 0.0,
                "compute_s": 0.0,
                "chunks": [{"at_s": 0.0}],
            },
            {"event": "first_token", "at_s": 0.0},
        ]
        timeline = {"request_id": request.match_info["id"], "events": events, "api": {"ttft_s": 0.0}}
        return web.json_response(timeline)

    async def _prefetch(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.asked.append(body)
        if self.failing:
            return web.json_response({"error": {"message": "too many"}}, status=429)
        return web.json_response({"prompt_tokens": 1, "cached_tokens": 0})

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.asked.append(body | {"request_id": request.headers.get("x-request-id")})
        if self.failing:
            return web.json_response({"error": {"message": "too many"}}, status=429)
        if self.hanging:
            await self._closing.wait()
        self.first_id += self.step
        self._arrived += 1
        if self._arrived >= self.party:
            self._complete.set()
        await self._complete.wait()
        while self.num_scrapes < self.scrapes_before:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "X-Last": "0"})
        response.enable_chunked_encoding()
        await response.prepare(request)
        for index in range(body["max_tokens"]):
            last = index == body["max_tokens"] - 1
            choice: dict[str, Any] = {
                "text": f" t{index}",
                "token_ids": [self.first_id + index],
                "finish_reason": "length" if last else None,
            }
            if "messages" in body:
                choice["delta"] = {"content": choice.pop("text")}
            await _send(response, {"id": "cmpl-1", "choices": [choice]})
        usage = {
            "prompt_tokens": len(body.get("prompt") or body["messages"]),
            "completion_tokens": body["max_tokens"],
            "prompt_tokens_details": {"cached_tokens": 3},
        }
        await _send(response, {"id": "cmpl-1", "choices": [], "usage": usage})
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response


async def _send(response: web.StreamResponse, event: dict[str, Any]) -> None:
    await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
