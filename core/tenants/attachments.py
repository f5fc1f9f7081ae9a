"""What is attached to a key, project, member, model or adapter, and how it follows it.

A rotated key has a new id, so whatever is attached to a key by id is attached to the first key of
its chain of rotations. `ATTACHED` is the list of these columns; a test walks all tables, so that a
column is on this list or is stated to be a record of what happened.
"""

from dataclasses import dataclass

from sqlalchemy import or_, select
from sqlalchemy.orm import Session

from core.errors import BadRequest
from core.labels import check_label
from core.tenants.models import ApiKey, Project
from core.tenants.scope import TenantScope

KEY, PROJECT, LABEL = "key", "project", "label"


@dataclass(frozen=True, slots=True)
class Attached:
    column: str  # table and column
    to: tuple[str, ...]
    follows: str  # through rotate, rename, archive, delete and restore


_FIRST = "it names the first key of the chain; projects and tenants keep their ids"
ATTACHED = (
    Attached("budgets.scope_id", ("tenant", PROJECT, KEY, LABEL), _FIRST),
    Attached("limits.target", (PROJECT, KEY, "model", LABEL), f"{_FIRST}, others their names"),
    Attached("moderation_policies.target", ("tenant", PROJECT, KEY), _FIRST),
    Attached("moderation_strikes.key_id", (KEY,), "strikes of a chain count together"),
    Attached("moderation_suspensions.key_id", (KEY,), "a lifted one frees its chain of strikes"),
    Attached("api_keys.project_id", (KEY,), "rotation copies it"),
    Attached("api_keys.name", (KEY,), "rotation copies it"),
    Attached("api_keys.role", (KEY,), "rotation copies it"),
    Attached("api_keys.scopes", (KEY, "model", "adapter"), "rotation copies it; names are kept"),
    Attached("api_keys.routing", (KEY, "model"), "rotation copies it; names are kept"),
    Attached("api_keys.allowed_ips", (KEY,), "rotation copies it"),
    Attached("api_keys.expires_at", (KEY,), "rotation copies it"),
    Attached("api_keys.member_id", (KEY, "member"), "rotation copies it; members keep their ids"),
)


def stored_target(session: Session, scope: TenantScope, kind: str, target: str) -> str:
    """The id under which something is attached to a key or project of the tenant. BadRequest where
    the tenant has none with this id. Other kinds are returned as they are."""
    if kind == LABEL:
        return check_label(target, "target")
    if kind not in (KEY, PROJECT) or not target:
        return target
    row: ApiKey | Project | None
    row = session.get(ApiKey, target) if kind == KEY else session.get(Project, target)
    if row is None or row.tenant_id != scope.tenant_id:
        raise BadRequest(
            f"There is no {kind} {target[:80]!r}.",
            next_step=f"Use the id of one of the organisation's {kind}s.",
            param="target",
        )
    return first_of(session, kind, target)


def first_of(session: Session, kind: str, target: str) -> str:
    """The id of the first key of a key's chain; other kinds are returned as they are."""
    key = session.get(ApiKey, target) if kind == KEY else None
    return key.first_id if key is not None else target


def chain_of(session: Session, first_id: str) -> list[ApiKey]:
    """A key and its successors by rotation, the oldest first."""
    query = select(ApiKey).where(or_(ApiKey.id == first_id, ApiKey.origin_id == first_id))
    return list(session.scalars(query.order_by(ApiKey.created_at, ApiKey.id)))


def ids_of_chain(session: Session, first_id: str) -> list[str]:
    return [key.id for key in chain_of(session, first_id)] or [first_id]
