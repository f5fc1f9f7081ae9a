"""Bodies and answers of OpenAI's administration API, of our projects, members and keys.

OpenAI's `reader` is our viewer; our other roles keep their names. A service account is a key that no
member answers for.
"""

from collections.abc import Callable, Iterable
from datetime import datetime
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from core.clock import Clock
from core.errors import BadRequest
from core.tenants import members
from core.tenants.models import ApiKey, Member, Project
from core.tenants.secrets import PREFIX

Row = TypeVar("Row", Project, Member, ApiKey)
Json = dict[str, Any]
UserRole = Literal["owner", "reader", "admin", "finance", "developer"]
_READER, _VIEWER = "reader", "viewer"


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid")


class ProjectBody(_Body):
    name: str = Field(min_length=1, max_length=63)


class MemberOfProject(_Body):
    id: str = Field(max_length=40)
    role: Literal["member", "owner"]


class InviteBody(_Body):
    email: str = Field(max_length=320)
    role: UserRole
    projects: list[MemberOfProject] | None = Field(None, max_length=100)


class UserBody(_Body):
    role: UserRole


class AdminKeyBody(_Body):
    name: str = Field(min_length=1, max_length=120)
    expires_in_seconds: int | None = Field(None, ge=1, le=31_536_000)


class ServiceAccountBody(_Body):
    name: str = Field(min_length=1, max_length=120)


def our_role(role: str) -> str:
    return _VIEWER if role == _READER else role


def their_role(role: str) -> str:
    return _READER if role == _VIEWER else role


def page(rows: Iterable[Row], after: str | None, limit: int, shown: Callable[[Row], Json]) -> Json:
    """`rows` are in the order of their ids. BadRequest if `after` is no id of them."""
    listed = list(rows)
    if after:
        ids = [each.id for each in listed]
        if after not in ids:
            raise BadRequest(
                f"after is {after[:80]!r}, which is not in this list.",
                next_step="Give the last_id of the page before.",
                param="after",
            )
        listed = listed[ids.index(after) + 1 :]
    data = [shown(each) for each in listed[:limit]]
    return {
        "object": "list",
        "data": data,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": len(listed) > limit,
    }


def project(row: Project) -> Json:
    return {
        "object": "organization.project",
        "id": row.id,
        "name": row.name,
        "created_at": seconds(row.created_at),
        "archived_at": seconds(row.archived_at),
        "status": "active" if row.archived_at is None else "archived",
    }


def user(member: Member) -> Json:
    return {
        "object": "organization.user",
        "id": member.id,
        "name": member.name,
        "email": member.email,
        "role": their_role(member.role),
        "added_at": seconds(member.created_at),
    }


def invite(member: Member, clock: Clock) -> Json:
    """An invitation has the id of its member."""
    ends = member.invitation_expires_at
    waits = ends is not None and ends > clock.now()
    state = "accepted" if members.state_of(member) == "active" else "expired"
    return {
        "object": "organization.invite",
        "id": member.id,
        "email": member.email,
        "role": their_role(member.role),
        "status": "pending" if waits and state != "accepted" else state,
        "created_at": seconds(member.created_at),
        "expires_at": seconds(ends),
        "accepted_at": None,
        "projects": [],
    }


def admin_key(key: ApiKey, owner: Member | None) -> Json:
    kind = "user" if owner is not None else "service_account"
    return {
        "object": "organization.admin_api_key",
        "id": key.id,
        "name": key.name,
        "redacted_value": redacted(key),
        "created_at": seconds(key.created_at),
        "expires_at": seconds(key.expires_at),
        "last_used_at": seconds(key.last_used_at),
        "owner": {"type": kind, "object": f"organization.{kind}", **_owner(key, owner)},
    }


def project_key(key: ApiKey, owner: Member | None) -> Json:
    kind = "service_account" if owner is None else "user"
    described = _owner(key, owner) | ({} if owner is None else {"email": owner.email})
    enabled = owner is None or owner.disabled_at is None
    return {
        "object": "organization.project.api_key",
        "id": key.id,
        "name": key.name,
        "redacted_value": redacted(key),
        "created_at": seconds(key.created_at),
        "last_used_at": seconds(key.last_used_at),
        "owner_project_access": "active" if enabled else "inactive",
        "owner": {"type": kind, kind: described},
    }


def service_account(key: ApiKey) -> Json:
    return {
        "object": "organization.project.service_account",
        "id": key.id,
        "name": key.name,
        "role": "member",
        "created_at": seconds(key.created_at),
    }


def _owner(key: ApiKey, owner: Member | None) -> Json:
    if owner is None:
        made = seconds(key.created_at)
        return {"id": key.id, "name": key.name, "created_at": made, "role": "member"}
    return {
        "id": owner.id,
        "name": owner.name,
        "created_at": seconds(owner.created_at),
        "role": their_role(owner.role),
    }


def redacted(key: ApiKey) -> str:
    return f"{PREFIX}…{key.last_four}"


def seconds(at: datetime | None) -> int | None:
    return None if at is None else int(at.timestamp())
