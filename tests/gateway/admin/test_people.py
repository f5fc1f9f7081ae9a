"""The admin routes at work: keys, members, limits, roles, audit; and who may give what to whom."""

import time

import pytest

from core.tenants.key_cache import POLL_S
from tests.gateway.admin.conftest import Town


def _ok(answer: object, status: int = 200) -> dict:  # type: ignore[type-arg]
    assert answer.status_code == status, answer.text  # type: ignore[attr-defined]
    return answer.json()  # type: ignore[attr-defined, no-any-return]


def until_answered(town: Town, secret: str, status: int) -> None:
    """Wait for the gateway's own poll, which a busy machine may delay by more than its period."""
    deadline = time.monotonic() + 60
    while town.call("GET", "/v1/models", secret).status_code != status:
        assert time.monotonic() < deadline, f"the key never answered {status}"
        time.sleep(0.05)


def test_a_key_is_shown_once_works_and_ends_with_the_next_poll(town: Town) -> None:
    owner = town.acme.keys["owner"]
    body = {"project_id": town.acme.project_id, "name": "fresh", "role": "developer"}
    made = _ok(town.call("POST", "/admin/v1/keys", owner, json=body), 201)
    assert _ok(town.call("GET", "/v1/models", made["secret"]))["object"] == "list"
    listed = _ok(town.call("GET", "/admin/v1/keys", owner))
    assert made["secret"] not in str(listed) and made["id"] in str(listed)
    _ok(town.call("DELETE", f"/admin/v1/keys/{made['id']}", owner))
    until_answered(town, made["secret"], 401)
    assert POLL_S <= 0.5, "a revocation is promised within a second"


def test_rotation_leaves_both_working_for_the_overlap(town: Town) -> None:
    owner = town.acme.keys["owner"]
    body = {"project_id": town.acme.project_id, "name": "turning"}
    old = _ok(town.call("POST", "/admin/v1/keys", owner, json=body), 201)
    path = f"/admin/v1/keys/{old['id']}/rotate"
    new = _ok(town.call("POST", path, owner, json={"overlap_s": 60}), 201)
    for secret in (old["secret"], new["secret"]):
        _ok(town.call("GET", "/v1/models", secret))
    again = town.call("POST", path, owner, json={"overlap_s": 60})
    assert again.status_code == 400


def test_scopes_and_addresses_bind_a_key(town: Town) -> None:
    owner = town.acme.keys["owner"]
    base = {"project_id": town.acme.project_id, "name": "bound", "role": "owner"}
    routes = base | {"scopes": {"routes": ["/v1/chat/*"]}}
    bound = _ok(town.call("POST", "/admin/v1/keys", owner, json=routes), 201)["secret"]
    assert town.call("GET", "/v1/models", bound).status_code == 403
    assert town.call("GET", "/admin/v1/keys", bound).status_code == 403
    elsewhere = base | {"allowed_ips": ["203.0.113.0/24"]}
    away = _ok(town.call("POST", "/admin/v1/keys", owner, json=elsewhere), 201)["secret"]
    assert town.call("GET", "/v1/models", away).status_code == 403
    wrong = town.call("POST", "/admin/v1/keys", owner, json=base | {"allowed_ips": ["home"]})
    assert wrong.status_code == 400 and wrong.json()["error"]["param"] == "allowed_ips"


@pytest.mark.parametrize(
    ("actor", "role", "status"),
    [("admin", "owner", 403), ("admin", "admin", 201), ("owner", "owner", 201)],
)
def test_nobody_makes_a_key_mightier_than_himself(
    town: Town, actor: str, role: str, status: int
) -> None:
    body = {"project_id": town.acme.project_id, "name": "might", "role": role}
    assert (
        town.call("POST", "/admin/v1/keys", town.acme.keys[actor], json=body).status_code == status
    )


def test_an_admin_cannot_touch_an_owner_nor_become_one(town: Town) -> None:
    admin, owner = town.acme.keys["admin"], town.acme.keys["owner"]
    boss = {"email": "boss@acme.example", "role": "owner", "password": "a long password"}
    assert town.call("POST", "/admin/v1/members", admin, json=boss).status_code == 403
    made = _ok(town.call("POST", "/admin/v1/members", owner, json=boss), 201)
    path = f"/admin/v1/members/{made['id']}"
    assert town.call("PATCH", path, admin, json={"disabled": True}).status_code == 403
    seized = town.call("PUT", f"{path}/password", admin, json={"password": "another one!"})
    assert seized.status_code == 403
    last = town.call("PATCH", path, owner, json={"role": "viewer"})
    assert last.status_code == 409 and "last owner" in last.text


def test_a_member_of_another_tenant_is_not_found(town: Town) -> None:
    body = {"email": "spy@rival.example", "role": "viewer"}
    theirs = _ok(town.call("POST", "/admin/v1/members", town.rival.keys["owner"], json=body), 201)
    path = f"/admin/v1/members/{theirs['id']}"
    answer = town.call("PATCH", path, town.acme.keys["owner"], json={"role": "admin"})
    assert answer.status_code == 404


def test_a_tenant_tightens_its_limits_and_does_not_loosen_its_plan(town: Town) -> None:
    owner = town.acme.keys["owner"]
    tight = {"scope": "tenant", "unit": "requests", "limit": 500, "period_s": 60}
    _ok(town.call("PUT", "/admin/v1/limits", owner, json=tight))
    assert (
        town.call("PUT", "/admin/v1/limits", owner, json=tight | {"limit": 10**6}).status_code
        == 403
    )
    assert (
        town.call("PUT", "/admin/v1/limits", owner, json=tight | {"shadow": True}).status_code
        == 403
    )
    own = {"tenant": "acme"}
    _ok(town.as_operator("PUT", "/admin/v1/limits", json=tight | {"limit": 10**6}, params=own))
    assert town.call("PUT", "/admin/v1/limits", owner, json=tight).status_code == 403
    gone = {"scope": "tenant", "unit": "requests"}
    assert town.call("DELETE", "/admin/v1/limits", owner, params=gone).status_code == 403
    _ok(town.as_operator("DELETE", "/admin/v1/limits", params=gone | own))


def test_plan_and_status_are_the_operators(town: Town) -> None:
    owner = town.acme.keys["owner"]
    assert (
        town.call("PATCH", "/admin/v1/tenant", owner, json={"plan": "premium"}).status_code == 403
    )
    _ok(town.call("PATCH", "/admin/v1/tenant", owner, json={"settings": {"prompt_order": "full"}}))
    body, which = {"plan": "premium"}, {"tenant": "acme"}
    changed = _ok(town.as_operator("PATCH", "/admin/v1/tenant", json=body, params=which))
    assert changed["plan"] == "premium" and changed["settings"] == {"prompt_order": "full"}
    for wrong in ({"plan": "gold"}, {"status": "odd"}, {"colour": "red"}):
        assert (
            town.as_operator("PATCH", "/admin/v1/tenant", json=wrong, params=which).status_code
            == 400
        )


def test_a_suspended_tenant_is_out_with_the_next_poll(town: Town) -> None:
    body = {"name": "late-payer"}
    made = _ok(town.as_operator("POST", "/admin/v1/tenants", json=body), 201)
    which = {"tenant": made["id"]}
    project = _ok(
        town.as_operator("POST", "/admin/v1/projects", json={"name": "p"}, params=which), 201
    )
    key = {"project_id": project["id"], "name": "k", "role": "owner"}
    secret = _ok(town.as_operator("POST", "/admin/v1/keys", json=key, params=which), 201)["secret"]
    _ok(town.call("GET", "/v1/models", secret))
    _ok(town.as_operator("PATCH", "/admin/v1/tenant", json={"status": "suspended"}, params=which))
    town.services.key_cache.poll()
    assert town.call("GET", "/v1/models", secret).status_code == 403


def test_the_policy_is_read_from_the_database(town: Town) -> None:
    finance = town.rival.keys["finance"]
    assert town.call("GET", "/admin/v1/members", finance).status_code == 403
    right = {"role": "finance", "obj": "members", "act": "read"}
    _ok(town.as_operator("POST", "/admin/v1/roles", json=right), 201)
    _ok(town.call("GET", "/admin/v1/members", finance))
    _ok(town.as_operator("DELETE", "/admin/v1/roles", params=right))
    assert town.call("GET", "/admin/v1/members", finance).status_code == 403
    mighty = {"role": "operator", "obj": "tenants", "act": "write"}
    assert town.as_operator("DELETE", "/admin/v1/roles", params=mighty).status_code == 400


def test_every_change_is_in_the_audit_log_with_before_and_after(town: Town) -> None:
    owner = town.rival.keys["owner"]
    body = {"email": "new@rival.example", "role": "viewer"}
    made = _ok(town.call("POST", "/admin/v1/members", owner, json=body), 201)
    _ok(town.call("PATCH", f"/admin/v1/members/{made['id']}", owner, json={"role": "developer"}))
    newest, older, first = _ok(town.call("GET", "/admin/v1/audit", owner, params={"limit": 3}))[
        "data"
    ]
    actions = [each["action"] for each in (newest, older, first)]
    assert actions == ["member.change", "member.invite", "member.add"]
    assert (newest["before"]["role"], newest["after"]["role"]) == ("viewer", "developer")
    assert newest["actor"].startswith("key_") and newest["target"] == made["id"]
    page = _ok(town.call("GET", "/admin/v1/audit", owner, params={"before": newest["id"]}))
    assert page["data"][0]["id"] == older["id"]


def test_a_developers_key_sees_its_own_project_alone(town: Town) -> None:
    owner = town.acme.keys["owner"]
    other = _ok(town.call("POST", "/admin/v1/projects", owner, json={"name": "secret-plans"}), 201)
    seen = _ok(town.call("GET", "/admin/v1/projects", town.acme.keys["developer"]))["data"]
    assert [each["id"] for each in seen] == [town.acme.project_id]
    assert other["id"] in str(_ok(town.call("GET", "/admin/v1/projects", owner)))


def test_the_operator_makes_and_changes_plans(town: Town) -> None:
    body = {"limits": [{"scope": "key", "unit": "requests", "limit": 2, "period_s": 86_400}]}
    path = "/admin/v1/plans/tiny"
    assert town.call("PUT", path, town.acme.keys["owner"], json=body).status_code == 403
    _ok(town.as_operator("PUT", path, json=body))
    which = {"tenant": "rival"}
    _ok(town.as_operator("PATCH", "/admin/v1/tenant", json={"plan": "tiny"}, params=which))
    shown = _ok(town.as_operator("GET", "/admin/v1/limits", params=which))
    assert shown["plan"] == "tiny" and shown["data"][0]["limit"] == 2
    assert town.as_operator("DELETE", path).status_code == 409
    body["limits"][0]["limit"] = 3
    _ok(town.as_operator("PUT", path, json=body))
    time.sleep(1.0)
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    key = town.rival.keys["viewer"]
    statuses = [
        town.call("POST", "/v1/chat/completions", key, json=chat).status_code for _ in range(5)
    ]
    assert sorted(statuses) == [200, 200, 200, 429, 429]
    _ok(town.as_operator("PATCH", "/admin/v1/tenant", json={"plan": "standard"}, params=which))
    _ok(town.as_operator("DELETE", path))
    twice = {"limits": body["limits"] * 2}
    assert town.as_operator("PUT", path, json=twice).status_code == 400
