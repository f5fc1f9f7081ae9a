"""Whether this machine has the operator's token with which the others seal what they store."""

from sqlalchemy import Text as Plain
from sqlalchemy import select, type_coerce
from sqlalchemy.orm import Session

from core.clock import Clock
from core.database import Database, Limits
from core.errors import NotFound
from core.responses.models import CompletionRecord, ConversationRecord, ResponseRecord
from core.sealed_columns import ColumnKeys, SealedText, is_sealed
from core.sealing import Sealer
from core.settings import Settings
from core.tenants.operator import known_operator_token
from gateway.cli.doctor.check import Finding, bad, good, unused, warn
from migrations.run import current, head
from migrations.tables import metadata

_LOOKED_AT = 50  # of each kind, newest first
_ALIKE = "Set TOLLHOUSE_ADMIN_TOKEN to one value on every gateway, worker and command."


def operator_token(settings: Settings, _clock: Clock) -> Finding:
    """Secrets and texts in the database are sealed with it: a process with another one can send no
    webhook and read no stored response."""
    token = known_operator_token(settings)
    database = Database(settings.effective_database_url, limits=Limits(connect_s=2))
    try:
        if current(database) != head():
            return unused("the database has no current schema")
        with database.read() as session:
            sealed, closed = _counts(session, settings, token)
    finally:
        database.close()
    if closed:
        where = "TOLLHOUSE_ADMIN_TOKEN" if settings.admin_token else "this data directory's token"
        return bad(
            f"{closed} of the {sealed} newest sealed rows cannot be opened with {where}: gateways and "
            "workers have different tokens, or it was changed.",
            f"{_ALIKE} After a change, give the old one as TOLLHOUSE_PREVIOUS_ADMIN_TOKEN.",
        )
    if settings.database_url and not settings.admin_token:
        return warn("each machine makes a token of its own", _ALIKE)
    return good(f"it opens the {sealed} newest sealed rows" if sealed else "nothing is sealed yet")


def _counts(session: Session, settings: Settings, token: str) -> tuple[int, int]:
    """(sealed rows looked at, those of them that no token here opens)."""
    tokens = [each for each in (token, settings.previous_admin_token) if each]
    sealed = closed = 0
    for table in metadata.sorted_tables:
        for column in table.columns:
            if not isinstance(column.type, SealedText):
                continue
            rows = select(type_coerce(column, Plain)).where(column.is_not(None)).limit(_LOOKED_AT)
            for stored in session.scalars(rows):
                if is_sealed(stored):
                    sealed += 1
                    keys = ColumnKeys(*tokens) if tokens else None
                    closed += keys is None or is_sealed(keys.open(column.type.column, stored))
    for record in (ResponseRecord, CompletionRecord, ConversationRecord):
        newest = select(record.tenant_id, record.id, record.sealed)
        for tenant_id, name, text in session.execute(
            newest.order_by(record.created_at.desc()).limit(_LOOKED_AT)
        ):
            sealed += 1
            closed += not _opens(Sealer(token), tenant_id, name, text)
    return sealed, closed


def _opens(sealer: Sealer, tenant_id: str, name: str, text: bytes) -> bool:
    try:
        sealer.open(tenant_id, name, text)
    except NotFound:
        return False
    return True
