"""TenantScope: a type that proves the tenant check was made. Every query on tenant data asks for one.

Only the functions of this file make it, and only the authorisation step calls them (a test reads
the tree for both).
"""

from dataclasses import dataclass

_MADE_HERE = object()


@dataclass(frozen=True, slots=True)
class TenantScope:
    tenant_id: str
    project_id: str | None  # None sees every project of the tenant
    actor: str  # for the audit log
    role: str
    _proof: object

    def __post_init__(self) -> None:
        if self._proof is not _MADE_HERE:
            raise TypeError("a TenantScope comes from the authorisation step only")


def scope_of_key(tenant_id: str, project_id: str, key_id: str, role: str) -> TenantScope:
    """For a request that showed a valid API key."""
    return TenantScope(tenant_id, project_id, key_id, role, _MADE_HERE)


def scope_of_member(tenant_id: str, member_id: str, role: str) -> TenantScope:
    """For a signed-in member, after casbin allowed the act."""
    return TenantScope(tenant_id, None, member_id, role, _MADE_HERE)


def scope_of_operator(tenant_id: str, actor: str = "operator") -> TenantScope:
    """For the operator's token, the command line on the machine itself, and scheduled tasks."""
    return TenantScope(tenant_id, None, actor, "operator", _MADE_HERE)
