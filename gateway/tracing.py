"""OpenTelemetry spans for a request, from the HTTP request to the ledger.

Tracing wraps the services after they are built. Without TOLLHOUSE_TRACING_ENDPOINT it adds no code
to the request path and OpenTelemetry is not imported. Spans hold ids and counts, never text.
"""

import functools
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from core import logs
from core.errors import SettingError, TollhouseError
from core.events import UsageEvent
from core.extras import imports_of
from core.settings import Settings
from gateway.http.exchange import Exchange
from gateway.inference.surface import Surface
from gateway.metering.batch_shippers import UsageSink
from gateway.metering.spool import OutboxBatch
from gateway.pipeline import Pipeline

if TYPE_CHECKING:
    from opentelemetry.trace import Span, SpanContext, Tracer

# Requests whose usage has not been recorded yet; beyond this the oldest are dropped.
_MAX_PENDING = 50_000
# Attribute of the pipeline, its method, and the name of its span.
_STEPS = (
    ("auth", "principal", "auth"),
    ("admission", "reserve", "admission"),
    ("moderator", "screen", "moderation"),
    ("spool", "open", "opened"),
    ("", "_deliver", "engine"),
)
_EVENT_ATTRIBUTES = (
    *("request_id", "tenant_id", "model", "engine_id", "finish_reason"),
    *("input_tokens", "cached_tokens", "output_tokens", "waived_tokens"),
)
_root: ContextVar["Span | None"] = ContextVar("tollhouse_root_span", default=None)


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

    def instrument(self, pipeline: Pipeline) -> None:
        for part, name, span_name in _STEPS:
            owner = getattr(pipeline, part) if part else pipeline
            setattr(owner, name, self._wrap_step(getattr(owner, name), span_name))
        for owner, name, wrapper in (
            (pipeline, "serve", self._wrap_serve(pipeline.serve)),
            (pipeline.spool, "close", self._wrap_close(pipeline.spool.close)),
            (pipeline.spool, "close_soon", self._wrap_close_soon(pipeline.spool.close_soon)),
        ):
            setattr(owner, name, wrapper)

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

    def _wrap_serve(
        self, serve: Callable[[Surface, Exchange], Awaitable[None]]
    ) -> Callable[[Surface, Exchange], Awaitable[None]]:
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        propagator = TraceContextTextMapPropagator()

        @functools.wraps(serve)
        async def _wrapper(surface: Surface, exchange: Exchange) -> None:
            carrier = {
                name: exchange.headers[name.encode()].decode("ascii", "replace")
                for name in ("traceparent", "tracestate")
                if name.encode() in exchange.headers
            }
            with self._tracer.start_as_current_span(
                "request",
                propagator.extract(carrier),
                kind=SpanKind.SERVER,
                attributes={"http.route": surface.route},
                record_exception=False,
                set_status_on_exception=False,
            ) as span:
                token = _root.set(span)
                try:
                    await serve(surface, exchange)
                finally:
                    _root.reset(token)

        return _wrapper

    def _wrap_step(self, call: Callable[..., Awaitable[Any]], name: str) -> Callable[..., Any]:
        @functools.wraps(call)
        async def _wrapper(*args: Any, **kwargs: Any) -> Any:
            with self._span(name):
                return await call(*args, **kwargs)

        return _wrapper

    def _wrap_close(self, close: Callable[..., Awaitable[None]]) -> Callable[..., Any]:
        @functools.wraps(close)
        async def _wrapper(event: UsageEvent, *args: Any, **kwargs: Any) -> None:
            self._set_usage(event)
            with self._span("metering"):
                await close(event, *args, **kwargs)

        return _wrapper

    def _wrap_close_soon(self, close_soon: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(close_soon)
        def _wrapper(event: UsageEvent, *args: Any, **kwargs: Any) -> None:
            self._set_usage(event)
            close_soon(event, *args, **kwargs)

        return _wrapper

    def _set_usage(self, event: UsageEvent) -> None:
        """Set the usage on the request's span and wait for its commit to the ledger."""
        root = _root.get()
        if root is None:
            return
        self._pending[event.request_id] = root.get_span_context()
        if len(self._pending) > _MAX_PENDING:
            self._pending.popitem(last=False)
        for name in _EVENT_ATTRIBUTES:
            root.set_attribute(f"tollhouse.{name}", getattr(event, name))
        root.set_attribute("http.response.status_code", event.status)

    @contextmanager
    def _span(self, name: str) -> Iterator[None]:
        from opentelemetry.trace import Status, StatusCode

        root = _root.get()
        request_id = logs.request_id.get()
        if root is not None and request_id:
            root.set_attribute("tollhouse.request_id", request_id)
        with self._tracer.start_as_current_span(
            name, record_exception=False, set_status_on_exception=False
        ) as span:
            try:
                yield
            except TollhouseError as error:
                # Only the code: an error message may quote the client's text.
                for each in (span, root or span):
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
