"""The composition root: builds the services from the settings.

No other module distinguishes embedded from production deployments, but `counting`.
"""

import asyncio
import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from billing.archive.opening import open_database
from billing.notices.request_sinks import SinkView
from billing.payments.base import PaymentProvider
from core.clock import Clock, SystemClock
from core.counters import Counters
from core.database import Database
from core.dead_letters import keeper
from core.events import EngineCount
from core.queue import TaskContext
from core.sealing import Sealer
from core.settings import Settings
from core.storage import StorageQuotas
from core.tenants.key_cache import KeyCache
from core.tenants.operator import operator_token
from core.tenants.roles import Roles
from gateway.admission.counters import make_counters
from gateway.admission.limiter import Admission, Limiter
from gateway.admission.prices import PriceList
from gateway.admission.rejections import RejectionCounter
from gateway.admission.seeding import SETTLE_S, Seeding
from gateway.catalog.adapter_registry import AdapterRegistry, CatalogRefresher
from gateway.catalog.adapter_store import AdapterStore
from gateway.catalog.catalog import Catalog
from gateway.catalog.upstreams import Upstream, read_upstreams
from gateway.catalog.virtual_models import read_virtual_models
from gateway.edge.auth.attempts import FailedAttempts
from gateway.edge.auth.authenticator import Authenticator
from gateway.edge.auth.dashboard_auth import DashboardAuth
from gateway.edge.auth.sign_on_directory import SignOnDirectory
from gateway.edge.auth.single_sign_on import FlowCookies, IssuerClient, SingleSignOn
from gateway.engines.clients import NOTHING_KEPT, Engines, Kept, make_engines, shared_by
from gateway.engines.openai import OpenAIEngine
from gateway.engines.reloading import UpstreamReload
from gateway.engines.routing.adapter_preloader import AdapterPreloader
from gateway.engines.routing.engine_view import EngineView
from gateway.engines.routing.fallbacks import Fallbacks, read_fallbacks
from gateway.engines.routing.router import Router
from gateway.engines.upstream_changes import canary_shares
from gateway.formats.registry import runner_surfaces
from gateway.metering.batch_shippers import ProcessShipper
from gateway.metering.engine_receipts import ReceiptLog
from gateway.metering.meter import MeterServices
from gateway.metering.recovery import Recovery
from gateway.metering.shipper import Shipper
from gateway.metering.spool import Spool, SpoolFile
from gateway.metering.streams.base import UsageStream, wait_until_stored
from gateway.metering.streams.opening import make_sink, open_stream
from gateway.metering.usage_sink import stored_counts
from gateway.prompts.stored_prompts import StoredPrompts
from gateway.request.engine import EngineClient
from gateway.request.spans import NO_TRACER
from gateway.screening.decisions import DecisionLog, record_secret
from gateway.screening.moderator import Moderator, NoModeration
from gateway.screening.policy_view import PolicyView
from gateway.screening.second_opinions import SecondOpinions, read_guards
from gateway.screening.tenant_moderator import TenantModerator
from gateway.serving.background.responses import BackgroundResponses
from gateway.serving.batches.runner import BatchRunner
from gateway.serving.guard_models import make_second_opinions
from gateway.serving.payments import CardPages, make_payments, task_services
from gateway.serving.pipeline import Pipeline
from gateway.serving.request_log.log import RequestLog
from gateway.serving.request_log.receivers import Receivers
from gateway.serving.response_cache.cache import ResponseCache
from gateway.serving.responses import RequestLimits, Responses
from gateway.serving.services import Services
from gateway.serving.stored_responses.completions import StoredCompletions
from gateway.serving.stored_responses.expansion import ResponseStore
from gateway.serving.tracing import RequestTracer, make_tracer
from gateway.tasks import LeaderRunner, NoRunner, Runner
from moderation.classifiers.load import load_classifier
from moderation.screener import Screener

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

_STORED_S = 25.0  # how long to wait for a stream to be stored


@dataclass(frozen=True)
class _Base:
    """What everything else is built on: settings, storage and engines."""

    settings: Settings
    clock: Clock
    token: str  # the operator's
    database: Database
    access_database: Database
    storage: StorageQuotas
    counters: Counters
    spool: Spool
    router: Router
    catalog: Catalog
    upstream_reload: UpstreamReload
    tracer: RequestTracer | None


@dataclass(frozen=True)
class _RequestPath:
    """The pipeline, and what it reads from memory, refreshed from the database."""

    key_cache: KeyCache
    prices: PriceList
    policies: PolicyView
    screener: Screener | None
    opinions: SecondOpinions
    rejections: RejectionCounter
    limiter: Limiter
    pipeline: Pipeline


def build(
    settings: Settings,
    *,
    clock: Clock | None = None,
    engines: Engines | None = None,
    moderator: Moderator | None = None,
    tracer: "Tracer | None" = None,
) -> Services:
    """Arguments override the services built from the settings; tests and benchmarks use them."""
    base = _build_base(settings, clock or SystemClock(), engines, tracer or make_tracer(settings))
    return _build_services(base, _build_request_path(base, moderator))


def _build_base(
    settings: Settings, clock: Clock, engines: Engines | None, tracer: "Tracer | None"
) -> _Base:
    token = operator_token(settings)
    database = open_database(settings)
    # As many connections as the threads of keys, revocation and idempotency, which wait for no other.
    access_database = Database(settings.effective_database_url, pool_size=5)
    counters = make_counters(settings, clock)
    spool = Spool(SpoolFile(_spool_path(settings)))
    router = Router(clock, cold_start_s=settings.cold_start_s)
    receipts = ReceiptLog(spool, clock)
    upstreams = read_upstreams(settings.upstreams) if engines is None else []
    catalog = Catalog((), read_virtual_models(settings.virtual_models))
    make = partial(_make_engines, settings, router, catalog, receipts, counters=counters)
    if engines is None:
        router.canaries = canary_shares(upstreams)
        engines = make(upstreams)
    else:
        _attach(engines, catalog, receipts)
    router.serve_by(engines.clients)
    catalog.serve_only(engines.models)
    reload = UpstreamReload(
        settings, database, clock, router, catalog, build=make, upstreams=upstreams
    )
    return _Base(
        settings=settings,
        clock=clock,
        token=token,
        database=database,
        access_database=access_database,
        storage=StorageQuotas(clock),
        counters=counters,
        spool=spool,
        router=router,
        catalog=catalog,
        upstream_reload=reload,
        tracer=RequestTracer(tracer) if tracer is not None else None,
    )


def _make_engines(
    settings: Settings,
    router: Router,
    catalog: Catalog,
    receipts: ReceiptLog,
    upstreams: list[Upstream],
    kept: Kept = NOTHING_KEPT,
    *,
    counters: Counters,
) -> Engines:
    engines = make_engines(
        settings,
        upstreams,
        lambda engine_id, receipt: receipts.arrived(
            engine_id, receipt, partial(router.acknowledge_soon, receipt.request_id)
        ),
        router.index.apply,
        counters,
        kept=kept,
    )
    _attach(engines, catalog, receipts)
    return engines


def _attach(engines: Engines, catalog: Catalog, receipts: ReceiptLog) -> None:
    for name, clients in engines.clients.items():
        for client in clients:
            client.on_receipt = receipts.arrived
            if isinstance(client, OpenAIEngine):
                client.on_context = partial(catalog.learn_context, name)
                client.on_detected = partial(_serve_as_detected, catalog, name, clients)


def _serve_as_detected(catalog: Catalog, name: str, replicas: list[EngineClient]) -> None:
    catalog.learn_kind(name, *shared_by(replicas))


def _build_request_path(base: _Base, moderator: Moderator | None) -> _RequestPath:
    settings, clock, database = base.settings, base.clock, base.database
    key_cache, prices = KeyCache(base.access_database, clock), PriceList(database, clock)
    policies, rejections = PolicyView(database), RejectionCounter(database, clock)
    screener = Screener(load_classifier()) if settings.moderation == "on" else None
    opinions = make_second_opinions(read_guards(settings.guards), base.catalog, base.router, clock)
    limiter = Limiter(
        base.counters,
        clock,
        when_down=settings.limits_when_redis_down,
        processes=settings.workers,
        max_in_flight=settings.max_in_flight,
        rejections=rejections,
    )
    if moderator is None:
        decisions = DecisionLog(clock, record_secret(base.token), base.spool.note)
        moderator = make_moderator(screener, policies, clock, decisions, opinions)
    admission = Admission(limiter, prices, clock)
    cache_bytes = settings.response_cache_mb * 2**20
    pipeline = Pipeline(
        auth=Authenticator(
            key_cache,
            FailedAttempts(base.counters, clock),
            FailedAttempts(base.counters, clock, what="sign-ins"),
        ),
        catalog=base.catalog,
        admission=admission,
        moderator=moderator,
        router=base.router,
        fallbacks=Fallbacks(base.catalog, read_fallbacks(settings.fallbacks), prices.most_of),
        prompts=StoredPrompts(database, key_cache),
        cache=ResponseCache(admission, clock, database, key_cache, cache_bytes),
        metering=MeterServices(base.spool, clock, base.router.acknowledge_soon),
        responses=Responses(
            moderator=moderator,
            rejections=rejections,
            clock=clock,
            request_log=RequestLog(SinkView(database), clock, Receivers(settings)),
            completions=StoredCompletions(
                ResponseStore(
                    database=database,
                    clock=clock,
                    sealer=Sealer(base.token),
                    quotas=base.storage,
                )
            ),
        ),
        clock=clock,
        limits=RequestLimits(
            settings.max_body_mb * 2**20,
            settings.request_timeout_s,
            force_usage=settings.force_include_usage,
        ),
        operator_token=base.token,
        tracer=base.tracer or NO_TRACER,
    )
    return _RequestPath(
        key_cache, prices, policies, screener, opinions, rejections, limiter, pipeline
    )


def _build_services(base: _Base, path: _RequestPath) -> Services:
    settings, clock, database, spool = base.settings, base.clock, base.database, base.spool
    stream = open_stream(settings.stream_url) if settings.stream_url else None
    usage_sink, payments = make_sink(database, clock, stream), make_payments(settings)
    pipeline, roles = path.pipeline, Roles(database)
    shipper = (
        Shipper(spool, base.tracer.usage_sink(usage_sink))
        if base.tracer is not None
        else Shipper(spool, usage_sink, _make_helper(settings, spool, clock))
    )
    recovery = Recovery(
        spool.file.path.parent,
        spool.file.path,
        usage_sink,
        base.router,
        clock,
        longest_life_s=settings.request_timeout_s,
        on_settled=lambda event: path.limiter.settle_lost(
            event.tenant_id, event.request_id, path.prices.cost_of_event(event)
        ),
        stored_counts=partial(_stored_counts, base.database, stream),
    )

    async def _stored() -> None:
        await recovery.first_round_done.wait()
        await shipper.catch_up()
        if stream is not None:
            await asyncio.to_thread(wait_until_stored, stream, _STORED_S)

    path.limiter.seeding = Seeding(
        base.counters,
        path.prices,
        settle_s=SETTLE_S if settings.redis_url else 0.0,
        stored=_stored,
    )
    store = AdapterStore(settings.data_dir / "adapters", settings.adapter_dirs)
    adapters = AdapterRegistry(
        database=database,
        clock=clock,
        catalog=base.catalog,
        store=store,
        quotas=base.storage,
        refresh=CatalogRefresher(database, base.catalog, store).refresh,
    )
    base.router.suspects.on_quarantine = adapters.quarantine_soon
    return Services(
        settings=settings,
        clock=clock,
        database=database,
        access_database=base.access_database,
        storage=base.storage,
        key_cache=path.key_cache,
        roles=roles,
        operator_token=base.token,
        dashboard_auth=DashboardAuth(roles, pipeline.auth.attempts, clock, base.token),
        sign_on=_sign_on(settings, clock, base.database, base.token),
        counters=base.counters,
        limiter=path.limiter,
        rejections=path.rejections,
        catalog=base.catalog,
        adapters=adapters,
        prices=path.prices,
        router=base.router,
        engines=EngineView(database, base.router),
        upstream_reload=base.upstream_reload,
        preloader=AdapterPreloader(base.router, base.catalog, database, clock),
        spool=spool,
        stream=stream,
        shipper=shipper,
        recovery=recovery,
        pipeline=pipeline,
        tasks=make_tasks(settings, database, clock, payments),
        payments=payments,
        card_pages=CardPages(settings, clock, database, payments),
        screener=path.screener,
        policies=path.policies,
        batches=BatchRunner(
            database,
            clock,
            pipeline.serve,
            runner_surfaces(),
            at_once=settings.batch_concurrency,
            max_line_bytes=settings.max_body_mb * 2**20,
        ),
        background=BackgroundResponses(
            ResponseStore(
                database=database, clock=clock, sealer=Sealer(base.token), quotas=base.storage
            ),
            pipeline,
        ),
        opinions=path.opinions,
    )


def _stored_counts(
    database: Database, stream: UsageStream | None, names: Sequence[str], engine_id: str
) -> list[EngineCount]:
    """Counts that a dead process has published may still lie in the stream."""
    if stream is not None:
        wait_until_stored(stream, _STORED_S)
    return stored_counts(database, names, engine_id)


def _sign_on(settings: Settings, clock: Clock, database: Database, token: str) -> SignOnDirectory:
    def _make(own: IssuerClient) -> SingleSignOn:
        from gateway.edge.auth.open_id_connect import OpenIdConnect

        return OpenIdConnect(own, clock, token, networks=settings.webhook_networks)

    own = _make(IssuerClient.of(settings)) if settings.oidc_issuer else None
    return SignOnDirectory(database, clock, own, _make, FlowCookies(clock, token))


def make_tasks(
    settings: Settings, database: Database, clock: Clock, payments: PaymentProvider
) -> Runner:
    if settings.broker_url:
        return NoRunner()
    context = TaskContext(settings, database, clock, task_services(settings, clock, payments))
    return LeaderRunner(settings.data_dir / "tasks.lock", context, keeper(database, clock))


def make_moderator(
    screener: Screener | None,
    policies: PolicyView,
    clock: Clock,
    log: DecisionLog,
    opinions: SecondOpinions,
) -> Moderator:
    if screener is None:
        return NoModeration()
    return TenantModerator(screener, policies, clock, log, opinions)


def _make_helper(settings: Settings, spool: Spool, clock: Clock) -> ProcessShipper | None:
    """None with an injected clock, which a helper process cannot share."""
    if not isinstance(clock, SystemClock):
        return None
    url = settings.effective_database_url
    level, log_format = settings.log_level, settings.log_format
    stream_url = settings.stream_url
    return ProcessShipper(spool.file.path, url, level, log_format, stream_url=stream_url)


def _spool_path(settings: Settings) -> Path:
    return settings.data_dir / "spool" / f"{os.getpid()}-{secrets.token_hex(4)}.db"
