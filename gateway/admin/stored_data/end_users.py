"""The erasure of an end user in every store of the gateway, as the route and the command do it."""

from dataclasses import dataclass

from billing.archive.erasure import erase_end_user as erase_name
from core.clock import Clock
from core.database import Database
from core.erasures import erase_end_user as erase_texts
from core.errors import BadRequest
from core.tenants.organisations import erase_cached_responses
from core.tenants.scope import TenantScope
from gateway.admin.stored_data.journal import Erasure, Journal

MOST_ERASURES = 4  # of a tenant, running and waiting, in a process


@dataclass(frozen=True, slots=True)
class EndUserErasure:
    database: Database
    clock: Clock
    journal: Journal

    def run(self, scope: TenantScope, end_user: str) -> dict[str, int]:
        """What was erased, by kind. BadRequest for an empty name."""
        if not end_user:
            raise BadRequest("end_user is empty.", next_step="Name the end user.", param="end_user")
        return self.apply(scope, self.journal.note(self.clock, scope.tenant_id, end_user))

    def apply(self, scope: TenantScope, noted: Erasure) -> dict[str, int]:
        """As the journal has it. Cached answers do not say whose they are, so those of the whole tenant
        go."""
        name = noted.end_user or ""
        with self.database.transaction() as session:
            usage = erase_name(session, scope, self.clock, name)
        texts = erase_texts(self.database, scope, self.clock, self.journal.sealer, name)
        with self.database.transaction() as session:
            erase_cached_responses(session, scope, self.clock)
            self.journal.done(session, scope, self.clock, noted)
        return {**usage.describe(), **texts}
