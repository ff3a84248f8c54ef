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
from typing import TYPE_CHECKING

from opentelemetry import trace
from opentelemetry.context import Context, get_current
from opentelemetry.trace import INVALID_SPAN, Span, SpanKind
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from moonpool.runtime.config.options import TracingOptions

if TYPE_CHECKING:
    from moonpool.runtime.observing.span_exporter import SpanExport

TRACEPARENT = "traceparent"

Attribute = str | int | float | bool

_propagator = TraceContextTextMapPropagator()
_nothing = nullcontext(INVALID_SPAN)
_export: SpanExport | None = None


def setup_tracing(options: TracingOptions, process: str) -> Callable[[], None]:
    """Begin to send this process's spans, if it is asked for; returns what sends the last ones and ends it.

    A collector that does not answer costs spans, never a request: they wait in a queue of bounded length, and
    are sent by a thread.
    """
    global _export
    if not options.otlp_endpoint:
        return lambda: None
    from moonpool.runtime.observing.span_exporter import SpanExport

    export = _export = SpanExport(options.otlp_endpoint, process)

    def end() -> None:
        global _export
        _export = None
        export.shutdown()

    return end


def sampled() -> bool:
    """Whether what happens now is part of a trace that somebody will get."""
    return _export is not None and trace.get_current_span().get_span_context().trace_flags.sampled


def span(name: str, **attributes: Attribute) -> AbstractContextManager[Span]:
    """Around some work for the request at hand; whatever is called meanwhile becomes a child."""
    if _export is None or not trace.get_current_span().get_span_context().is_valid:
        return _nothing
    return _export.tracer.start_as_current_span(name, attributes=attributes)


def server_span(name: str, traceparent: str, *, root: bool = False) -> AbstractContextManager[Span]:
    """Around the answer to a call that came with ``traceparent``; without one only if it may be a
    ``root``."""
    if _export is None or not (traceparent or root):
        return _nothing
    context = _propagator.extract({TRACEPARENT: traceparent}, Context())
    return _export.tracer.start_as_current_span(name, context, SpanKind.SERVER)


def outgoing_headers() -> tuple[tuple[str, str], ...]:
    """The header that makes what a peer does for us a child of what we are doing."""
    if _export is None:
        return ()
    carrier: dict[str, str] = {}
    _propagator.inject(carrier)
    return tuple((name, value) for name, value in carrier.items() if name == TRACEPARENT)


def current_context() -> Context:
    """The span we are in, for a ``record_span`` from elsewhere."""
    return get_current()


def record_span(
    name: str, *, ago_s: float, seconds: float, within: Context | None = None, **attributes: Attribute
) -> None:
    """A span of something that began ``ago_s`` ago and took ``seconds``, a child of the span we are in, or
    were in when ``current_context`` was asked."""
    if _export is None:
        return
    parent = trace.get_current_span(within).get_span_context()
    if parent.trace_flags.sampled:
        began_ns = time.time_ns() - int(1e9 * ago_s)
        _export.ended(name, parent, attributes, began_ns, began_ns + int(1e9 * seconds))
