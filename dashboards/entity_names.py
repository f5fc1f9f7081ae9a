"""Names that a tenant gave its projects, keys, members, adapters and prompts, by their ids."""

from collections.abc import Iterable
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from core import ids
from core.tenants.models import Adapter, ApiKey, Member, Project, PromptTemplate
from core.tenants.prompt_templates import PREFIX
from core.tenants.scope import TenantScope

_NAMED: dict[str, tuple[Any, Any]] = {
    ids.PROJECT: (Project, Project.name),
    ids.KEY: (ApiKey, ApiKey.name),
    ids.MEMBER: (Member, Member.email),
    ids.ADAPTER: (Adapter, Adapter.name),
    PREFIX: (PromptTemplate, PromptTemplate.name),
}


def names_of(session: Session, scope: TenantScope, wanted: Iterable[str]) -> dict[str, str]:
    """What exists of `wanted`, in this tenant; one statement for each kind."""
    by_kind: dict[str, list[str]] = {}
    for each in set(wanted):
        by_kind.setdefault(each.partition("_")[0], []).append(each)
    found: dict[str, str] = {}
    for kind, members in by_kind.items():
        if kind in _NAMED:
            table, label = _NAMED[kind]
            inside = (table.tenant_id == scope.tenant_id, table.id.in_(members))
            found |= {
                row[0]: row[1] for row in session.execute(select(table.id, label).where(*inside))
            }
    return found
