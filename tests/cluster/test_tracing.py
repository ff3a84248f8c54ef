"""A request's spans: from the client through conductor and nodes to a collector, or into a file."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import aiohttp
import grpc.aio
import jsonschema
import pytest
import pytest_asyncio
from click.testing import CliRunner
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from moonpool.cli import cli
from moonpool.client import Client
from moonpool.local.cluster import LocalCluster
from tests.cluster.conftest import eventually, small_config

pytestmark = pytest.mark.asyncio(loop_scope="module")

TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT_ID = "00f067aa0ba902b7"
NUM_CHUNKS = 4  # of 200 tokens, 64 a step

# The JSON object form of the Trace Event Format, for the phases we write: metadata, complete, instant.
_PLACE = {"pid": {"type": "integer"}, "tid": {"type": "integer"}, "name": {"type": "string", "minLength": 1}}
_WHEN = _PLACE | {
    "ts": {"type": "number", "minimum": 0},
    "cat": {"type": "string"},
    "args": {"type": "object"},
}


def _phase(phase: str, facts: dict[str, object]) -> dict[str, object]:
    properties = {"ph": {"const": phase}, **facts}
    return {"properties": properties, "required": list(properties), "additionalProperties": False}


TRACE_EVENTS = {
    "type": "object",
    "required": ["traceEvents"],
    "properties": {
        "displayTimeUnit": {"enum": ["ms", "ns"]},
        "traceEvents": {
            "type": "array",
            "minItems": 1,
            "items": {
                "oneOf": [
                    _phase("M", _PLACE | {"args": {"required": ["name"]}}),
                    _phase("X", _WHEN | {"dur": {"type": "number", "minimum": 0}}),
                    _phase("i", _WHEN | {"s": {"enum": ["g", "p", "t"]}}),
                ]
            },
        },
    },
    "additionalProperties": False,
}


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """What an OpenTelemetry collector is to us: one call over gRPC."""

    def __init__(self) -> None:
        self.spans: dict[str, list[tuple[str, Span]]] = {}  # by trace: (process, span)

    async def Export(
        self, request: trace_service_pb2.ExportTraceServiceRequest, context: object
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        for resource in request.resource_spans:
            facts = {pair.key: pair.value.string_value for pair in resource.resource.attributes}
            for scope in resource.scope_spans:
                for span in scope.spans:
                    self.spans.setdefault(span.trace_id.hex(), []).append(
                        (facts["service.instance.id"], span)
                    )
        return trace_service_pb2.ExportTraceServiceResponse()


@asynccontextmanager
async def collecting() -> AsyncIterator[tuple[Collector, str]]:
    """A collector, and its address."""
    servicer, server = Collector(), grpc.aio.server()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield servicer, f"http://127.0.0.1:{port}"
    await server.stop(0)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def collector() -> AsyncIterator[tuple[Collector, str]]:
    async with collecting() as found:
        yield found


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def traced(
    collector: tuple[Collector, str], tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[LocalCluster]:
    config = small_config()
    config = replace(
        config,
        tracing=replace(config.tracing, otlp_endpoint=collector[1]),
        cluster=replace(config.cluster, prefill=1, decode=1),
        # It always fetches a longer prefix, whatever that costs.
        conductor=replace(config.conductor, policy="kv-aware"),
        engine=replace(config.engine, max_batch_tokens=64),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "200")  # ms; the default are five seconds
        async with LocalCluster(config, directory=tmp_path_factory.mktemp("traced")) as running:
            yield running


async def _complete(
    url: str,
    request_id: str,
    *,
    trace_id: str = TRACE_ID,
    sampled: bool = True,
    prompt: Sequence[int] = range(100, 300),
    max_tokens: int = 8,
) -> list[int]:
    """The tokens that were generated."""
    headers = {"x-request-id": request_id, "traceparent": f"00-{trace_id}-{PARENT_ID}-0{sampled:d}"}
    body = {
        "prompt": list(prompt),
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{url}/v1/completions", json=body, headers=headers) as answer,
    ):
        assert answer.status == 200
        return list((await answer.json())["choices"][0]["token_ids"])


async def test_spans_of_every_process_hang_together(
    traced: LocalCluster, collector: tuple[Collector, str]
) -> None:
    await _complete(traced.url, "traced-1")
    wanted = {
        "conductor": {"/v1/completions", "request", "place", "first token", "done"},
        "prefill-0": {"PrefillNode/Prefill", "compute chunk", "PrefillNode/Follow"},
        "decode-0": {"DecodeNode/Decode", "read blocks", "decode"},
    }

    async def all_there() -> bool:
        seen = Counter((process, span.name) for process, span in collector[0].spans.get(TRACE_ID, []))
        # Spans are sent as they are recorded, those of one call in one batch or in two.
        return seen["prefill-0", "compute chunk"] >= NUM_CHUNKS and all(
            (process, name) in seen for process in wanted for name in wanted[process]
        )

    await eventually(all_there)
    # A latency leads to its trace.
    accept = {"Accept": "application/openmetrics-text;version=1.0.0"}
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"{traced.url}/metrics", headers=accept) as page,
    ):
        assert re.search(rf'# {{request_id="cmpl-traced-1-\w+",trace_id="{TRACE_ID}"}}', await page.text())
    spans = collector[0].spans[TRACE_ID]
    ids = {span.span_id for _, span in spans}
    outside = [span for _, span in spans if span.parent_span_id not in ids]
    assert [span.name for span in outside] == ["/v1/completions"]
    assert outside[0].parent_span_id.hex() == PARENT_ID
    assert sum(span.name == "compute chunk" for _, span in spans) == NUM_CHUNKS
    for _, span in spans:
        assert span.end_time_unix_nano >= span.start_time_unix_nano > 0
    request = next(span for _, span in spans if span.name == "request")
    parts = {pair.key: pair.value.double_value for pair in request.attributes if "part." in pair.key}
    whole_s = 1e-9 * (request.end_time_unix_nano - request.start_time_unix_nano)
    assert sum(parts.values()) == pytest.approx(whole_s, rel=0.02)


async def test_a_prefix_from_a_peer_is_a_child_of_who_fetched_it(
    traced: LocalCluster, collector: tuple[Collector, str]
) -> None:
    tries = itertools.count(1)

    async def fetched() -> list[tuple[str, Span]]:
        """The spans of a second turn whose prefix was read from the node that had generated it."""
        number = next(tries)
        trace_id = f"{number:032x}"
        prompt = list(range(300 + number, 332 + number))
        prompt += await _complete(
            traced.url, f"first-{number}", trace_id="3" * 32, prompt=prompt, max_tokens=240
        )
        await _complete(traced.url, f"second-{number}", trace_id=trace_id, prompt=[*prompt, 7])

        async def exported() -> bool:
            names = {span.name for _, span in collector[0].spans.get(trace_id, [])}
            return names >= {"/v1/completions", "PrefillNode/Prefill", "decode"}

        await eventually(exported)
        seen = collector[0].spans[trace_id]
        return seen if any(span.name == "Node/Lease" for _, span in seen) else []

    await eventually(fetched)
    number = next(tries) - 1
    spans = collector[0].spans[f"{number:032x}"]
    named = {(process, span.name): span for process, span in spans}
    prefill = named["prefill-0", "PrefillNode/Prefill"]
    assert named["decode-0", "Node/Lease"].parent_span_id == prefill.span_id
    assert named["prefill-0", "load blocks"].parent_span_id == prefill.span_id
    assert named["prefill-0", "read blocks"].parent_span_id == prefill.span_id


async def test_what_the_client_does_not_sample_is_not_sent(
    traced: LocalCluster, collector: tuple[Collector, str]
) -> None:
    await _complete(traced.url, "unsampled", trace_id="5" * 32, sampled=False)
    await _complete(traced.url, "sampled", trace_id="6" * 32)

    async def later_one_sent() -> bool:
        return len(collector[0].spans.get("6" * 32, [])) > 10

    await eventually(later_one_sent)
    assert "5" * 32 not in collector[0].spans


async def test_a_trace_needs_no_collector(traced: LocalCluster, client_of: Client, tmp_path: Path) -> None:
    await _complete(traced.url, "traced-2")
    file = tmp_path / "trace.json"
    arguments = ["trace", "traced-2", "--url", traced.url, "-o", str(file)]
    result = await asyncio.to_thread(CliRunner().invoke, cli, arguments)
    assert result.exit_code == 0, result.output
    trace = json.loads(file.read_text())
    jsonschema.validate(trace, TRACE_EVENTS)
    events = trace["traceEvents"]
    processes = {event["pid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    assert set(processes.values()) == {"api", "conductor", "prefill-0", "decode-0"}
    by_process: dict[str, list[dict]] = {name: [] for name in processes.values()}
    for event in events:
        if event["ph"] != "M":
            by_process[processes[event["pid"]]].append(event)
    request = next(event for event in by_process["conductor"] if event["name"] == "request")
    for event in (
        event for rows in by_process.values() for event in rows if event["name"] != "/v1/completions"
    ):
        assert event["ts"] >= request["ts"] - 1e5
        assert event["ts"] + event.get("dur", 0) <= request["ts"] + request["dur"] + 1e3
    assert {event["name"] for event in by_process["decode-0"]} >= {"read blocks", "decode"}
    divided = {name: value for name, value in request["args"].items() if name.startswith("part.")}
    assert {"part.prefill_s", "part.transfer_s", "part.decode_s"} <= divided.keys()
    assert 1e6 * sum(divided.values()) == pytest.approx(request["dur"], rel=0.01)
    timeline = await client_of.timeline("traced-2")
    parts = {part["name"]: part["seconds"] for part in timeline["parts"]}
    assert sum(parts.values()) == pytest.approx(timeline["api"]["e2e_s"], rel=0.02)
    assert sum(parts.values()) - parts["api"] == pytest.approx(timeline["summary"]["e2e_s"], rel=0.02)
    assert {"conductor", "prefill", "transfer", "decode"} <= parts.keys()
    assert timeline["explanation"] in " ".join(result.output.split())
    computed = next(event for event in timeline["events"] if event["event"] == "prefilled")
    chunks = [event for event in by_process["prefill-0"] if event["name"] == "compute chunk"]
    assert sum(chunk["args"]["tokens"] for chunk in chunks) == computed["computed_tokens"]


async def test_an_unknown_request_has_no_trace(traced: LocalCluster, tmp_path: Path) -> None:
    arguments = ["trace", "nobody", "--url", traced.url, "-o", str(tmp_path / "x.json")]
    result = await asyncio.to_thread(CliRunner().invoke, cli, arguments)
    assert result.exit_code != 0
    assert "nobody" in str(result.exception)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client_of(traced: LocalCluster) -> AsyncIterator[Client]:
    async with Client(traced.url) as connected:
        yield connected
