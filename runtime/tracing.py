"""Spans of OpenTelemetry, sent by OTLP where ``tracing.otlp_endpoint`` is set; where it is not, next to
nothing.

A request's spans hang together by the W3C header ``traceparent``, which comes with HTTP and goes with gRPC.
How many requests are sampled, and what else SDKs have in common, is said by OpenTelemetry's own ``OTEL_*``
variables.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from opentelemetry import trace
from opentelemetry.context import Context, get_current
from opentelemetry.trace import INVALID_SPAN, Span, SpanKind, Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from runtime.options import TracingOptions

TRACEPARENT = "traceparent"

Attribute = str | int | float | bool

_propagator = TraceContextTextMapPropagator()
_nothing = nullcontext(INVALID_SPAN)
_tracer: Tracer | None = None


def setup_tracing(options: TracingOptions, process: str) -> Callable[[], None]:
    """Begin to send this process's spans, if it is asked for; returns what sends the last ones and ends it.

    A collector that does not answer costs spans, never a request: they wait in a queue of bounded length, and
    are sent by a thread.
    """
    global _tracer
    if not options.otlp_endpoint:
        return lambda: None
    # The SDK takes 0.2 s to import: only who exports pays for it.
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    resource = Resource.create({"service.name": "moonpool", "service.instance.id": process})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(options.otlp_endpoint)))
    _tracer = provider.get_tracer("moonpool")

    def end() -> None:
        global _tracer
        _tracer = None
        provider.shutdown()

    return end


def enabled() -> bool:
    return _tracer is not None


def span(name: str, **attributes: Attribute) -> AbstractContextManager[Span]:
    """Around some work for the request at hand; whatever is called meanwhile becomes a child."""
    if _tracer is None or not trace.get_current_span().get_span_context().is_valid:
        return _nothing
    return _tracer.start_as_current_span(name, attributes=attributes)


def serving(name: str, traceparent: str, *, root: bool = False) -> AbstractContextManager[Span]:
    """Around the answer to a call that came with ``traceparent``; without one only if it may be a
    ``root``."""
    if _tracer is None or not (traceparent or root):
        return _nothing
    context = _propagator.extract({TRACEPARENT: traceparent}, Context())
    return _tracer.start_as_current_span(name, context, SpanKind.SERVER)


def outgoing() -> tuple[tuple[str, str], ...]:
    """The header that makes what a peer does for us a child of what we are doing."""
    if _tracer is None:
        return ()
    carrier: dict[str, str] = {}
    _propagator.inject(carrier)
    return tuple((name, value) for name, value in carrier.items() if name == TRACEPARENT)


def here() -> Context:
    """The span we are in, for a ``past`` from elsewhere."""
    return get_current()


def past(
    name: str, *, ago_s: float, seconds: float, within: Context | None = None, **attributes: Attribute
) -> None:
    """A span of something that began ``ago_s`` ago and took ``seconds``, a child of the span we are in, or
    were in when ``here`` was asked."""
    if _tracer is None or not trace.get_current_span(within).get_span_context().is_valid:
        return
    began_ns = time.time_ns() - int(1e9 * ago_s)
    done = _tracer.start_span(name, within, attributes=attributes, start_time=began_ns)
    done.end(began_ns + int(1e9 * seconds))
