"""The only place that names OpenTelemetry: finished spans to a collector over OTLP/HTTP, from a thread of its own.

Behind the extra `otel`. Spans wait in a bounded queue; those that it has no room for, and those that no
collector takes, are dropped. No request notices either.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

from protocol.clock import Clock, WallClock
from protocol.errors import ConfigError
from protocol.extras import install_step
from protocol.spans import Span
from protocol.trace import TraceContext

TRACES_PATH = "/v1/traces"
QUEUE_SPANS = 4096
EXPORT_EVERY_S = 2.0
EXPORT_S = 5.0
"""One batch, attempts included."""
CLOSE_S = 2.0


def collector_url(endpoint: str) -> str:
    """Where spans are posted: `endpoint`, with the usual path when it names none. Raises ConfigError."""
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.username:
        raise ConfigError(
            f"otel_endpoint is {endpoint[:80]!r}", next_step="write http(s)://host:4318", field="otel_endpoint"
        )
    return endpoint if parts.path.strip("/") else endpoint.rstrip("/") + TRACES_PATH


class OtlpSpans:
    """Takes spans; `close` sends what waits, for a bounded time.

    Args:
        endpoint: the collector's address.
        service: `midstream-agent` or `midstream-coordinator`. instance: which one.
        clock, wall: monotonic seconds become wall time by both.
    """

    def __init__(self, endpoint: str, service: str, instance: str, clock: Clock, wall: WallClock) -> None:
        url = collector_url(endpoint)
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError as err:
            raise ConfigError(
                "otel_endpoint needs the OpenTelemetry exporter",
                next_step=install_step("otel"),
                field="otel_endpoint",
            ) from err
        # An absent collector is told once a minute by its own logger, which has no place in ours.
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
        self._clock, self._wall = clock, wall
        self._resource = Resource({"service.name": service, "service.instance.id": instance})
        self._exporter: Any = OTLPSpanExporter(endpoint=url, timeout=EXPORT_S)
        self._processor: Any = BatchSpanProcessor(
            self._exporter,
            max_queue_size=QUEUE_SPANS,
            schedule_delay_millis=EXPORT_EVERY_S * 1000,
            export_timeout_millis=EXPORT_S * 1000,
        )
        self._make = _maker(self._resource)

    def __call__(self, span: Span) -> None:
        """Queue a span; never waits."""
        offset_s = self._wall().unix_s - self._clock()
        self._processor.on_end(self._make(span, offset_s))

    def close(self) -> None:
        """For threads. Whatever has not been taken after CLOSE_S is dropped."""
        enough = threading.Timer(CLOSE_S, self._exporter.shutdown)
        enough.start()
        try:
            self._processor.shutdown()
        finally:
            enough.cancel()
            enough.join()


def open_spans(endpoint: str | None, service: str, instance: str, clock: Clock, wall: WallClock) -> OtlpSpans | None:
    """None without an endpoint. Raises ConfigError."""
    return None if endpoint is None else OtlpSpans(endpoint, service, instance, clock, wall)


def _maker(resource: Any) -> Callable[[Span, float], Any]:
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope
    from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

    scope = InstrumentationScope("midstream")
    kinds = {"server": SpanKind.SERVER, "internal": SpanKind.INTERNAL}

    def context(trace: TraceContext, span_id: str, remote: bool) -> Any:
        flags = TraceFlags(TraceFlags.SAMPLED if trace.sampled else TraceFlags.DEFAULT)
        return SpanContext(int(trace.trace_id, 16), int(span_id, 16), remote, flags)

    def make(span: Span, offset_s: float) -> Any:
        above = span.context.parent_id
        return ReadableSpan(
            name=span.name,
            context=context(span.context, span.context.span_id, False),
            parent=context(span.context, above, span.kind == "server") if above else None,
            resource=resource,
            attributes=dict(span.attributes),
            kind=kinds[span.kind],
            status=Status(StatusCode.ERROR, span.error) if span.error else Status(StatusCode.UNSET),
            start_time=int((span.begins_s + offset_s) * 1e9),
            end_time=int((span.ends_s + offset_s) * 1e9),
            instrumentation_scope=scope,
        )

    return make
