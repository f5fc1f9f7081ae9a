"""What each step gets of a request: values made from the context, which no step knows."""

from dataclasses import replace
from datetime import datetime

from core.events import OpenedRequest, UsageKind, engine_request_ids
from engine.protocol import GenerateRequest
from gateway.admission.request import AdmissionRequest
from gateway.engines.routing.router import Query
from gateway.engines.sampling import sampling_params
from gateway.metering.engine_receipts import note_text
from gateway.metering.meter import Meter, MeterServices, blocked_ending
from gateway.request.engine import Job
from gateway.serving.context import Context, RequestContext
from gateway.serving.request_labels import labels_of


def labels(ctx: RequestContext) -> str | None:
    """Raises BadRequest for labels that the project does not list."""
    return labels_of(ctx.principal, ctx.exchange, ctx.given)


def admission_request(ctx: RequestContext) -> AdmissionRequest:
    principal, adapter = ctx.principal, ctx.target.adapter
    return AdmissionRequest(
        request_id=ctx.request_id,
        tenant_id=principal.tenant_id,
        project_id=principal.project_id,
        key_id=principal.origin_id,
        model=ctx.target.model.name,
        plan=principal.plan,
        prompt_tokens=ctx.prompt.reserved_tokens,
        max_output_tokens=ctx.prompt.max_tokens,
        currency=principal.currency,
        choices=ctx.prompt.request.choices,
        candidates=ctx.prompt.request.candidates,
        deadline_s=ctx.options.timeout_s,
        adapter=adapter.name if adapter is not None else None,
        on_disconnect=ctx.exchange.on_disconnect,
        tier=ctx.request.service_tier,
        is_bounded=ctx.prompt.request.max_tokens is not None,
        bound=ctx.target.model.bound,
        labels=ctx.labels,
    )


def query_of(ctx: Context) -> Query:
    return Query(ctx.target, ctx.prompt, ctx.principal.tenant_id)


def job_of(ctx: RequestContext) -> Job:
    principal, prompt, adapter = ctx.principal, ctx.prompt, ctx.target.adapter
    request = prompt.request
    whole = GenerateRequest(
        request_id=ctx.request_id,
        namespace=principal.tenant_id,
        prompt=prompt.ids,
        sampling=sampling_params(prompt, ctx.target.model),
        adapter=adapter.digest if adapter else None,
        weight=float(principal.plan.weight),
        priority=principal.plan.priority,
        deadline_s=ctx.options.timeout_s,
        note=note_of(ctx),
        prediction=prompt.prediction,
    )
    if not prompt.parts:
        return Job(whole, request)
    names = engine_request_ids(ctx.request_id, len(prompt.parts))
    parts = [
        Job(replace(whole, request_id=name, prompt=part.ids), part.request)
        for name, part in zip(names, prompt.parts, strict=True)
    ]
    return Job(whole, request, tuple(parts))


def note_of(ctx: RequestContext) -> str:
    """Empty for a warm-up request, which is not charged."""
    if ctx.options.is_warm_up or ctx.reservation is None:
        return ""
    principal, adapter = ctx.principal, ctx.target.adapter
    return note_text(
        principal.project_id,
        principal.key_id,
        ctx.target.model.name,
        adapter.name if adapter is not None else None,
        ctx.reservation.price_version,
        ctx.surface.route,
        UsageKind.GENERATION if ctx.prompt.request.inputs is None else UsageKind.EMBEDDING,
        principal.member_id,
        ctx.exchange.batch_job,
        len(ctx.prompt.parts) or 1,
    )


def meter_of(ctx: RequestContext, services: MeterServices, engine_id: str) -> Meter:
    opened = opened_request(ctx, services.clock.now(), engine_id)
    meter = Meter(services, opened, ctx.trace)
    request = ctx.prompt.request
    meter.is_warm_up = ctx.options.is_warm_up
    meter.streamed = request.stream
    meter.moderation = ctx.screening.action if ctx.screening is not None else None
    meter.prompt_order = ctx.prompt.order
    owner = (opened.tenant_id, opened.model, opened.adapter_digest)
    meter.cached_as_given = services.given_orders.cached_tokens(owner, ctx.given, ctx.prompt)
    meter.truncated = request.dropped
    meter.fallback_from = tuple(ctx.fallback_from)
    meter.canary_of = ctx.canary_of
    meter.virtual = ctx.virtual
    return meter


async def open_meter(ctx: RequestContext, services: MeterServices, engine_id: str) -> Meter:
    """Write the opened record, in place of the one of a model that failed before."""
    meter, again = meter_of(ctx, services, engine_id), ctx.meter is not None
    ctx.meter = meter
    with ctx.span("opened"):
        await meter.write_opened(again=again)
    if ctx.reservation is not None:
        ctx.reservation.keep()
    return meter


async def record_blocked(ctx: RequestContext, services: MeterServices, paid_by: str) -> None:
    """The blocked prompt is a usage event, whether the tenant or the operator pays."""
    ctx.meter = meter_of(ctx, services, "")
    await ctx.meter.close(blocked_ending(paid_by), None)


def opened_request(ctx: Context, now: datetime, engine_id: str) -> OpenedRequest:
    assert ctx.reservation is not None
    principal, adapter, request = ctx.principal, ctx.target.adapter, ctx.prompt.request
    return OpenedRequest(
        request_id=ctx.request_id,
        tenant_id=principal.tenant_id,
        project_id=principal.project_id,
        key_id=principal.key_id,
        kind=ctx.kind,
        route=ctx.route,
        model=ctx.target.model.name,
        adapter=adapter.name if adapter else None,
        adapter_digest=adapter.digest if adapter else None,
        price_version=ctx.reservation.price_version,
        opened_at=now,
        prompt_tokens=len(ctx.prompt.ids),
        engine_id=engine_id,
        member_id=principal.member_id,
        end_user=request.end_user,
        client_request_id=ctx.options.client_request_id,
        batch_job=ctx.exchange.batch_job,
        prompts=len(ctx.prompt.parts) or 1,
        labels=ctx.labels,
    )
