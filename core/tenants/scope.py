"""TenantScope: a type that proves that the tenant check was made. Queries on tenant data require it.

Only the functions of this file create it, and only the authorisation step calls them. A test checks
both in the source tree.
"""

from dataclasses import dataclass

_PROOF = object()


@dataclass(frozen=True, slots=True)
class TenantScope:
    tenant_id: str
    project_id: str | None  # None: every project of the tenant
    actor: str  # for the audit log
    role: str
    _proof: object

    def __post_init__(self) -> None:
        if self._proof is not _PROOF:
            raise TypeError("a TenantScope can be created by the authorisation step only")


def scope_of_key(tenant_id: str, project_id: str, key_id: str, role: str) -> TenantScope:
    """For a request with a valid API key."""
    return TenantScope(tenant_id, project_id, key_id, role, _PROOF)


def scope_of_member(tenant_id: str, member_id: str, role: str) -> TenantScope:
    """For a signed-in member, after casbin has allowed the act."""
    return TenantScope(tenant_id, None, member_id, role, _PROOF)


def scope_of_operator(
    tenant_id: str, actor: str = "operator", role: str = "operator"
) -> TenantScope:
    """For an operator, the local command line and scheduled tasks."""
    return TenantScope(tenant_id, None, actor, role, _PROOF)
