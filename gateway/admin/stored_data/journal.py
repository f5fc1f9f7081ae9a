"""The journal of erasures, kept beside the marks outside the database: a restored database has again what
was erased since its backup, and the journal says what.

A name is sealed with the operator's token. An entry is written before its erasure and is applied once the
audit log has it, so that what a crash interrupts is found, too.
"""

import json
import logging
from base64 import b64decode, b64encode
from dataclasses import dataclass
from datetime import datetime, timedelta

from sqlalchemy import select
from sqlalchemy.orm import Session

from billing.recovery import places
from billing.recovery.places import Place
from core.clock import Clock
from core.errors import DependencyDown, NotFound
from core.ids import new_id
from core.sealing import Sealer
from core.settings import Settings
from core.tenants import audit
from core.tenants.models import AuditEntry, Tenant
from core.tenants.scope import TenantScope

log = logging.getLogger("tollhouse.erasures")
FOLDER = "erasures"
DONE = "erasure.done"
_ID = "erasure"
_AT_ONCE = 500


@dataclass(frozen=True, slots=True)
class Erasure:
    """Of an end user, or of the whole tenant where the name is None."""

    id: str
    tenant_id: str
    at: datetime
    end_user: str | None

    @property
    def file(self) -> str:
        return f"{FOLDER}/{self.at:%Y%m%dT%H%M%S}-{self.id}.json"


@dataclass(frozen=True, slots=True)
class Journal:
    settings: Settings
    sealer: Sealer

    def note(self, clock: Clock, tenant_id: str, end_user: str | None) -> Erasure:
        """Raises DependencyDown if no place takes it: the erasure would not outlive a restore."""
        made = Erasure(new_id(_ID), tenant_id, clock.now(), end_user)
        said = json.dumps({"end_user": end_user}).encode()
        body = {
            "id": made.id,
            "tenant_id": tenant_id,
            "at": made.at.isoformat(),
            "sealed": b64encode(self.sealer.seal(tenant_id, made.id, said)).decode(),
        }
        failed: list[Exception] = []
        every = self._places()
        for place in every:
            try:
                place.write(made.file, json.dumps(body).encode())
                self._drop_old(place, made.at)
            except Exception as error:
                log.error("erasure %s cannot be kept outside the database: %s", made.id, error)
                failed.append(error)
        if len(failed) == len(every):
            raise DependencyDown(
                f"The erasure cannot be noted outside the database: {failed[0]}. Nothing was erased.",
                next_step="Make the data directory or TOLLHOUSE_RESTORE_STORE writable, and repeat it.",
            )
        return made

    def done(self, session: Session, scope: TenantScope, clock: Clock, noted: Erasure) -> None:
        """In the audit log, by its id alone."""
        audit.record(session, scope, clock, DONE, noted.id, before=None, after=None)

    def pending(self, session: Session) -> tuple[list[Erasure], list[str]]:
        """Erasures that this database does not have, earliest first, and the ids of those that were
        sealed with another operator token."""
        places = {name: place for place in self._places() for name in _names(place)}
        missing = {_id(name): name for name in sorted(places)}
        done = select(AuditEntry.target).where(AuditEntry.action == DONE)
        for target in session.scalars(done.execution_options(yield_per=_AT_ONCE)):
            missing.pop(target, None)
        pending: list[Erasure] = []
        unreadable: list[str] = []
        for name in missing.values():
            body = places[name].read(name)
            if body is None:
                continue
            written = json.loads(body)
            if session.get(Tenant, written["tenant_id"]) is None:
                continue
            try:
                pending.append(self._opened(written))
            except NotFound:
                unreadable.append(str(written["id"]))
        return pending, unreadable

    def _opened(self, written: dict[str, str]) -> Erasure:
        tenant_id, sealed = written["tenant_id"], b64decode(written["sealed"])
        said = json.loads(self.sealer.open(tenant_id, written["id"], sealed))
        at = datetime.fromisoformat(written["at"])
        return Erasure(written["id"], tenant_id, at, said["end_user"])

    def _places(self) -> list[Place]:
        shared = places.shared(self.settings)
        return [places.local(self.settings), *([shared] if shared is not None else [])]

    def _drop_old(self, place: Place, now: datetime) -> None:
        """Entries that are older than every backup."""
        oldest = now - timedelta(days=self.settings.erasure_journal_days)
        for name in _names(place):
            if name < f"{FOLDER}/{oldest:%Y%m%dT%H%M%S}":
                place.remove(name)


def _id(name: str) -> str:
    return name.removesuffix(".json").partition("-")[2]


def _names(place: Place) -> list[str]:
    return [each for each in place.names(FOLDER) if each.endswith(".json")]
