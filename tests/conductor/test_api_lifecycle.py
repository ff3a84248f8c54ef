"""Connections that close, a server that drains, and the pages for probes and people."""

from __future__ import annotations

import asyncio
import json
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import aiohttp
import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from moonpool.conductor import server
from moonpool.conductor.api.streams.stream_writer import StreamWriter
from moonpool.conductor.dashboard import routes
from moonpool.conductor.observing.request_metrics import RequestMetrics, SequenceClock
from moonpool.conductor.observing.slo import Slo
from moonpool.conductor.server import ApiServer
from moonpool.runtime.config.options import ConductorOptions
from moonpool.runtime.errors import PortInUse
from tests.conductor.conftest import serving


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 3])
async def test_closing_the_connection_cancels_everywhere(api: Any, stream: bool, n: int) -> None:
    never = asyncio.Event()
    api.core.script = lambda request: api.core.says("abc", never)
    body = {"prompt": "In", "stream": stream, "n": n}
    async with aiohttp.ClientSession() as client:
        request = asyncio.ensure_future(client.post(f"{api.url}/v1/completions", json=body))
        await api.core.until(lambda: len(api.core.running) == n)
        if stream:
            response = await request
            await response.content.readline()
            response.close()
        else:
            request.cancel()
    await api.core.until(lambda: not api.core.running)
    assert len(api.core.cancelled) == n
    await api.context.idle.wait()
    assert api.context.recent.latest(1)[0].status == "cancelled"


async def test_draining_ends_streams_and_takes_no_more(api: Any) -> None:
    gate = asyncio.Event()
    api.core.script = lambda request: api.core.says("abc", gate, *api.core.says("def"))
    url = f"{api.url}/v1/completions"
    async with api.client.post(url, json={"prompt": "In", "stream": True}) as response:
        await response.content.readline()
        # A connection that is open already, and idle.
        async with api.client.get(f"{api.url}/readyz") as probe:
            assert probe.status == 200
        draining = asyncio.create_task(api.server.drain(10))
        await asyncio.sleep(0)
        status, answer = await api.post("/v1/completions", {"prompt": "In"})
        assert (status, answer["error"]["code"]) == (503, "draining")
        assert not draining.done()
        gate.set()
        rest = await response.text()
    assert rest.endswith("data: [DONE]\n\n")
    assert await draining
    with pytest.raises(aiohttp.ClientConnectorError):
        async with aiohttp.ClientSession() as fresh:
            await fresh.get(api.url)


class Pausing:
    """asyncio, whose pauses last until ``goes_on``."""

    def __init__(self) -> None:
        self.pauses_s: list[float] = []
        self.goes_on = asyncio.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)

    async def sleep(self, seconds: float) -> None:
        self.pauses_s.append(seconds)
        await self.goes_on.wait()


async def test_a_server_that_leaves_is_not_ready_first_and_serves_on(
    api: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A load balancer sends requests until it has noticed."""
    monkeypatch.setattr(server, "asyncio", pausing := Pausing())
    gate = asyncio.Event()
    api.core.script = lambda request: api.core.says("abc", gate)
    running = asyncio.create_task(api.complete())
    await api.core.until(lambda: len(api.core.running) == 1)
    leaving = asyncio.create_task(api.server.drain(10, leave_s=0.5))
    await asyncio.sleep(0)
    async with aiohttp.ClientSession() as fresh:  # a new connection
        async with fresh.get(f"{api.url}/readyz") as probe:
            assert (probe.status, (await probe.json())["degraded"]) == (503, ["draining"])
        async with fresh.get(f"{api.url}/healthz") as probe:
            assert probe.status == 200
        served = asyncio.create_task(fresh.post(f"{api.url}/v1/completions", json={"prompt": "In"}))
        await api.core.until(lambda: len(api.core.running) == 2)
        gate.set()
        response = await served
        assert response.status == 200
        assert response.headers["Connection"] == "close", "its next request goes elsewhere"
    assert pausing.pauses_s == [0.5]
    pausing.goes_on.set()
    assert (await running)["choices"][0]["text"] == "abc"
    assert await leaving
    with pytest.raises(aiohttp.ClientConnectorError):
        async with aiohttp.ClientSession() as fresh:
            await fresh.get(api.url)


@pytest.mark.parametrize("n", [1, 3])
async def test_a_client_that_stops_reading_loses_its_place(
    checkpoint: Path, n: int, caplog: pytest.LogCaptureFixture
) -> None:
    options = ConductorOptions(port=0, write_timeout_s=0.3)
    async with serving(checkpoint, options) as api:
        text = api.core.says("the heaven and the earth ")

        def endless(request: Any) -> Any:
            """Far more than all buffers between the two take."""
            return (token for _ in range(10**7) for token in text)

        api.core.script = endless
        api.core.model = replace(api.core.model, max_model_len=10**9)
        body = json.dumps({"prompt": "In", "stream": True, "n": n, "max_tokens": 10**8}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: {len(body)}\r\n\r\n"
        client = socket.create_connection(("127.0.0.1", api.server.port))
        with client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.sendall(head.encode() + body)
            await asyncio.to_thread(client.recv, 64)  # it reads, and then no more
            await api.core.until(lambda: len(api.core.cancelled) == n)
        await api.context.idle.wait()
        (stalled,) = api.context.recent.latest(1)
        assert stalled.status == "client_stalled"
        assert 0.3 <= stalled.delivered_s["stream"] <= n * stalled.e2e_s
        assert "has not read its stream" in caplog.text
        # Who reads, however long it takes in all, is served to the end.
        api.core.script = lambda request: [*text[:5], asyncio.Event()]
        async with api.client.post(
            f"{api.url}/v1/completions", json={"prompt": "In", "stream": True}
        ) as response:
            await response.content.readline()
            await asyncio.sleep(0.5)
            assert len(api.core.running) == 1, "it waits for tokens, and not for its client"


async def test_a_client_that_reads_slowly_keeps_a_stream_of_several_sequences() -> None:
    """Writes overlap, and each returns within the limit."""
    loop, writes = asyncio.get_running_loop(), list[asyncio.Future[None]]()
    now_s = 0.0

    class Response:
        async def write(self, event: bytes) -> None:
            writes.append(loop.create_future())
            await writes[-1]

    class Http:
        transport = None

    http, response = cast(Any, Http()), cast(Any, Response())
    with StreamWriter(http, response, 10.0, lambda: now_s) as writer:

        async def begin() -> asyncio.Task[None]:
            begun, task = len(writes), asyncio.create_task(writer.write(b"token"))
            while len(writes) == begun:  # noqa: ASYNC110
                await asyncio.sleep(0)
            return task

        running = [await begin(), await begin()]
        for _ in range(5):
            now_s += 4.0
            writer._look()
            assert not writer.stalled
            writes.pop(0).set_result(None)
            await running.pop(0)
            running.append(await begin())
        now_s += 10.0
        writer._look()
        assert writer.stalled
        for write in writes:
            write.set_result(None)
        await asyncio.gather(*running)


async def test_draining_does_not_wait_for_ever(api: Any) -> None:
    api.core.script = lambda request: [5, asyncio.Event()]
    request = asyncio.create_task(api.post("/v1/completions", {"prompt": "In"}))
    await api.core.until(lambda: bool(api.core.running))
    assert not await api.server.drain(0.01)
    await api.server.close()
    await api.core.until(lambda: not api.core.running)
    with pytest.raises(aiohttp.ClientError):
        await request


@pytest.mark.parametrize("drains", [True, False])
async def test_live_streams_end_with_the_conductor_and_do_not_break(
    api: Any, drains: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routes, "EVERY_S", 600.0)
    monkeypatch.setattr(routes, "_SLOWEST_S", 600.0)
    monkeypatch.setattr(routes.LiveFeed, "event", lambda feed, scope: b"data: {}\n\n")
    async with api.client.get(f"{api.url}/v1/live") as live:
        await live.content.readuntil(b"\n\n")
        assert not drains or await api.server.drain(10)
        closing = None if drains else asyncio.create_task(api.server.close())
        assert await asyncio.wait_for(live.read(), 20) == b""
        assert closing is None or await closing is None


async def test_a_port_in_use_is_said_so(api: Any) -> None:
    options = type(api.context.options)(port=api.server.port)
    context = api.context
    context.options = options
    with pytest.raises(PortInUse, match=r"set another conductor\.port"):
        await ApiServer(context).start()


async def test_probes(api: Any) -> None:
    async def probe(path: str) -> tuple[int, Any]:
        async with api.client.get(api.url + path) as response:
            return response.status, await response.json()

    assert await probe("/healthz") == (200, {"status": "ok"})
    assert await probe("/readyz") == (200, {"ready": True, "status": "ready", "degraded": []})
    api.core.degraded = ["the index is lost"]
    assert await probe("/readyz") == (
        200,
        {"ready": True, "status": "degraded", "degraded": ["the index is lost"]},
    )
    api.core.is_ready = False
    assert (await probe("/readyz"))[0] == 503
    assert (await probe("/v1/cluster"))[1]["nodes"][0]["id"] == "decode-0"
    status, models = await probe("/v1/models")
    assert (status, models["data"][0]["id"], models["data"][0]["max_model_len"]) == (200, "tiny", 256)
    assert (await probe("/v1/models/tiny"))[1] == models["data"][0]


async def test_the_dashboard_needs_nothing_from_elsewhere(api: Any) -> None:
    async with api.client.get(api.url) as response:
        assert response.content_type == "text/html"
        page = await response.text()
    for name in ("dashboard.js", "dashboard.css"):
        assert f"/static/{name}" in page
        async with api.client.get(f"{api.url}/static/{name}") as response:
            assert response.status == 200
            page += await response.text()
    assert "http://" not in page.replace("http://www.w3.org", "")
    assert "https://" not in page


async def test_a_scrape_as_openmetrics_names_a_request_for_each_latency(api: Any) -> None:
    answer = await api.complete(prompt=[5, 6, 7], max_tokens=4)
    accept = {"Accept": "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"}
    async with api.client.get(f"{api.url}/metrics", headers=accept) as response:
        assert response.content_type == "application/openmetrics-text"
        families = {family.name: family for family in text_string_to_metric_families(await response.text())}
    for name in ("time_to_first_token", "time_per_output_token", "request"):
        samples = families[f"moonpool_{name}_seconds"].samples
        (found,) = (sample.exemplar for sample in samples if sample.exemplar is not None)
        assert found.labels == {"request_id": answer["id"]}
        assert found.value > 0


async def test_metrics_under_both_names(api: Any) -> None:
    api.core.cached = 2
    await api.complete(prompt=[5, 6, 7], max_tokens=4)
    await api.post("/v1/completions", {"prompt": ""})
    async with api.client.get(f"{api.url}/metrics") as response:
        page = await response.text()
    for line in (
        'vllm:time_to_first_token_seconds_count{model_name="tiny"} 1.0',
        'moonpool_time_to_first_token_seconds_count{model_name="tiny"} 1.0',
        'vllm:inter_token_latency_seconds_count{model_name="tiny"} 3.0',
        'vllm:e2e_request_latency_seconds_count{model_name="tiny"} 1.0',
        'vllm:num_requests_running{model_name="tiny"} 0.0',
        'vllm:num_requests_waiting{model_name="tiny"} 0.0',
        'vllm:kv_cache_usage_perc{model_name="tiny"} 0.25',
        'vllm:prefix_cache_queries_total{model_name="tiny"} 3.0',
        'vllm:prefix_cache_hits_total{model_name="tiny"} 2.0',
        'vllm:generation_tokens_total{model_name="tiny"} 4.0',
        'vllm:request_success_total{finished_reason="length",model_name="tiny"} 1.0',
        'moonpool_http_requests_total{method="POST",route="/v1/completions",status="400"} 1.0',
        'moonpool_api_stage_seconds_count{stage="tokenize"} 1.0',
    ):
        assert line in page.splitlines(), page
    assert "# TYPE vllm:time_to_first_token_seconds histogram" in page


async def test_recent_requests_are_listed_with_what_the_api_spent(api: Any) -> None:
    await api.complete(max_tokens=3)
    await api.events("/v1/chat/completions", messages=[{"role": "user", "content": "Hi"}])
    await api.post("/v1/completions", {"prompt": ""})
    async with api.client.get(f"{api.url}/v1/requests?limit=10") as response:
        listed = (await response.json())["data"]
    assert [one["status"] for one in listed] == ["empty_prompt", "done", "done"]
    chat, completion = listed[1:]
    assert (chat["endpoint"], chat["stream"]) == ("/v1/chat/completions", True)
    assert chat["e2e_s"] >= chat["ttft_s"] > 0
    assert chat["write_s"] > 0
    assert chat["delivered_s"]["stream"] >= chat["write_s"] and chat["delivered_s"]["detokenize"] > 0
    assert 0 < sum(completion["delivered_s"].values()) < completion["e2e_s"]
    for part in ("detokenize", "stream"):
        count = api.registry.get_sample_value("moonpool_api_stage_seconds_count", {"stage": part})
        assert count == 2, "one for each answer"
    assert completion["output_tokens"] == 3
    async with api.client.get(f"{api.url}/v1/requests/{completion['id']}/timeline") as response:
        timeline = await response.json()
    assert timeline["api"] == completion
    assert timeline["events"] == []


def test_each_registry_has_the_metrics_of_its_own_model() -> None:
    registries = {name: CollectorRegistry() for name in ("a", "b")}
    for name, registry in registries.items():
        RequestMetrics(name, registry).ttft.observe(1.0)
    for name, registry in registries.items():
        for prefix in ("moonpool_", "vllm:"):
            counts = {
                other: registry.get_sample_value(
                    f"{prefix}time_to_first_token_seconds_count", {"model_name": other}
                )
                for other in registries
            }
            assert counts == {other: 1.0 if other == name else None for other in registries}


@pytest.mark.parametrize(
    ("first_s", "last_s", "reason", "good"),
    [
        (0.5, 0.7, "stop", 1),
        (0.5, 0.7, "tool_calls", 1),
        (0.6, 0.7, "stop", 0),
        (0.5, 0.8, "stop", 0),
        (0.5, 0.7, "cancelled", 0),
    ],
)
def test_a_request_is_good_when_it_kept_both_slos(
    first_s: float, last_s: float, reason: str, good: int
) -> None:
    metrics = RequestMetrics("tiny", CollectorRegistry(), slo=Slo(ttft_s=0.5, tbt_s=0.1))
    sequence = SequenceClock(metrics, arrived_s=0.0, num_prompt_tokens=3, request_id="a")
    sequence.begin()
    for now_s in (first_s, (first_s + last_s) / 2, last_s):
        sequence.token(now_s, 0)
    sequence.end(last_s, reason)
    snapshot = metrics.snapshot()
    assert snapshot["requests_within_slo"] == good
    assert snapshot["requests"] == {reason: 1}


def test_a_request_with_an_slo_of_its_own_is_good_by_that() -> None:
    metrics = RequestMetrics("tiny", CollectorRegistry(), slo=Slo(ttft_s=0.5))
    for slo in (Slo(ttft_s=5.0), Slo(ttft_s=0.1), None):
        sequence = SequenceClock(metrics, 0.0, num_prompt_tokens=3, request_id="a", slo=slo)
        sequence.begin()
        sequence.token(1.0, 0)
        sequence.end(1.0, "stop")
    assert metrics.snapshot()["requests_within_slo"] == 1
