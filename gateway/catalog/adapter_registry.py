"""Registers and removes the adapters of tenants, and shows the change to this process's catalog."""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sqlalchemy import select

from core import metrics
from core.clock import Clock
from core.database import Database
from core.errors import ModelNotFound
from core.storage import StorageQuotas
from core.tenants import adapters
from core.tenants.limits import plan_of
from core.tenants.models import Adapter, Tenant
from core.tenants.scope import TenantScope
from gateway.catalog.adapter_archive import AdapterFiles
from gateway.catalog.adapter_store import AdapterStore
from gateway.catalog.catalog import Catalog, NamedAdapter

log = logging.getLogger("tollhouse.catalog")
_writing: set[asyncio.Future[None]] = set()


@dataclass(frozen=True, kw_only=True)
class AdapterRegistry:
    """Its methods block; call them in a thread."""

    database: Database
    clock: Clock
    catalog: Catalog
    store: AdapterStore
    quotas: StorageQuotas
    refresh: Callable[[], None]  # of the catalog

    def base_model(self, name: str) -> str:
        """The base model called `name`; with an empty name, the only model served."""
        known = self.catalog.model_names()
        if not name and len(known) == 1:
            return known[0]
        if name not in known:
            raise ModelNotFound(
                f"There is no base model {name[:120]!r}; there are: {', '.join(known) or 'none'}.",
                next_step="Set base_model to one of them.",
                param="base_model",
            )
        return name

    def register(
        self, scope: TenantScope, name: str, base_model: str, files: AdapterFiles
    ) -> dict[str, Any]:
        """The adapter as the API shows it. InsufficientQuota if the plan has no room for its files.
        An upload's files are kept only if it is accepted."""
        model = self.catalog.served(base_model)
        if model is not None and model.parameters is None:
            files.check_served(model.spec)
        with self.store.locked(scope.tenant_id):
            kept = self.store.keep(scope.tenant_id, files)
            try:
                shown = self._register(scope, name, base_model, kept)
            except Exception:
                self._discard(scope, files.digest)
                raise
        self.refresh()
        return shown

    def _register(
        self, scope: TenantScope, name: str, base_model: str, files: AdapterFiles
    ) -> dict[str, Any]:
        with self.database.transaction() as session:
            if not adapters.is_registered(session, scope, files.digest):
                plan = plan_of(session, session.get_one(Tenant, scope.tenant_id))
                self.quotas.check(session, scope.tenant_id, plan, files.bytes)
            adapter = adapters.register(
                session,
                scope,
                self.clock,
                name=name,
                base_model=base_model,
                digest=files.digest,
                path=self.store.stored_path(files),
                rank=files.rank,
                bytes=files.bytes,
            )
            return adapters.describe(adapter)

    def quarantine_soon(self, adapter: NamedAdapter, reason: str) -> None:
        """From the event loop: at once in this process, and soon in the database."""
        if adapter.quarantined or not self.catalog.usable(adapter.digest):
            return
        self.catalog.quarantine(adapter.digest, reason)
        metrics.adapters_quarantined.inc()
        writing = asyncio.ensure_future(asyncio.to_thread(self.quarantine, adapter.digest, reason))
        _writing.add(writing)
        writing.add_done_callback(_written)

    def quarantine(self, digest: str, reason: str) -> None:
        """Of all tenants that have these weights."""
        with self.database.transaction() as session:
            adapters.quarantine(session, self.clock, digest, reason)

    def release(self, digest: str, actor: str) -> list[dict[str, Any]]:
        """Let these weights be used again."""
        with self.database.transaction() as session:
            rows = adapters.release(session, self.clock, digest, actor)
            shown = [adapters.describe(row) for row in rows]
        self.refresh()
        return shown

    def remove(self, scope: TenantScope, name: str) -> dict[str, Any]:
        with self.database.transaction() as session:
            removed = adapters.remove(session, scope, self.clock, name)
            shown = adapters.describe(removed)
        self.refresh()
        with self.store.locked(scope.tenant_id):
            self._discard(scope, removed.digest)
        return shown

    def _discard(self, scope: TenantScope, digest: str) -> None:
        """Delete uploaded files that no adapter of the tenant names. Inside the store's lock."""
        with self.database.read() as session:
            if adapters.is_registered(session, scope, digest):
                return
        self.store.discard(scope.tenant_id, digest)


def _written(writing: "asyncio.Future[None]") -> None:
    _writing.discard(writing)
    if not writing.cancelled() and (error := writing.exception()) is not None:
        log.error("a quarantine could not be stored, and ends with this process: %s", error)


class CatalogRefresher:
    def __init__(self, database: Database, catalog: Catalog, store: AdapterStore) -> None:
        self._database = database
        self._store = store
        self._catalog = catalog

    def refresh(self) -> None:
        """Blocks; run it in a thread. Also called right after an adapter is added or removed."""
        adapters: dict[str, dict[str, NamedAdapter]] = defaultdict(dict)
        with self._database.read() as session:
            for row in session.scalars(select(Adapter).where(Adapter.removed_at.is_(None))):
                adapters[row.tenant_id][row.name] = NamedAdapter(
                    row.name,
                    row.base_model,
                    row.digest,
                    self._store.found_path(row.path, row.tenant_id, row.digest),
                    row.created_at,
                    row.quarantine_reason,
                )
        self._catalog.set_adapters(adapters)
