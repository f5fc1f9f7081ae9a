"""The dashboard's access to this gateway: engines, health, limits, adapters and dead letters."""

import threading
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

from anyio import from_thread
from starlette.responses import Response

from billing.invoicing import invoice_run
from billing.stores import Store, open_store
from core.clock import Clock
from core.counters import BucketRequest, Counters, Take
from core.database import Database
from core.errors import BadRequest, TollhouseError
from core.ids import new_id
from core.settings import Settings
from core.settings_in_force import SettingInForce, settings_in_force
from core.tenants import adapters
from core.tenants.plans import LimitRule, Scope, Unit
from core.tenants.scope import TenantScope
from dashboards.app import Asgi, create_dashboard
from dashboards.backend import (
    ComponentStatus,
    EngineView,
    LimitUsage,
    Upload,
    UpstreamChange,
    UpstreamPreview,
)
from dashboards.viewer import DashboardDeps
from gateway.admin.console import CommandContext
from gateway.admin.keys.routes import KeyNames, check_names
from gateway.admin.planning import service
from gateway.admin.planning.question import PlanOptions
from gateway.admin.stored_data.archives import download
from gateway.admin.stored_data.end_users import MOST_ERASURES
from gateway.admin.stored_data.stored_data import StoredData
from gateway.admin.worker.dead_tasks import replay, run_now
from gateway.catalog.adapter_archive import AdapterFiles
from gateway.catalog.adapter_registry import AdapterRegistry
from gateway.catalog.adapter_store import AdapterStore
from gateway.edge import own_metrics
from gateway.edge.auth.sign_on_directory import check_issuer
from gateway.edge.threads import Work, run_queued
from gateway.engines.reloading import UpstreamReload
from gateway.engines.routing.replicas import Replica
from gateway.engines.routing.router import Router
from gateway.metering.spool_watch import wait_until_shipped
from gateway.screening.policy_view import PolicyView
from gateway.serving.payments import CardPages, make_taxes
from gateway.serving.services import Services

CELERY_PREFIX = "tollhouse"
_AUDIT_WAIT_S = 20.0
_PRELOAD = 64.0  # as many requests as keep an adapter preloaded for five half-lives, 25 minutes
_ENGINE_STATES = {"ready": "healthy", "drained": "draining", "loading": "loading"}


@dataclass(frozen=True, kw_only=True)
class DashboardBackend:
    settings: Settings
    clock: Clock
    database: Database
    counters: Counters
    router: Router
    adapters: AdapterRegistry
    policies: PolicyView
    card_pages: CardPages
    spool_state: Callable[[], tuple[int, int]]  # records waiting, records parked
    is_draining: Callable[[], bool]
    refresh_engines: Callable[[], None]  # which are drained
    upstream_reload: UpstreamReload
    stored_data: StoredData
    paths: Callable[[], Collection[str]] = tuple  # of the API's routes

    def check_key(
        self, scope: TenantScope, scopes: Mapping[str, Any], routing: Mapping[str, Any]
    ) -> None:
        with self.database.read() as session:
            catalog = self.adapters.catalog
            check_names(session, scope, catalog, self.paths, KeyNames(scopes, routing))

    def engines(self) -> Sequence[EngineView]:
        models: dict[str, list[str]] = {}
        for model, replicas in self.router.models():
            for each in replicas:
                models.setdefault(each.name, []).append(model)
        return [
            _engine_view(each, ", ".join(models.get(each.name, ())))
            for each in self.router.replicas()
        ]

    def regions(self) -> Mapping[str, str]:
        return self.upstream_reload.regions()

    def base_models(self) -> Sequence[str]:
        return self.adapters.catalog.model_names()

    def check_issuer(self, url: str) -> None:
        check_issuer(url, self.settings.webhook_networks)

    def residency(self) -> Mapping[str, Mapping[str, int]]:
        result: dict[str, Counter[str]] = {}
        for client in self.router.engines():
            for each in list(client.adapters().values()):
                result.setdefault(each.digest, Counter())[each.state] += 1
        return result

    def plan(self, written: Mapping[str, str]) -> Mapping[str, Any]:
        return service.plan(PlanOptions.of(written), self.settings, self.database, self.clock)

    def parts(self) -> Sequence[ComponentStatus]:
        result = [_engine_part(each) for each in self.engines()]
        waiting, parked = self.spool_state()
        result.append(
            ComponentStatus(
                "spool",
                "bad" if parked else "good",
                f"{waiting} records waiting to be shipped, {parked} parked",
                "`tollhouse usage parked list` shows the reasons." if parked else "",
            )
        )
        if self.is_draining():
            result.append(
                ComponentStatus(
                    "gateway", "warn", "draining: running requests finish, new ones are refused"
                )
            )
        else:
            result.append(ComponentStatus("gateway", "good", "accepting requests"))
        return result

    def gauges(self) -> Mapping[str, Sequence[float]]:
        return own_metrics.gauges()

    def used(self, scope: TenantScope, rules: Sequence[LimitRule]) -> Sequence[LimitUsage]:
        """Reserves zero to read how full the buckets are. Call it from a worker thread."""
        tenant_rules = [
            r for r in rules if r.scope is Scope.TENANT and r.unit is not Unit.CONCURRENT
        ]
        takes = [
            Take(f"{r.name}:{scope.tenant_id}", r.limit, r.period_s * 1000, 0, 0)
            for r in tenant_rules
        ]
        if not takes:
            return []
        bucket_request = BucketRequest(scope.tenant_id, new_id("look"), 0, tuple(takes))
        try:
            answer = from_thread.run(self.counters.reserve, bucket_request)
        except TollhouseError:
            return []
        return [
            LimitUsage(
                rule.name, state.capacity - state.remaining, state.capacity, state.reset_ms / 1000
            )
            for rule, state in zip(tenant_rules, answer.buckets, strict=True)
        ]

    def add_adapter(self, scope: TenantScope, name: str, base: str, upload: Upload) -> None:
        adapters.check_name(name)
        base_model = self.adapters.base_model(base)
        with _uploaded(self.adapters.store, upload) as files:
            self.adapters.register(scope, name, base_model, files)

    def preload(self, digest: str) -> None:
        self.router.popularity.note(digest, _PRELOAD)

    def preview_upstreams(self) -> UpstreamPreview:
        found = self.upstream_reload.preview()
        changes = [
            UpstreamChange(each.upstream, each.model, each.change, ", ".join(each.fields))
            for each in found.changes
        ]
        return UpstreamPreview(found.file, found.digest, found.models, changes)

    def reload_upstreams(self, actor: str, digest: str) -> None:
        from_thread.run(self.upstream_reload.reload, actor, digest)

    def collects_by(self) -> str:
        payments = self.card_pages.payments
        return payments.name if payments.collects else ""

    def card_page(self, scope: TenantScope) -> str:
        return self.card_pages.link(scope)

    def portal_page(self, scope: TenantScope) -> str:
        return self.card_pages.portal(scope)

    def bank_instructions(self, scope: TenantScope) -> Sequence[tuple[str, str]]:
        return self.card_pages.bank_instructions(scope).rows

    def export_store(self, destination: str) -> Store:
        return open_store(destination, self.settings)

    def export_tenant(self, scope: TenantScope) -> Response:
        return from_thread.run(download, self.stored_data, scope)

    def erase_tenant(self, scope: TenantScope, confirm: str) -> None:
        work = partial(self.stored_data.erase_tenant, scope, confirm)
        from_thread.run(run_queued, Work.ERASURES, scope.tenant_id, MOST_ERASURES, work)

    def configuration(self) -> Sequence[SettingInForce]:
        return settings_in_force(self.settings)

    def changed(self) -> None:
        self.refresh_engines()
        self.policies.refresh()
        self.adapters.refresh()

    def finalise_invoices(self, tenant_id: str) -> Sequence[str]:
        wait_until_shipped(self.settings)
        taxes = make_taxes(self.settings, self.clock)
        return invoice_run.finalise_now(self.database, self.clock, tenant_id, taxes)

    def audit(self) -> bool:
        """Returns whether the audit has ended; with a broker, or after 20 s, it continues."""
        context = CommandContext(self.settings, self.clock, self.database)
        if self.settings.broker_url:
            run_now(context, "billing.audit", CELERY_PREFIX)
            return False
        thread = threading.Thread(target=run_now, args=(context, "billing.audit", CELERY_PREFIX))
        thread.start()
        thread.join(_AUDIT_WAIT_S)
        return not thread.is_alive()

    def replay(self, ids: Sequence[int]) -> int:
        context = CommandContext(self.settings, self.clock, self.database)
        return replay(context, ids, CELERY_PREFIX)


def _uploaded(store: AdapterStore, upload: Upload) -> AbstractContextManager[AdapterFiles]:
    if upload.archive is not None:
        return store.from_archive(upload.archive)
    if upload.config is not None and upload.weights is not None:
        return store.from_files(upload.config, upload.weights)
    raise BadRequest(
        "The form contains no adapter.",
        next_step="Choose an archive, or both files of a PEFT adapter (config and weights).",
        param="file",
    )


def _engine_view(replica: Replica, model: str) -> EngineView:
    client = replica.client
    stats, info = client.stats(), client.info()
    state = _ENGINE_STATES.get(replica.state(), "silent")
    if stats is None:
        return EngineView(client.engine_id, model, state)
    if stats.draining:
        state = "draining"
    adapters = list(client.adapters().values())
    return EngineView(
        client.engine_id,
        model,
        state,
        stats.running,
        stats.waiting,
        stats.tokens_waiting,
        stats.blocks_total - stats.blocks_free,
        stats.blocks_total,
        Counter(each.state for each in adapters),
        [(each.digest, each.state) for each in adapters],
        info.block_size if info is not None else 0,
    )


def _engine_part(each: EngineView) -> ComponentStatus:
    summary = f"{each.model or 'no model yet'}, {each.running} running, {each.waiting} waiting"
    if each.state == "healthy":
        return ComponentStatus(f"engine {each.engine_id}", "good", summary)
    state = "warn" if each.state in ("draining", "loading") else "bad"
    return ComponentStatus(
        f"engine {each.engine_id}",
        state,
        each.state,
        "See the engine's log, or run `tollhouse doctor`.",
    )


def make_backend(
    services: Services, paths: Callable[[], Collection[str]] = tuple
) -> DashboardBackend:
    return DashboardBackend(
        settings=services.settings,
        clock=services.clock,
        database=services.database,
        counters=services.counters,
        router=services.router,
        adapters=services.adapters,
        policies=services.policies,
        card_pages=services.card_pages,
        spool_state=services.spool_state,
        is_draining=lambda: services.pipeline.draining,
        refresh_engines=services.engines.refresh,
        paths=paths,
        upstream_reload=services.upstream_reload,
        stored_data=StoredData.of(
            services.database, services.settings, services.clock, services.operator_token
        ),
    )


def make_dashboard(services: Services, paths: Callable[[], Collection[str]] = tuple) -> Asgi:
    settings = services.settings
    return create_dashboard(
        DashboardDeps(
            services.database,
            services.clock,
            services.dashboard_auth,
            lambda scope: services.catalog.names(scope.tenant_id),
            make_backend(services, paths),
            services.alert_targets,
            four_eyes_above=settings.four_eyes_above,
            secure_cookies=settings.public_url.startswith("https://"),
            single_sign_on=bool(settings.oidc_issuer),
            public_url=settings.public_url,
            tasks_since=None if settings.broker_url else services.clock.now(),
        )
    )
