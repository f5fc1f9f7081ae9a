"""Keeps the catalog's adapters as the database has them, off the path."""

import asyncio
import logging
from collections import defaultdict

from sqlalchemy import select

from core.database import Database
from core.tenants.models import Adapter
from gateway.catalog import Catalog, NamedAdapter

log = logging.getLogger("tollhouse.catalog")
REFRESH_S = 1.0


class CatalogView:
    def __init__(self, database: Database, catalog: Catalog) -> None:
        self._database = database
        self._catalog = catalog

    def refresh(self) -> None:
        """Blocking; run in a thread. Also right after an adapter was added or removed."""
        found: dict[str, dict[str, NamedAdapter]] = defaultdict(dict)
        with self._database.read() as session:
            for row in session.scalars(select(Adapter).where(Adapter.removed_at.is_(None))):
                found[row.tenant_id][row.name] = NamedAdapter(
                    row.name, row.base_model, row.digest, row.path, row.created_at
                )
        self._catalog.set_adapters(found)

    async def run(self) -> None:
        while True:
            try:
                await asyncio.to_thread(self.refresh)
            except Exception as error:
                log.warning("adapters could not be refreshed, the known ones stay: %s", error)
            await asyncio.sleep(REFRESH_S)
