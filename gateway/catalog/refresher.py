"""Refreshes the catalog's adapters from the database in the background."""

from collections import defaultdict

from sqlalchemy import select

from core.database import Database
from core.tenants.models import Adapter
from gateway.catalog.catalog import Catalog, NamedAdapter


class CatalogRefresher:
    def __init__(self, database: Database, catalog: Catalog) -> None:
        self._database = database
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
                    row.path,
                    row.created_at,
                    row.quarantine_reason,
                )
        self._catalog.set_adapters(adapters)
