"""A stand-in for an OpenTelemetry collector, as a process of its own: takes spans, keeps only their bytes.

They are looked at when somebody asks (``STATS``), which is not while something is measured.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2

from moonpool.bench.serve.client.server import RequestFailed
from moonpool.runtime import rpc
from moonpool.runtime.service.tied_command import tied_command

_SERVICE = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"
_STATS = "/bench.Collector/Stats"


@dataclass(frozen=True, slots=True)
class Received:
    """Since the collector started."""

    exports: int
    spans: int
    nbytes: int

    def since(self, earlier: Received) -> Received:
        return Received(
            self.exports - earlier.exports, self.spans - earlier.spans, self.nbytes - earlier.nbytes
        )


class Collector:
    """One that runs; ``url`` is for ``tracing.otlp_endpoint``."""

    def __init__(self, address: str) -> None:
        self.url = f"http://{address}"
        self._channel = rpc.channel(address)

    async def stats(self) -> Received:
        ask = self._channel.unary_unary(_STATS, request_serializer=bytes, response_deserializer=bytes)
        return Received(**json.loads(await ask(b"")))

    async def settled(self, quiet_s: float) -> Received:
        """When nothing has come for ``quiet_s``."""
        now = await self.stats()
        while True:
            before = now
            await asyncio.sleep(quiet_s)
            if (now := await self.stats()) == before:
                return now

    async def close(self) -> None:
        await self._channel.close(None)


@asynccontextmanager
async def collector() -> AsyncIterator[Collector]:
    """Start one.

    Raises:
        RequestFailed: it did not start.
    """
    process = await asyncio.create_subprocess_exec(
        *tied_command([sys.executable, "-m", "moonpool.bench.serve.span_collector"]),
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    try:
        line = await process.stdout.readline()
        if not line:
            raise RequestFailed(f"the collector ended with code {await process.wait()}")
        running = Collector(f"127.0.0.1:{int(line)}")
        try:
            yield running
        finally:
            await running.close()
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


class _Handler(grpc.GenericRpcHandler):  # type: ignore[type-arg]
    """Both calls as bytes: a message that nobody reads need not be parsed."""

    def __init__(self) -> None:
        self._waiting: list[bytes] = []
        self._exports = self._spans = self._nbytes = 0

    def service(self, call: Any) -> Any:
        methods = {_SERVICE: self._export, _STATS: self._stats}
        method = methods.get(call.method)
        return None if method is None else grpc.unary_unary_rpc_method_handler(method)

    async def _export(self, message: bytes, context: Any) -> bytes:
        self._waiting.append(message)
        return b""  # an empty answer: all was taken

    async def _stats(self, message: bytes, context: Any) -> bytes:
        for given in self._waiting:
            request = trace_service_pb2.ExportTraceServiceRequest.FromString(given)
            self._exports += 1
            self._nbytes += len(given)
            self._spans += sum(
                len(scope.spans) for resource in request.resource_spans for scope in resource.scope_spans
            )
        self._waiting.clear()
        return json.dumps({"exports": self._exports, "spans": self._spans, "nbytes": self._nbytes}).encode()


async def _serve() -> None:
    server = grpc.aio.server(handlers=[_Handler()], options=[("grpc.max_receive_message_length", 64 << 20)])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(port, flush=True)
    await server.wait_for_termination()


if __name__ == "__main__":
    asyncio.run(_serve())
