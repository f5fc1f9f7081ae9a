"""The composition root: builds the services from the settings.

No other module distinguishes embedded from production deployments.
"""

import asyncio
import logging
import os
import secrets
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from billing.payments.base import PaymentProvider
from core.clock import Clock, SystemClock
from core.counters import Counters
from core.counters_memory import MemoryCounters
from core.counters_redis import RedisCounters
from core.database import Database
from core.dead_letters import keeper
from core.errors import SettingError
from core.queue import TaskContext
from core.settings import Settings
from core.tenants.key_cache import KeyCache
from core.tenants.operator import operator_token
from core.tenants.roles import Roles
from gateway.admission.admission import Admission
from gateway.admission.limiter import Limiter
from gateway.admission.prices import PriceList
from gateway.admission.rejection_counter import RejectionCounter
from gateway.auth.attempts import FailedAttempts
from gateway.auth.authenticator import Authenticator
from gateway.auth.key_watch import watch_keys
from gateway.auth.single_sign_on import SingleSignOn
from gateway.batches.runner import BatchRunner
from gateway.catalog.catalog import Catalog
from gateway.catalog.refresher import CatalogRefresher
from gateway.inference.registry import batch_surfaces
from gateway.metering.batch_shippers import ProcessShipper
from gateway.metering.meter import MeterServices
from gateway.metering.recovery import Recovery
from gateway.metering.shipper import Shipper
from gateway.metering.spool import Spool, SpoolFile
from gateway.metering.usage_sink import SqlUsageSink
from gateway.payments import make_payments
from gateway.pipeline import Pipeline
from gateway.refresh import refresh_on_change
from gateway.responses import RequestLimits, Responses
from gateway.routing.adapter_preloader import AdapterPreloader
from gateway.routing.engine_view import EngineView
from gateway.routing.fallbacks import Fallbacks, read_fallbacks
from gateway.routing.hung_engines import HungEngines
from gateway.routing.router import Router
from gateway.screening.decisions import DecisionLog, record_secret
from gateway.screening.moderator import Moderator, NoModeration
from gateway.screening.policy_view import PolicyView
from gateway.screening.second_opinions import SecondOpinions, make_second_opinions, read_guards
from gateway.screening.tenant_moderator import TenantModerator
from gateway.tasks import LeaderRunner, NoRunner, Runner
from gateway.tracing import RequestTracer, make_tracer
from gateway.upstreams.clients import Engines, make_engines
from gateway.upstreams.config import read_upstreams
from moderation.classifiers.load import load_classifier
from moderation.screener import Screener

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

log = logging.getLogger("tollhouse.wiring")
_RECOVERY_TIMEOUT_S = 60.0


@dataclass
class Services:
    """The services of one gateway process."""

    settings: Settings
    clock: Clock
    database: Database
    key_cache: KeyCache
    roles: Roles
    operator_token: str
    single_sign_on: SingleSignOn | None
    counters: Counters
    limiter: Limiter
    rejections: RejectionCounter
    catalog: Catalog
    adapters: CatalogRefresher
    prices: PriceList
    router: Router
    engines: EngineView
    keeper: AdapterPreloader
    spool: Spool
    shipper: Shipper
    recovery: Recovery
    pipeline: Pipeline
    tasks: Runner
    payments: PaymentProvider
    screener: Screener | None
    policies: PolicyView
    opinions: SecondOpinions
    batches: BatchRunner
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)

    async def start(self) -> None:
        self.spool.bind(asyncio.get_running_loop())
        await self.counters.start()
        self.shipper.start()
        for engine in self.router.engines():
            await engine.start()
        # Admission reads these views from memory, so they are loaded before the first request.
        await asyncio.to_thread(self.prices.refresh)
        await asyncio.to_thread(self.adapters.refresh)
        await asyncio.to_thread(self.policies.refresh)
        await asyncio.to_thread(self.engines.refresh)
        self._run(watch_keys(self.key_cache, self.stopping), "keys")
        self._run(self.recovery.run(), "recovery")
        self._run(self.prices.run(), "prices")
        for refresh, what in (
            (self.adapters.refresh, "adapters"),
            (self.policies.refresh, "policies"),
            (self.engines.refresh, "engines"),
        ):
            self._run(refresh_on_change(self.key_cache, refresh, what), what)
        self._run(self.keeper.run(), "adapters-ready")
        self._run(HungEngines(self.router).run(), "hung-engines")
        self._run(self.limiter.run(), "leases")
        self._run(self._run_batches(), "batches")
        self._run(self.rejections.run(), "rejections")
        self.tasks.start()

    async def stop(self) -> None:
        self.pipeline.draining = True
        self.stopping.set()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.batches.stop()
        self.spool.flush()
        await self.router.close()
        for engine in self.router.engines():
            await engine.close()
        await self.limiter.close()
        await asyncio.to_thread(self.rejections.flush)
        await self.opinions.close()
        self.pipeline.moderator.close()
        self.spool.flush()
        await asyncio.to_thread(self.shipper.stop)
        await asyncio.to_thread(self.tasks.stop)
        self.spool.flush()
        self.recovery.close()
        self.spool.file.close(remove=self.spool.file.is_empty())
        await self.counters.close()
        self.database.close()

    async def readiness(self) -> dict[str, dict[str, Any]]:
        """Readiness per component: `ready`, and its state when it is not ready."""
        parts = self.engines.readiness()
        parts["spool"] = {"ready": True, "waiting": self.shipper.backlog()}
        parts["gateway"] = {"ready": not self.pipeline.draining}
        return parts

    async def _run_batches(self) -> None:
        """Start after recovery has read the spools of dead processes; batch lines that they had
        answered would otherwise run again."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self.recovery.first_round_done.wait(), _RECOVERY_TIMEOUT_S)
        await self.batches.run()

    def _run(self, work: Coroutine[Any, Any, None], name: str) -> None:
        self._tasks.append(asyncio.create_task(work, name=f"tollhouse-{name}"))


@dataclass(frozen=True)
class _Base:
    """What everything else is built on: settings, storage and engines."""

    settings: Settings
    clock: Clock
    token: str  # the operator's
    database: Database
    counters: Counters
    spool: Spool
    router: Router
    catalog: Catalog
    tracer: RequestTracer | None


@dataclass(frozen=True)
class _Views:
    """What the request path reads from memory, refreshed from the database."""

    key_cache: KeyCache
    prices: PriceList
    policies: PolicyView
    screener: Screener | None
    opinions: SecondOpinions
    rejections: RejectionCounter
    limiter: Limiter


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
    views = _build_views(base)
    pipeline = _build_pipeline(base, views, moderator)
    return _build_services(base, views, pipeline)


def _build_base(
    settings: Settings, clock: Clock, engines: Engines | None, tracer: "Tracer | None"
) -> _Base:
    token = operator_token(settings)
    database = Database(settings.effective_database_url)
    counters = make_counters(settings, clock)
    spool = Spool(SpoolFile(_spool_path(settings)))
    router = Router(clock, cold_start_s=settings.cold_start_s)
    if engines is None:
        engines = make_engines(
            settings,
            read_upstreams(settings.upstreams),
            lambda receipt: router.acknowledge_soon(receipt.request_id),
            router.index.apply,
            counters,
        )
    for name, clients in engines.clients.items():
        router.add(name, clients)
    return _Base(
        settings=settings,
        clock=clock,
        token=token,
        database=database,
        counters=counters,
        spool=spool,
        router=router,
        catalog=Catalog(engines.models),
        tracer=RequestTracer(tracer) if tracer is not None else None,
    )


def _build_views(base: _Base) -> _Views:
    settings, clock = base.settings, base.clock
    rejections = RejectionCounter(base.database, clock)
    guards = read_guards(settings.guards)
    return _Views(
        key_cache=KeyCache(base.database, clock),
        prices=PriceList(base.database, clock),
        policies=PolicyView(base.database),
        screener=Screener(load_classifier()) if settings.moderation == "on" else None,
        opinions=make_second_opinions(guards, base.catalog, base.router, clock),
        rejections=rejections,
        limiter=Limiter(
            base.counters,
            clock,
            when_down=settings.limits_when_redis_down,
            processes=settings.workers,
            max_in_flight=settings.max_in_flight,
            rejections=rejections,
        ),
    )


def _build_pipeline(base: _Base, views: _Views, moderator: Moderator | None) -> Pipeline:
    settings, clock = base.settings, base.clock
    decisions = DecisionLog(clock, record_secret(base.token), base.spool.note)
    moderator = moderator or make_moderator(
        views.screener, views.policies, clock, decisions, views.opinions
    )
    return Pipeline(
        auth=Authenticator(views.key_cache, FailedAttempts(base.counters, clock)),
        catalog=base.catalog,
        admission=Admission(views.limiter, views.prices, clock),
        moderator=moderator,
        router=base.router,
        fallbacks=Fallbacks(base.catalog, read_fallbacks(settings.fallbacks)),
        metering=MeterServices(base.spool, clock, base.router.acknowledge_soon),
        responses=Responses(moderator=moderator, rejections=views.rejections, clock=clock),
        clock=clock,
        limits=RequestLimits(settings.max_body_mb * 2**20, settings.request_timeout_s),
        operator_token=base.token,
        tracer=base.tracer,
    )


def _build_services(base: _Base, views: _Views, pipeline: Pipeline) -> Services:
    settings, clock, database, spool = base.settings, base.clock, base.database, base.spool
    usage_sink, payments = SqlUsageSink(database, clock), make_payments(settings)
    return Services(
        settings=settings,
        clock=clock,
        database=database,
        key_cache=views.key_cache,
        roles=Roles(database),
        operator_token=base.token,
        single_sign_on=(
            SingleSignOn(settings, clock, base.token) if settings.oidc_issuer else None
        ),
        counters=base.counters,
        limiter=views.limiter,
        rejections=views.rejections,
        catalog=base.catalog,
        adapters=CatalogRefresher(database, base.catalog),
        prices=views.prices,
        router=base.router,
        engines=EngineView(database, base.router),
        keeper=AdapterPreloader(base.router, base.catalog, database, clock),
        spool=spool,
        shipper=(
            Shipper(spool, base.tracer.usage_sink(usage_sink))
            if base.tracer is not None
            else Shipper(spool, usage_sink, _make_helper(settings, spool, clock))
        ),
        recovery=Recovery(
            spool.file.path.parent,
            spool.file.path,
            usage_sink,
            base.router,
            clock,
            longest_life_s=settings.request_timeout_s,
            on_settled=lambda event: views.limiter.settle_lost(
                event.tenant_id, event.request_id, views.prices.cost_of_event(event)
            ),
        ),
        pipeline=pipeline,
        tasks=make_tasks(settings, database, clock, payments),
        payments=payments,
        screener=views.screener,
        policies=views.policies,
        batches=BatchRunner(
            database,
            clock,
            pipeline.serve,
            batch_surfaces(),
            at_once=settings.batch_concurrency,
            max_line_bytes=settings.max_body_mb * 2**20,
        ),
        opinions=views.opinions,
    )


def make_counters(settings: Settings, clock: Clock) -> Counters:
    if settings.redis_url:
        return RedisCounters(settings.redis_url)
    if settings.workers > 1:
        raise SettingError(
            f"TOLLHOUSE_WORKERS is {settings.workers}, but without Redis each worker would count "
            "limits separately.",
            next_step="Set TOLLHOUSE_REDIS_URL, or run one worker.",
        )
    return MemoryCounters(clock)


def make_tasks(
    settings: Settings, database: Database, clock: Clock, payments: PaymentProvider
) -> Runner:
    if settings.broker_url:
        return NoRunner()
    context = TaskContext(settings, database, clock, {PaymentProvider: payments})
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
    return ProcessShipper(spool.file.path, url, settings.log_level, settings.log_format)


def _spool_path(settings: Settings) -> Path:
    return settings.data_dir / "spool" / f"{os.getpid()}-{secrets.token_hex(4)}.db"
