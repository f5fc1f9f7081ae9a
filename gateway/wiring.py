"""The composition root: builds the services from the settings. The only file that knows embedded
from production.
"""

import asyncio
import logging
import os
import secrets
from collections.abc import Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from core.clock import Clock, SystemClock
from core.counters import Counters
from core.counters_memory import MemoryCounters
from core.database import Database
from core.settings import Settings
from core.tenants.keyring import Keyring
from gateway.admission import Admission, OpenAdmission
from gateway.attempts import FailedAttempts
from gateway.auth import Authenticator
from gateway.books import SqlBooks
from gateway.catalog import Catalog, ServedModel
from gateway.engines.base import EngineClient
from gateway.key_watch import watch_keys
from gateway.pipeline import Limits, Pipeline
from gateway.recovery import Recovery
from gateway.routing import Router
from gateway.safety import NoSafetyDesk, SafetyDesk
from gateway.shipper import Shipper
from gateway.spool import Spool, SpoolFile

log = logging.getLogger("tollhouse.wiring")
CONNECT_S = 120.0


@dataclass
class Services:
    """Everything that a gateway process runs on."""

    settings: Settings
    clock: Clock
    database: Database
    keyring: Keyring
    counters: Counters
    catalog: Catalog
    router: Router
    spool: Spool
    shipper: Shipper
    recovery: Recovery
    pipeline: Pipeline
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)

    async def start(self) -> None:
        self.spool.bind(asyncio.get_running_loop())
        self.shipper.start()
        for engine in self.router.engines():
            await engine.start()
        self._run(watch_keys(self.keyring, self.stopping), "keys")
        self._run(self.recovery.run(), "recovery")

    async def stop(self) -> None:
        self.pipeline.draining = True
        self.stopping.set()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for engine in self.router.engines():
            await engine.close()
        self.spool.flush()
        await asyncio.to_thread(self.shipper.stop)
        self.spool.flush()
        self.recovery.close()
        self.spool.file.close(remove=self.spool.file.is_empty())
        await self.counters.close()
        self.database.close()

    async def readiness(self) -> dict[str, dict[str, Any]]:
        """Each part: whether it is ready, and what it is doing if not."""
        engines = list(self.router.engines())
        parts = {f"engine {each.engine_id}": {"ready": each.healthy()} for each in engines}
        parts["gateway"] = {"ready": not self.pipeline.draining}
        return parts

    def _run(self, work: Coroutine[Any, Any, None], name: str) -> None:
        self._tasks.append(asyncio.create_task(work, name=f"tollhouse-{name}"))


def build(
    settings: Settings,
    *,
    clock: Clock | None = None,
    engines: dict[str, list[EngineClient]],
    models: list[ServedModel],
    admission: Admission | None = None,
    safety: SafetyDesk | None = None,
) -> Services:
    clock = clock or SystemClock()
    database = Database(settings.effective_database_url)
    keyring = Keyring(database, clock)
    counters = MemoryCounters(clock)
    catalog = Catalog(models)
    router = Router(engines)
    spool = Spool(SpoolFile(_spool_path(settings)))
    books = SqlBooks(database, clock)
    recovery = Recovery(
        spool.file.path.parent,
        spool.file.path,
        books,
        router,
        clock,
        longest_life_s=settings.request_timeout_s,
    )
    pipeline = Pipeline(
        auth=Authenticator(keyring, FailedAttempts(counters, clock)),
        catalog=catalog,
        admission=admission or OpenAdmission(),
        safety=safety or NoSafetyDesk(),
        router=router,
        spool=spool,
        clock=clock,
        limits=Limits(settings.max_body_mb * 2**20, settings.request_timeout_s),
    )
    return Services(
        settings=settings,
        clock=clock,
        database=database,
        keyring=keyring,
        counters=counters,
        catalog=catalog,
        router=router,
        spool=spool,
        shipper=Shipper(spool, books),
        recovery=recovery,
        pipeline=pipeline,
    )


def _spool_path(settings: Settings) -> Path:
    return settings.data_dir / "spool" / f"{os.getpid()}-{secrets.token_hex(4)}.db"
