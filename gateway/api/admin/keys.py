"""/admin/v1/keys. Only the response that creates a key contains its secret."""

from datetime import timedelta
from typing import Annotated, Any

from fastapi import APIRouter, Depends

from core.errors import BadRequest
from core.tenants import keys
from core.tenants.keys import KeyScopes
from gateway.api.admin.access import Allowed, Visit
from gateway.schemas.admin import KeyRotation, NewKey

router = APIRouter(prefix="/admin/v1/keys", tags=["keys"])
Reads = Annotated[Visit, Depends(Allowed("keys", "read"))]
Writes = Annotated[Visit, Depends(Allowed("keys", "write"))]


@router.get("")
def list_keys(visit: Reads) -> dict[str, Any]:
    with visit.services.database.read() as session:
        found = keys.all_of(session, visit.scope)
        return {"object": "list", "data": [keys.describe(each) for each in found]}


@router.post("", status_code=201)
def issue_key(body: NewKey, visit: Writes) -> dict[str, Any]:
    services = visit.services
    if body.expires_at is not None and body.expires_at.tzinfo is None:
        raise BadRequest(
            "expires_at has no time zone.",
            next_step="Write it like 2027-01-31T00:00:00Z.",
            param="expires_at",
        )
    with services.database.transaction() as session:
        issued = keys.issue(
            session,
            visit.scope,
            services.clock,
            project_id=body.project_id,
            name=body.name,
            role=body.role,
            scopes=_scopes(body),
            allowed_ips=tuple(body.allowed_ips),
            expires_at=body.expires_at,
        )
        return _shown(session, visit, issued)


@router.post("/{key_id}/rotate", status_code=201)
def rotate_key(key_id: str, body: KeyRotation, visit: Writes) -> dict[str, Any]:
    services = visit.services
    with services.database.transaction() as session:
        overlap = timedelta(seconds=body.overlap_s)
        issued = keys.rotate(session, visit.scope, services.clock, key_id, overlap=overlap)
        return _shown(session, visit, issued)


@router.delete("/{key_id}")
def revoke_key(key_id: str, visit: Writes) -> dict[str, Any]:
    services = visit.services
    with services.database.transaction() as session:
        keys.revoke(session, visit.scope, services.clock, key_id)
        return keys.describe(keys.get(session, visit.scope, key_id))


def _shown(session: Any, visit: Visit, issued: keys.IssuedKey) -> dict[str, Any]:
    made = keys.describe(keys.get(session, visit.scope, issued.id))
    return made | {"secret": issued.secret}


def _scopes(body: NewKey) -> KeyScopes:
    listed = body.scopes.model_dump(exclude_none=True)
    return KeyScopes(**{name: frozenset(values) for name, values in listed.items()})
