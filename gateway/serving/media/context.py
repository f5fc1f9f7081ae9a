"""The state of one audio or image request while it is served, and the records made from it."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from core.events import UsageKind
from engine.protocol import Receipt
from gateway.admission.request import AdmissionRequest
from gateway.metering.meter import Ending
from gateway.request.output_guard import OutputGuard
from gateway.serving.context import Context
from gateway.serving.idempotency import Claim
from gateway.serving.media.request import Endpoint, MediaRequest
from gateway.serving.media.usage import MediaUsage


@dataclass(slots=True, eq=False, kw_only=True)
class MediaContext(Context):
    endpoint: Endpoint
    claim: Claim | None = None  # of an Idempotency-Key
    deadline: float = field(init=False)  # monotonic, for all models of a fallback chain
    request: MediaRequest = field(init=False)  # as the client sent it; after screening, as screened
    usage: MediaUsage = field(init=False)
    guards: Sequence[OutputGuard] = ()  # of a transcript
    answered: bool = False  # the upstream's whole answer, or its first audio, has come
    delivered: bool = False

    @property
    def route(self) -> str:
        return self.endpoint.route

    @property
    def kind(self) -> UsageKind:
        return self.endpoint.kind

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
