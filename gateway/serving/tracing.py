"""OpenTelemetry spans for a request, from the HTTP request to the ledger.

Without TOLLHOUSE_TRACING_ENDPOINT no span is made and OpenTelemetry is not imported. Spans hold ids
and counts, never text.
"""

import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from core.errors import SettingError, TollhouseError
from core.events import UsageEvent
from core.extras import imports_of
from core.settings import Settings
from gateway.metering.spool_records import OutboxBatch
from gateway.metering.usage_sink import UsageSink
from gateway.request.spans import Traceable

if TYPE_CHECKING:
    from opentelemetry.trace import Span, SpanContext, Tracer

# Requests whose usage has not been recorded yet; beyond this the oldest are dropped.
_MAX_PENDING = 50_000
_EVENT_ATTRIBUTES = (
    *("request_id", "tenant_id", "model", "engine_id", "finish_reason"),
    *("input_tokens", "cached_tokens", "output_tokens", "waived_tokens"),
)


_OPERATIONS = {
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
    "/v1/chat/completions": "chat",
    "/v1/messages": "chat",
    "/v1/responses": "chat",
}
# Fields of a request that OpenTelemetry's conventions for generative AI name.
_PARAMETERS = (
    *("max_tokens", "temperature", "top_p", "top_k"),
    *("frequency_penalty", "presence_penalty", "seed"),
)


def generation_attributes(
    event: UsageEvent, request: object
) -> Iterator[tuple[str, str | int | float | list[str]]]:
    """By OpenTelemetry's conventions for generative AI, so that its readers show a generation."""
    yield "gen_ai.operation.name", _OPERATIONS.get(event.route, event.route.rpartition("/")[2])
    yield "gen_ai.provider.name", "tollhouse"
    yield "gen_ai.request.model", getattr(request, "model", event.model)
    yield "gen_ai.response.model", event.model
    yield "gen_ai.response.id", event.request_id
    if event.finish_reason:
        yield "gen_ai.response.finish_reasons", [event.finish_reason]
    yield "gen_ai.usage.input_tokens", event.input_tokens
    yield "gen_ai.usage.output_tokens", event.output_tokens
    yield "gen_ai.usage.cache_read.input_tokens", event.cached_tokens
    for name in _PARAMETERS:
        value = getattr(request, name, None)
        if isinstance(value, int | float):
            yield f"gen_ai.request.{name}", value
    choices = getattr(request, "n", 1)
    if isinstance(choices, int) and choices > 1:
        yield "gen_ai.request.choice.count", choices


def make_tracer(settings: Settings) -> "Tracer | None":
    """None when TOLLHOUSE_TRACING_ENDPOINT is empty."""
    if not settings.tracing_endpoint:
        return None
    with imports_of("tracing", "TOLLHOUSE_TRACING_ENDPOINT", SettingError):
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    provider = TracerProvider(resource=Resource.create({"service.name": "tollhouse"}))
    exporter = OTLPSpanExporter(endpoint=settings.tracing_endpoint)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return provider.get_tracer("tollhouse")


class RequestTracer:
    """Starts this process's spans and tracks requests whose usage is not recorded yet."""

    def __init__(self, tracer: "Tracer") -> None:
        self._tracer = tracer
        self._pending: OrderedDict[str, SpanContext] = OrderedDict()

    @contextmanager
    def request(self, ctx: Traceable) -> Iterator[None]:
        """The span of a whole request, in the client's trace if it sent one."""
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        headers = ctx.exchange.headers
        carrier = {
            name: headers[name.encode()].decode("ascii", "replace")
            for name in ("traceparent", "tracestate")
            if name.encode() in headers
        }
        with self._tracer.start_as_current_span(
            "request",
            TraceContextTextMapPropagator().extract(carrier),
            kind=SpanKind.SERVER,
            attributes={
                "http.route": ctx.route,
                "tollhouse.request_id": ctx.request_id,
            },
            record_exception=False,
            set_status_on_exception=False,
        ) as span:
            ctx.trace = _RequestTrace(self, self._tracer, span, ctx)
            yield

    def expect(self, event: UsageEvent, span: "SpanContext") -> None:
        """The event's commit to the ledger will be a child of the span."""
        self._pending[event.request_id] = span
        if len(self._pending) > _MAX_PENDING:
            self._pending.popitem(last=False)

    def usage_sink(self, usage_sink: UsageSink) -> UsageSink:
        return _TracedSink(usage_sink, self)

    def recorded(self, batch: OutboxBatch, started_ns: int) -> None:
        """Add a `ledger` span to each traced request whose usage the batch commits."""
        from opentelemetry import trace

        for event in batch.usage:
            parent = self._pending.pop(event.request_id, None)
            if parent is None:
                continue
            context = trace.set_span_in_context(trace.NonRecordingSpan(parent))
            span = self._tracer.start_span("ledger", context, start_time=started_ns)
            span.set_attribute("tollhouse.request_id", event.request_id)
            span.set_attribute("tollhouse.batch", len(batch.usage))
            span.end()


class _RequestTrace:
    def __init__(
        self, owner: RequestTracer, tracer: "Tracer", root: "Span", ctx: Traceable
    ) -> None:
        self._ctx = ctx
        self._owner = owner
        self._tracer = tracer
        self._root = root

    def set_usage(self, event: UsageEvent) -> None:
        for name in _EVENT_ATTRIBUTES:
            self._root.set_attribute(f"tollhouse.{name}", getattr(event, name))
        self._root.set_attribute("http.response.status_code", event.status)
        for name, value in generation_attributes(event, getattr(self._ctx, "request", None)):
            self._root.set_attribute(name, value)
        self._owner.expect(event, self._root.get_span_context())

    def set_error(self, error: TollhouseError) -> None:
        """Only the code: an error message may quote the client's text."""
        from opentelemetry.trace import Status, StatusCode

        self._root.set_attribute("http.response.status_code", int(error.status))
        self._root.set_status(Status(StatusCode.ERROR, error.code))

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        from opentelemetry.trace import Status, StatusCode

        with self._tracer.start_as_current_span(
            name, record_exception=False, set_status_on_exception=False
        ) as span:
            try:
                yield
            except TollhouseError as error:
                # Only the code: an error message may quote the client's text.
                for each in (span, self._root):
                    each.set_status(Status(StatusCode.ERROR, error.code))
                raise


class _TracedSink:
    def __init__(self, usage_sink: UsageSink, request_tracer: RequestTracer) -> None:
        self._usage_sink = usage_sink
        self._request_tracer = request_tracer

    def record(self, batch: OutboxBatch) -> None:
        started_ns = time.time_ns()
        self._usage_sink.record(batch)
        self._request_tracer.recorded(batch, started_ns)

    def park(self, batch: OutboxBatch, reason: str) -> None:
        self._usage_sink.park(batch, reason)
