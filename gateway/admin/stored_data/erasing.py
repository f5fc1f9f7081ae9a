"""The erasure of a whole tenant: what it stored goes, and the books stay as the law asks."""

import logging
import math
import shutil
from dataclasses import dataclass
from typing import Any

from sqlalchemy import delete, func, literal, null, or_, select, tuple_, update
from sqlalchemy.orm import Session

from billing import guards
from billing.archive.erasing import erase_moved
from billing.organisations.tables import OrganisationLink
from billing.usage import origin_rollups
from billing.usage.tables import ParkedEvent, UsageBatch
from core.clock import Clock
from core.database import Database
from core.errors import BadRequest, Conflict
from core.settings import Settings
from core.tenants import audit, organisations
from core.tenants.models import AuditEntry, Tenant
from core.tenants.scope import TenantScope
from engine.tiers.disk import DiskTier
from engine.tiers.open import open_remote
from engine.tiers.tier import Tier, owner_folder
from gateway.admin.stored_data.journal import DONE, Erasure, Journal
from gateway.admin.stored_data.tables import (
    FATES,
    Deleted,
    Emptied,
    Kept,
    names_of_tenants,
    of_tenant,
    table_of,
)

log = logging.getLogger("tollhouse.erasures")
_AT_ONCE = 500  # rows of a transaction
_UNBOUNDED = 1 << 62
CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class TenantErasure:
    database: Database
    settings: Settings
    clock: Clock
    journal: Journal

    def run(self, scope: TenantScope, confirm: str) -> dict[str, int]:
        """Rows that were deleted or emptied, by table. Conflict unless the tenant is closed and nothing
        of it waits. After an interruption, call it again."""
        with self.database.read() as session:
            tenant = organisations.get_tenant(session, scope)
            if confirm not in (tenant.name, tenant.id):
                raise BadRequest(
                    f"The confirmation {confirm[:80]!r} is not the tenant's name.",
                    next_step=f"Give {tenant.name!r}: its erasure cannot be undone.",
                    param="confirm",
                )
            _require_ended(session, tenant)
        return self.apply(scope, self.journal.note(self.clock, scope.tenant_id, None))

    def apply(self, scope: TenantScope, noted: Erasure) -> dict[str, int]:
        """As the journal has it, also of a tenant that a restored database has open."""
        tenant_id = scope.tenant_id
        with self.database.transaction() as session:
            tenant = organisations.get_tenant(session, scope)
            if tenant.status != CLOSED:
                organisations.change_tenant(session, scope, self.clock, status=CLOSED)
        with self.database.transaction() as session:
            done = {"moved_events": erase_moved(session, tenant_id, None)}
        done["usage_events"] = self._empty_events(tenant_id)
        with self.database.transaction() as session:
            _wait_for_sums(session)
            # Days that were moved before their events were emptied.
            done["moved_events"] += erase_moved(session, tenant_id, None)
            origin_rollups.forget(session, scope, None)
        for name in reversed(names_of_tenants()):
            if isinstance(FATES[name], Deleted):
                done[name] = self._delete(name, tenant_id)
        with self.database.transaction() as session:
            _rename(session, tenant_id)
            done["audit_log"] = _empty_log(session, tenant_id)
            self.journal.done(session, scope, self.clock, noted)
            audit.record(
                session, scope, self.clock, "tenant.erase", tenant_id, before=None, after=done
            )
        self._erase_files(tenant_id)
        return {name: count for name, count in done.items() if count}

    def _delete(self, name: str, tenant_id: str) -> int:
        table, deleted = table_of(name), 0
        key = list(table.primary_key.columns)
        rows = select(*key).where(of_tenant(name, tenant_id)).limit(_AT_ONCE)
        while True:
            with self.database.transaction() as session:
                found = [tuple(row) for row in session.execute(rows)]
                if not found:
                    return deleted
                session.execute(delete(table).where(tuple_(*key).in_(found)))
                deleted += len(found)

    def _empty_events(self, tenant_id: str) -> int:
        table, fate = table_of("usage_events"), FATES["usage_events"]
        assert isinstance(fate, Emptied)
        columns = [table.c[name] for name in fate.columns]
        full = or_(*(column.is_not(None) for column in columns))
        rows = select(table.c.request_id).where(of_tenant("usage_events", tenant_id), full)
        emptied = 0
        while True:
            with self.database.transaction() as session:
                found = session.scalars(rows.limit(_AT_ONCE)).all()
                if not found:
                    return emptied
                with guards.open_for_update(session, table.name):
                    session.execute(
                        update(table)
                        .where(table.c.request_id.in_(found))
                        .values(dict.fromkeys(fate.columns))
                    )
                emptied += len(found)

    def _erase_files(self, tenant_id: str) -> None:
        """Adapters, exports to the tenant's own folder, and copies of cached prompts."""
        exports = self.settings.export_dir or self.settings.data_dir / "exports"
        for folder in (
            self.settings.data_dir / "adapters" / tenant_id,
            exports / "tenants" / tenant_id,
        ):
            shutil.rmtree(folder, ignore_errors=True)
            if folder.exists():
                log.error("%s cannot be deleted: delete it by hand", folder)
        erase_copies(self.settings, tenant_id)


def _require_ended(session: Session, tenant: Tenant) -> None:
    if tenant.status != CLOSED:
        raise Conflict(
            f"{tenant.name} is {tenant.status}.",
            next_step=f"Close it first: tollhouse tenant set --tenant {tenant.name} --status closed",
        )
    children = session.scalar(
        select(func.count())
        .select_from(OrganisationLink)
        .where(OrganisationLink.parent_id == tenant.id)
    )
    if children:
        raise Conflict(
            f"{tenant.name} is the parent of {children} organisations.",
            next_step="Move them to another parent, or out of it, first.",
        )
    parked = session.scalar(
        select(func.count())
        .select_from(ParkedEvent)
        .where(ParkedEvent.tenant_id == tenant.id, ParkedEvent.released_at.is_(None))
        .where(ParkedEvent.dismissed_by.is_(None))
    )
    if parked:
        raise Conflict(
            f"{parked} usage events of {tenant.name} are parked and not in the books.",
            next_step="Release or dismiss them first: tollhouse usage parked list",
        )


def _wait_for_sums(session: Session) -> None:
    """What is summed at this moment may have read names and labels before the events lost them."""
    waiting = select(UsageBatch.id).where(UsageBatch.summed_at.is_(None)).order_by(UsageBatch.id)
    session.execute(waiting.with_for_update()).all()


def _rename(session: Session, tenant_id: str) -> None:
    table, projects = table_of("tenants"), table_of("projects")
    name = f"erased-{tenant_id.rpartition('_')[2].lower()}"
    session.execute(
        update(table)
        .where(table.c.id == tenant_id)
        .values(name=name, display_name=name, settings=literal({}, table.c.settings.type))
    )
    session.execute(
        update(projects)
        .where(projects.c.tenant_id == tenant_id)
        .values(name=projects.c.id, label_keys=literal([], projects.c.label_keys.type))
    )
    session.expire_all()


def _empty_log(session: Session, tenant_id: str) -> int:
    own = (AuditEntry.tenant_id == tenant_id, AuditEntry.action != DONE)
    with guards.open_for_update(session, AuditEntry.__tablename__):
        done: Any = session.execute(
            update(AuditEntry)
            .where(*own)
            .values(before=null(), after=null(), target="", salt="")
            .execution_options(synchronize_session=False)
        )
    return int(done.rowcount)


def kept() -> dict[str, str]:
    """Tables whose rows stay, wholly or without names, and why."""
    return {
        name: fate.why for name, fate in sorted(FATES.items()) if isinstance(fate, Kept | Emptied)
    }


def erase_copies(settings: Settings, tenant_id: str) -> dict[str, object]:
    """Copies of cached prompts; returns where they were. An engine that runs finds them gone; what its
    own memory holds goes when it is evicted, or with the process."""
    folders = sorted((settings.data_dir / "kv-tier").glob("engine-*"))
    tiers: list[Tier] = [DiskTier(each, _UNBOUNDED, math.inf) for each in folders]
    found = [str(each) for each in folders]
    for place, url in (("Redis", settings.kv_tier_redis_url), ("S3", settings.kv_tier_s3_url)):
        if url:
            tiers.append(open_remote(url, 1.0))
            found.append(place)
    for tier in tiers:
        tier.erase(owner_folder(tenant_id))
        tier.close()
    return {"tenant": tenant_id, "places": found}
