"""Spans of a request's steps, as the pipeline sees them. They cost nothing when tracing is off."""

from contextlib import nullcontext
from types import TracebackType
from typing import TYPE_CHECKING, Protocol

from core.errors import TollhouseError
from core.events import UsageEvent

if TYPE_CHECKING:
    from gateway.request.exchange import Exchange


class Span(Protocol):
    def __enter__(self) -> object: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
        /,
    ) -> bool | None: ...


class Trace(Protocol):
    """The trace of one request."""

    def span(self, name: str) -> Span:
        """A context manager around one step."""

    def set_usage(self, event: UsageEvent) -> None:
        """Put the usage on the request's span; its `ledger` span follows with the commit."""

    def set_error(self, error: TollhouseError) -> None:
        """Put the status of an error response on the request's span."""


class Traceable(Protocol):
    """What a tracer reads of a request, and where it puts the request's trace."""

    request_id: str
    exchange: "Exchange"
    trace: Trace

    @property
    def route(self) -> str: ...


class Tracer(Protocol):
    def request(self, ctx: Traceable) -> Span:
        """A context manager around a whole request."""


_NO_SPAN: Span = nullcontext()


class NoTrace:
    def span(self, name: str) -> Span:
        return _NO_SPAN

    def set_usage(self, event: UsageEvent) -> None:
        return

    def set_error(self, error: TollhouseError) -> None:
        return


class NoTracer:
    def request(self, ctx: Traceable) -> Span:
        return _NO_SPAN


NO_TRACE = NoTrace()
NO_TRACER = NoTracer()
