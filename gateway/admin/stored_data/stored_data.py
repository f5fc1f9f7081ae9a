"""What the route, the command, the page and `tollhouse recover` call: exports and erasures of what is
stored of a tenant."""

from dataclasses import dataclass
from io import RawIOBase
from typing import IO

from core.clock import Clock
from core.database import Database
from core.sealing import Sealer
from core.settings import Settings
from core.tenants.scope import TenantScope, scope_of_operator
from gateway.admin.stored_data.end_users import EndUserErasure
from gateway.admin.stored_data.erasing import TenantErasure
from gateway.admin.stored_data.exporting import TenantExport
from gateway.admin.stored_data.journal import Journal


@dataclass(frozen=True, slots=True)
class StoredData:
    database: Database
    settings: Settings
    clock: Clock
    journal: Journal

    @classmethod
    def of(
        cls, database: Database, settings: Settings, clock: Clock, operator_token: str
    ) -> "StoredData":
        return cls(database, settings, clock, Journal(settings, Sealer(operator_token)))

    def export(self, scope: TenantScope, target: IO[bytes] | RawIOBase) -> dict[str, int]:
        """Writes a ZIP archive; returns the rows of each table in it."""
        return TenantExport(self.database, self.settings, self.journal.sealer).write(scope, target)

    def erase_end_user(self, scope: TenantScope, end_user: str) -> dict[str, int]:
        return EndUserErasure(self.database, self.clock, self.journal).run(scope, end_user)

    def erase_tenant(self, scope: TenantScope, confirm: str) -> dict[str, int]:
        return self._tenants().run(scope, confirm)

    def erase_again(self) -> tuple[list[str], list[str]]:
        """After a restore: what came back is erased again. One line for each, and the ids of those that
        cannot be read, because they were sealed with another operator token."""
        with self.database.read() as session:
            pending, unreadable = self.journal.pending(session)
        again = []
        for noted in pending:
            scope = scope_of_operator(noted.tenant_id, "recover")
            if noted.end_user is None:
                self._tenants().apply(scope, noted)
            else:
                EndUserErasure(self.database, self.clock, self.journal).apply(scope, noted)
            what = "the tenant" if noted.end_user is None else "an end user"
            again.append(f"{what} of {noted.tenant_id}, erased at {noted.at:%Y-%m-%d %H:%M} UTC")
        return again, unreadable

    def _tenants(self) -> TenantErasure:
        return TenantErasure(self.database, self.settings, self.clock, self.journal)
