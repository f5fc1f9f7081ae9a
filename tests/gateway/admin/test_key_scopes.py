"""Scopes and chains of keys: what could never allow anything is refused by name, where it is written."""

from typing import Any

import pytest

from core.errors import BadRequest
from core.tenants import key_scopes
from tests.gateway.admin.conftest import Town
from tests.gateway.deployment import MODEL

REFUSED = [
    ({"scopes": {name: [value]}}, f"scopes.{name}")
    for name in ("models", "adapters", "routes")
    for value in ("*", "", " ", "nope", "/v1/*/x")
] + [
    ({"scopes": {"models": ["tin*"]}}, "scopes.models"),
    ({"scopes": {"routes": ["v1/models"]}}, "scopes.routes"),
    ({"scopes": {"routes": ["/v1/nope"]}}, "scopes.routes"),
    ({"scopes": {"routes": ["/v1/nope/*"]}}, "scopes.routes"),
    ({"routing": {"fallback": {MODEL: ["nosuch"]}}}, "routing.fallback"),
    ({"routing": {"fallback": {"nosuch": [MODEL]}}}, "routing.fallback"),
    ({"routing": {"canary": {MODEL: {"nosuch": 5}}}}, "routing.canary"),
]
ALLOWED: list[dict[str, Any]] = [
    {"scopes": {"models": [MODEL], "routes": ["/v1/*"]}},
    {"scopes": {"routes": ["/*"]}},
    {"scopes": {"routes": ["/v1/chat/completions", "/v1/files/*", "/v1/batches/batch_1"]}},
    {"scopes": {"routes": ["/admin/v1/keys", "/mcp", "/v1/audio/*", "/v1/organization/*"]}},
    {"scopes": {"models": []}},
    {"routing": {"fallback": "off"}},
]


@pytest.mark.parametrize(("body", "param"), REFUSED)
def test_a_scope_that_names_nothing_is_refused(
    town: Town, body: dict[str, Any], param: str
) -> None:
    owner = town.acme.keys["owner"]
    new = {"project_id": town.acme.project_id, "name": "k"} | body
    made = town.call("POST", "/admin/v1/keys", owner, json=new)
    assert made.status_code == 400 and made.json()["error"]["param"] == param, made.text
    plain = town.call("POST", "/admin/v1/keys", owner, json=new | {"scopes": {}, "routing": None})
    changed = town.call("PATCH", f"/admin/v1/keys/{plain.json()['id']}", owner, json=body)
    assert changed.status_code == 400 and changed.json()["error"]["param"] == param, changed.text


@pytest.mark.parametrize("body", ALLOWED)
def test_scopes_that_name_something_are_allowed(town: Town, body: dict[str, Any]) -> None:
    new = {"project_id": town.acme.project_id, "name": "k"} | body
    made = town.call("POST", "/admin/v1/keys", town.acme.keys["owner"], json=new)
    assert made.status_code == 201, made.text


def test_an_error_names_what_exists() -> None:
    with pytest.raises(BadRequest, match="large, small"):
        key_scopes.check_known("scopes.models", ["tiny"], ["small", "large"])
