"""Export of spans with OpenTelemetry's SDK, which takes 0.2 s to import and is imported only if needed."""

from __future__ import annotations

import random
import threading
from collections.abc import Mapping

from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, Tracer

_SCOPE = InstrumentationScope("moonpool")
_LAST_S = 2.0


class SpanExport:
    """Sends the spans of this process to ``endpoint`` from a thread, with a queue of bounded length."""

    def __init__(self, endpoint: str, process: str) -> None:
        self._resource = Resource.create({"service.name": "moonpool", "service.instance.id": process})
        self._provider = TracerProvider(resource=self._resource, shutdown_on_exit=False)
        self._queue = BatchSpanProcessor(OTLPSpanExporter(endpoint))
        self._provider.add_span_processor(self._queue)
        self.tracer: Tracer = self._provider.get_tracer(_SCOPE.name)

    def ended(
        self,
        name: str,
        parent: SpanContext,
        attributes: Mapping[str, str | int | float | bool],
        began_ns: int,
        ended_ns: int,
    ) -> None:
        """Send a span that has ended, as a child of the sampled ``parent``.

        Created directly as an ended span of the SDK: 3 µs instead of 17 (docs/decisions/bench.md).
        """
        context = SpanContext(
            parent.trace_id, random.getrandbits(64), False, parent.trace_flags, parent.trace_state
        )
        self._queue.on_end(
            ReadableSpan(
                name,
                context,
                parent,
                self._resource,
                attributes,
                start_time=began_ns,
                end_time=ended_ns,
                instrumentation_scope=_SCOPE,
            )
        )

    def shutdown(self) -> None:
        """Send the spans that are still queued. Those that a collector does not take within ``_LAST_S`` are
        lost: its silence must not keep the process from ending, by default for half a minute."""
        thread = threading.Thread(target=self._provider.shutdown, name="last spans", daemon=True)
        thread.start()
        thread.join(_LAST_S)
