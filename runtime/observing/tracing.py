"""OpenTelemetry spans, sent by OTLP if ``tracing.otlp_endpoint`` is set, and almost free otherwise.

The W3C header ``traceparent`` of HTTP and gRPC connects the spans of a request. OpenTelemetry's ``OTEL_*``
environment variables set the sampling and other parameters.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from opentelemetry import trace
from opentelemetry.context import Context
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
    """Start to send spans if tracing is configured. Returns a function that sends the last ones and stops.

    A thread sends the spans from a queue of bounded length: a collector that does not answer loses spans, but
    delays no request.
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
    """Whether the current span is part of a trace that is exported."""
    return _export is not None and trace.get_current_span().get_span_context().trace_flags.sampled


def trace_id() -> str:
    """Of the current span, if its trace is exported; else empty."""
    return f"{trace.get_current_span().get_span_context().trace_id:032x}" if sampled() else ""


def span(name: str, **attributes: Attribute) -> AbstractContextManager[Span]:
    """A span of work for the current request; nested spans become its children."""
    if _export is None or not trace.get_current_span().get_span_context().is_valid:
        return _nothing
    return _export.tracer.start_as_current_span(name, attributes=attributes)


def server_span(name: str, traceparent: str, *, root: bool = False) -> AbstractContextManager[Span]:
    """A span of a served call with this ``traceparent``; without one only if it may be a ``root``."""
    if _export is None or not (traceparent or root):
        return _nothing
    context = _propagator.extract({TRACEPARENT: traceparent}, Context())
    return _export.tracer.start_as_current_span(name, context, SpanKind.SERVER)


def outgoing_headers() -> tuple[tuple[str, str], ...]:
    """The header that makes the peer's spans children of the current one."""
    if _export is None:
        return ()
    carrier: dict[str, str] = {}
    _propagator.inject(carrier)
    return tuple((name, value) for name, value in carrier.items() if name == TRACEPARENT)


def record_span(
    name: str, *, ago_s: float, seconds: float, within: Context | None = None, **attributes: Attribute
) -> None:
    """Record a span from ``ago_s`` ago that took ``seconds``: a child of ``within`` or the current span."""
    if _export is None:
        return
    parent = trace.get_current_span(within).get_span_context()
    if parent.trace_flags.sampled:
        began_ns = time.time_ns() - int(1e9 * ago_s)
        _export.ended(name, parent, attributes, began_ns, began_ns + int(1e9 * seconds))
