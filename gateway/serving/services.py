"""The services of one gateway process: their start, their readiness and their shutdown."""

import asyncio
import os
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from billing.notices.alert_targets import AlertTargets
from billing.payments.base import PaymentProvider
from core import tallies
from core.clock import Clock
from core.counters import Counters
from core.database import Database
from core.settings import NEEDS, Settings
from core.storage import StorageQuotas
from core.tenants.key_cache import KeyCache
from core.tenants.roles import Roles
from gateway.admission.limiter import Limiter
from gateway.admission.prices import PriceList
from gateway.admission.rejections import RejectionCounter
from gateway.catalog.adapter_registry import AdapterRegistry
from gateway.catalog.catalog import Catalog
from gateway.edge.auth.dashboard_auth import DashboardAuth
from gateway.edge.auth.sign_on_directory import SignOnDirectory
from gateway.edge.refresh import refresh_on_change
from gateway.engines.reloading import UpstreamReload
from gateway.engines.routing.adapter_preloader import AdapterPreloader
from gateway.engines.routing.engine_view import EngineView
from gateway.engines.routing.hung_engines import HungEngines
from gateway.engines.routing.router import Router
from gateway.metering.recovery import Recovery
from gateway.metering.shipper import Shipper
from gateway.metering.spool import Spool
from gateway.metering.streams.base import UsageStream
from gateway.screening.policy_view import PolicyView
from gateway.screening.second_opinions import SecondOpinions
from gateway.serving.background.responses import BackgroundResponses
from gateway.serving.batches.runner import BatchRunner
from gateway.serving.payments import CardPages
from gateway.serving.pipeline import Pipeline
from gateway.serving.running_rights import RunningRights, watch_keys
from gateway.tasks import Runner
from moderation.screener import Screener

_RECOVERY_TIMEOUT_S = 60.0
_FOLD_S = 1.0
_SILENT_S = 3.0  # without an answer of the database, which is asked every 0.4 s


@dataclass
class Services:
    settings: Settings
    clock: Clock
    database: Database
    access_database: Database  # connections of their own for keys and idempotency
    storage: StorageQuotas
    key_cache: KeyCache
    roles: Roles
    operator_token: str
    dashboard_auth: DashboardAuth
    sign_on: SignOnDirectory
    counters: Counters
    limiter: Limiter
    rejections: RejectionCounter
    catalog: Catalog
    adapters: AdapterRegistry
    prices: PriceList
    router: Router
    engines: EngineView
    upstream_reload: UpstreamReload
    preloader: AdapterPreloader
    spool: Spool
    stream: UsageStream | None
    shipper: Shipper
    recovery: Recovery
    pipeline: Pipeline
    tasks: Runner
    payments: PaymentProvider
    card_pages: CardPages
    screener: Screener | None
    policies: PolicyView
    opinions: SecondOpinions
    batches: BatchRunner
    background: BackgroundResponses
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
        await asyncio.to_thread(self.pipeline.responses.request_log.view.refresh)
        await asyncio.to_thread(self.engines.refresh)
        rights = RunningRights(self.database, self.clock, self.pipeline.responses.deadlines)
        self._run(watch_keys(self.key_cache, rights, self.stopping), "keys")
        self._run(self.recovery.run(), "recovery")
        self._run(self.prices.run(), "prices")
        for refresh, what in (
            (self.adapters.refresh, "adapters"),
            (self.policies.refresh, "policies"),
            (self.pipeline.responses.request_log.view.refresh, "request-log"),
            (self.engines.refresh, "engines"),
        ):
            self._run(refresh_on_change(self.key_cache, refresh, what), what)
        self._run(self.upstream_reload.run(self.key_cache), "upstreams")
        self._run(self.preloader.run(), "adapters-ready")
        self._run(HungEngines(self.router).run(), "hung-engines")
        self._run(self.limiter.run(), "leases")
        self._run(self._run_batches(), "batches")
        self._run(self.background.run(), "background-responses")
        self._run(self.rejections.run(), "rejections")
        self._run(self.pipeline.cache.run(), "response-cache")
        self._run(self.pipeline.responses.request_log.run(), "request-log")
        if os.environ.get("PROMETHEUS_MULTIPROC_DIR"):
            self._run(_fold_metrics(), "metrics")
        self.tasks.start()

    async def stop(self) -> None:
        self.pipeline.draining = True
        self.stopping.set()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.batches.stop()
        await self.background.stop()
        await self.pipeline.responses.request_log.close()
        self.spool.flush()
        await self.upstream_reload.close()
        await self.router.close()
        for engine in self.router.engines():
            await engine.close()
        await self.limiter.close()
        await asyncio.to_thread(self.rejections.flush)
        await self.opinions.close()
        self.pipeline.moderator.close()
        self.spool.flush()
        await asyncio.to_thread(self.shipper.stop)
        if self.stream is not None:
            await asyncio.to_thread(self.stream.close)
        await asyncio.to_thread(self.tasks.stop)
        self.spool.flush()
        self.recovery.close()
        self.spool.file.close(remove=self.spool.file.is_empty())
        await self.counters.close()
        self.database.close()
        self.access_database.close()
        tallies.fold_all()

    @property
    def alert_targets(self) -> AlertTargets:
        return AlertTargets(self.settings.webhook_networks, bool(self.settings.smtp_url))

    async def readiness(self) -> dict[str, dict[str, Any]]:
        """Each component: `ready`, its state, and whether it is `needed` for the verdict."""
        parts = self.engines.readiness()
        has_room = self.spool.file.has_room()
        parts["spool"] = {"ready": has_room, "needed": False, "waiting": self.shipper.backlog()}
        parts["disk"] = {
            "ready": has_room,
            "state": "has room"
            if has_room
            else "too full to record usage: free TOLLHOUSE_DATA_DIR",
        }
        polled_s = self.key_cache.polled_s_ago()
        answers = polled_s is not None and polled_s < _SILENT_S
        parts["database"] = {
            "ready": answers,
            "state": "answers" if answers else "does not answer; known keys are served",
        }
        counted = not getattr(self.counters, "down", False)
        if self.settings.redis_url:
            mode = f"does not answer; limits are {self.settings.limits_when_redis_down}"
            parts["redis"] = {"ready": counted, "state": "answers" if counted else mode}
        admits = counted or self.settings.limits_when_redis_down != "closed"
        models = self.engines.served_models()
        parts["serving"] = {
            "ready": bool(models) and has_room and admits and not self.pipeline.draining,
            "models": models,
        }
        for name in NEEDS:
            if name in parts:
                parts[name]["needed"] = name in self.settings.ready_needs
        parts["gateway"] = {"ready": not (self.pipeline.draining or self.pipeline.leaving)}
        return parts

    def spool_state(self) -> tuple[int, int]:
        """(records waiting to be shipped, records parked)."""
        return self.shipper.backlog(), self.spool.file.parked() + self.recovery.parked()

    async def _run_batches(self) -> None:
        """Start after recovery has read the spools of dead processes; batch lines that they had
        answered would otherwise run again."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self.recovery.first_round_done.wait(), _RECOVERY_TIMEOUT_S)
        await self.batches.run()

    def _run(self, work: Coroutine[Any, Any, None], name: str) -> None:
        self._tasks.append(asyncio.create_task(work, name=f"tollhouse-{name}"))


async def _fold_metrics() -> None:
    """Where several processes share their metrics, a scrape reads what each of them has folded."""
    while True:
        await asyncio.sleep(_FOLD_S)
        tallies.fold_all()
