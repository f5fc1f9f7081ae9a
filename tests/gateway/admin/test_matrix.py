"""Every admin route, by every role, on one's own tenant and on another's."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
from fastapi.routing import APIRoute

from core.tenants.roles import MEMBER_ROLES
from gateway.admin.access import RequireOperator, RequirePermission
from gateway.app import create_app
from tests.gateway.admin.conftest import OPERATORS, Town

ALL = set(MEMBER_ROLES)
# Written out by hand, not taken from the policy: this is what the product promises.
MAY = {
    ("tenant", "read"): ALL,
    ("tenant", "write"): {"owner"},
    ("projects", "read"): ALL,
    ("projects", "write"): {"owner", "admin"},
    ("members", "read"): {"owner", "admin"},
    ("members", "write"): {"owner", "admin"},
    ("keys", "read"): {"owner", "admin", "developer"},
    ("keys", "write"): {"owner", "admin"},
    ("limits", "read"): ALL,
    ("limits", "write"): {"owner", "admin"},
    ("adapters", "read"): ALL,
    ("adapters", "write"): {"owner", "admin", "developer"},
    ("audit", "read"): {"owner", "admin", "finance"},
    ("usage", "read"): ALL,
    ("costs", "read"): {"owner", "admin", "finance"},
    ("invoices", "read"): {"owner", "finance"},
    ("invoices", "write"): {"owner"},
    ("budgets", "read"): {"owner", "admin", "finance"},
    ("budgets", "write"): {"owner", "admin", "finance"},
    ("payments", "read"): {"owner", "finance"},
    ("payments", "write"): {"owner", "finance"},
    ("exports", "read"): {"owner", "admin", "finance"},
    ("exports", "write"): {"owner", "admin", "finance"},
    ("moderation", "read"): {"owner", "admin", "developer"},
    ("moderation", "write"): {"owner", "admin"},
}
# Those of usage and costs have a test of their own.
_ADMIN = (
    "/admin/v1",
    *(f"/v1/organization/{each}" for each in ("projects", "users", "invites", "admin_api_keys")),
)
OPERATORS_OWN = {"tenants", "prices", "roles", "operations", "money"}


def _routes(town: Town) -> Iterator[tuple[str, str, RequirePermission | RequireOperator | None]]:
    for route in create_app(town.services).routes:
        for each in _flat(route):
            if each.path.startswith(_ADMIN):
                for method in sorted(each.methods or ()):
                    yield method, re.sub(r"\{[^}]+\}", "nothing", each.path), _right(each)


def _flat(route: Any) -> Iterator[APIRoute]:
    if isinstance(route, APIRoute):
        yield route
    for inner in getattr(getattr(route, "original_router", None), "routes", ()):
        yield from _flat(inner)


def _right(route: APIRoute) -> RequirePermission | RequireOperator | None:
    calls = [dependency.call for dependency in route.dependant.dependencies]
    return next(
        (call for call in calls if isinstance(call, RequirePermission | RequireOperator)), None
    )


def test_every_admin_route_names_a_right_that_is_promised(town: Town) -> None:
    listed = list(_routes(town))
    assert len(listed) >= 20
    for method, path, right in listed:
        assert right is not None, f"{method} {path} asks casbin nothing"
        if isinstance(right, RequireOperator):
            assert right.obj in OPERATORS_OWN, (method, path)
        else:
            assert (right.obj, right.act) in MAY, (method, path, right)
        assert (right.act == "read") == (method == "GET"), (method, path, right)


def test_the_matrix(town: Town) -> None:
    for method, path, right in _routes(town):
        assert right is not None
        anonymous = town.call(method, path)
        assert anonymous.status_code == 401, (method, path, anonymous.text)
        for role in MEMBER_ROLES:
            _by_role(town, method, path, right, role)
        foreign = {} if isinstance(right, RequireOperator) else {"tenant": town.rival.name}
        done = town.call(method, path, OPERATORS, params=foreign)
        assert done.status_code not in (401, 403), (method, path, done.text)
        assert "No tenant" not in done.text


def _by_role(
    town: Town, method: str, path: str, right: RequirePermission | RequireOperator, role: str
) -> None:
    where = f"{role}: {method} {path}"
    own = town.call(method, path, town.acme.keys[role])
    if isinstance(right, RequireOperator):
        assert own.status_code == 403, f"{where} {own.text}"
        return
    names = (town.rival.name, "org_that_is_not") if role == "owner" else (town.rival.name,)
    for name in names:
        answer = town.call(method, path, town.acme.keys[role], params={"tenant": name})
        assert answer.status_code == 404, f"{where} {answer.text}"
        assert "No tenant" in answer.text, where
    if role in MAY[(right.obj, right.act)]:
        assert own.status_code not in (401, 403), f"{where} {own.text}"
        assert own.status_code < 500, f"{where} {own.text}"
    else:
        assert own.status_code == 403, f"{where} {own.text}"


@pytest.mark.parametrize("role", MEMBER_ROLES)
def test_nothing_of_another_tenant_is_in_any_list(town: Town, role: str) -> None:
    own = town.acme.keys[role]
    for method, path, right in _routes(town):
        if method == "GET" and isinstance(right, RequirePermission):
            answer = town.call("GET", path, own)
            assert town.rival.id not in answer.text and town.rival.project_id not in answer.text
