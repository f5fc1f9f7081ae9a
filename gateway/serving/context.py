"""The state of one request while it is served: each step reads it and adds its result."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from core.events import UsageKind
from core.tenants.keys import Principal
from gateway.admission.reservation import Reservation
from gateway.answers.surface import Surface
from gateway.catalog.catalog import Target
from gateway.metering.meter import Meter
from gateway.prompts.prompt import Prompt
from gateway.request.exchange import Exchange
from gateway.request.inference import InferenceRequest
from gateway.request.spans import NO_TRACE, Span, Trace
from gateway.screening.moderator import ScreeningResult
from gateway.serving.cached_answers import Lookup
from gateway.serving.headers import RequestOptions

if TYPE_CHECKING:
    from gateway.answers.delivery import Delivery


@dataclass(slots=True, eq=False, kw_only=True)
class Context:
    """What every request has, whatever it asks for. The fields without a value are set by an early
    step, before anything reads them."""

    request_id: str
    exchange: Exchange
    started: float  # monotonic
    trace: Trace = NO_TRACE
    principal: Principal = field(init=False)
    options: RequestOptions = field(init=False)
    target: Target = field(init=False)
    fallbacks: list[Target] = field(init=False)  # to try if this target fails
    prompt: Prompt = field(init=False)
    screening: ScreeningResult | None = None
    reservation: Reservation | None = None
    meter: Meter | None = None
    labels: str | None = None  # in their canonical form: see `core.labels`
    fallback_from: list[str] = field(default_factory=list)  # models that failed before this one

    @property
    def route(self) -> str:
        raise NotImplementedError

    @property
    def kind(self) -> UsageKind:
        raise NotImplementedError

    @property
    def tenant_id(self) -> str | None:
        """None before authentication."""
        principal: Principal | None = getattr(self, "principal", None)
        return principal.tenant_id if principal is not None else None

    def span(self, name: str) -> Span:
        return self.trace.span(name)

    async def settle(self) -> None:
        """The counters keep what the usage event charges; without one, nothing."""
        if self.reservation is not None:
            await self.reservation.settle(self.meter.event if self.meter is not None else None)


@dataclass(slots=True, eq=False, kw_only=True)
class RequestContext(Context):
    """The context of a request that the pipeline runs on one of its surfaces."""

    surface: Surface
    large: bool = False  # the body is so large that its prompt takes long to encode
    given: InferenceRequest = field(init=False)  # as the client sent it
    request: InferenceRequest = field(init=False)  # as given; after screening, as screened
    delivery: "Delivery | None" = None  # of a request whose answer is recorded for its tenant
    lookup: Lookup | None = None  # in the response cache; None for a request that does not use it
    canary_of: str = ""  # the model that was asked for, of a conversation that a canary gets
    virtual: str = ""  # the virtual model that was asked for

    @property
    def route(self) -> str:
        return self.surface.route

    @property
    def kind(self) -> UsageKind:
        if self.lookup is not None and self.lookup.hit is not None:
            return UsageKind.CACHE_HIT
        embeds = self.prompt.request.inputs is not None
        return UsageKind.EMBEDDING if embeds else UsageKind.GENERATION
