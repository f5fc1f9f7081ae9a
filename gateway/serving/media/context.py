"""The state of one audio or image request while it is served, and the records made from it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime

from msgspec.structs import replace

from core.events import OpenedRequest, UsageKind
from core.tenants.keys import Principal
from engine.protocol import Receipt
from gateway.admission.request import AdmissionRequest
from gateway.admission.reservation import Reservation
from gateway.catalog.catalog import Target
from gateway.engines.routing.router import Query
from gateway.metering.meter import Ending, Meter
from gateway.prompts.prompt import Prompt
from gateway.request.exchange import Exchange
from gateway.request.output_guard import OutputGuard
from gateway.request.spans import NO_TRACE, Trace
from gateway.screening.moderator import ScreeningResult
from gateway.serving.headers import RequestOptions
from gateway.serving.idempotency import Claim
from gateway.serving.media.request import Endpoint, MediaRequest
from gateway.serving.media.usage import MediaUsage


@dataclass(slots=True, eq=False)
class MediaContext:
    """The fields without a value are set by an early step, before anything reads them."""

    request_id: str
    endpoint: Endpoint
    exchange: Exchange
    started: float  # monotonic
    trace: Trace = NO_TRACE
    claim: Claim | None = None  # of an Idempotency-Key
    principal: Principal = field(init=False)
    options: RequestOptions = field(init=False)
    deadline: float = field(init=False)  # monotonic, for all models of a fallback chain
    request: MediaRequest = field(init=False)  # as the client sent it; after screening, as screened
    prompt: Prompt = field(init=False)
    target: Target = field(init=False)
    fallbacks: list[Target] = field(init=False)  # to try if this target fails
    usage: MediaUsage = field(init=False)
    screening: ScreeningResult | None = None
    reservation: Reservation | None = None
    meter: Meter | None = None
    fallback_from: list[str] = field(default_factory=list)  # models that failed before this one
    guards: Sequence[OutputGuard] = ()  # of a transcript
    answered: bool = False  # the upstream's whole answer, or its first audio, has come
    delivered: bool = False

    @property
    def route(self) -> str:
        return self.endpoint.route

    def query(self) -> Query:
        return Query(self.target, self.prompt, self.principal.tenant_id)

    def admission(self) -> AdmissionRequest:
        request = AdmissionRequest.without_prompt(
            self.request_id, self.principal, self.target.model.name
        )
        return replace(
            request,
            max_output_tokens=1,
            currency=self.principal.currency,
            deadline_s=self.options.timeout_s,
            on_disconnect=self.exchange.on_disconnect,
            bound=self.request.bound(),
        )

    def opened(self, now: datetime, engine_id: str) -> OpenedRequest:
        principal = self.principal
        assert self.reservation is not None
        return OpenedRequest(
            request_id=self.request_id,
            tenant_id=principal.tenant_id,
            project_id=principal.project_id,
            key_id=principal.key_id,
            kind=self.endpoint.kind,
            route=self.route,
            model=self.target.model.name,
            adapter=None,
            adapter_digest=None,
            price_version=self.reservation.price_version,
            opened_at=now,
            prompt_tokens=0,
            engine_id=engine_id,
            member_id=principal.member_id,
            end_user=self.request.end_user,
            client_request_id=self.options.client_request_id,
        )

    def ending(self, status: int, reason: str) -> tuple[Ending, Receipt | None]:
        """What is billed of the request as it stands."""
        blocked_by = self._end_guards()
        if blocked_by is not None and blocked_by.cut_paid_by == "operator":
            ending = Ending(0, 0, reason, status, prompt_done=False, quantity=0)
            return replace(ending, paid_by="operator"), None
        is_image = self.endpoint.kind is UsageKind.IMAGE
        billed = self.delivered if is_image else self.answered
        if not billed and not self.answered:
            return Ending(0, 0, reason, status, prompt_done=False), None
        units = self.usage.units if billed else 0
        receipt = self.usage.receipt(self.request_id, self.principal.tenant_id)
        paid_by = blocked_by.cut_paid_by if blocked_by is not None else None
        ending = Ending(0, 0, reason, status, prompt_done=True, units=units, paid_by=paid_by)
        return ending, receipt

    def _end_guards(self) -> OutputGuard | None:
        """Note what the guards did. The first that blocked the answer, if any has."""
        for guard in self.guards:
            guard.over()
            meter = self.meter
            if guard.action and meter is not None and meter.moderation in (None, "annotate"):
                meter.moderation = guard.action
        return next((guard for guard in self.guards if guard.blocked), None)

    async def settle(self) -> None:
        """The counters keep what the usage event charges; without one, nothing."""
        if self.reservation is not None:
            await self.reservation.settle(self.meter.event if self.meter is not None else None)
