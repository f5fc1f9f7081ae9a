"""/mcp by the messages of the protocol's specification: the REST routes' data, roles and tenants."""

import json
import time
from datetime import timedelta
from typing import Any

import httpx
import pytest

from core.clock import SystemClock
from core.tenants import keys, limits
from core.tenants.key_scopes import KeyScopes
from core.tenants.plans import DAY, LimitRule, Scope, Unit
from core.tenants.scope import scope_of_operator
from tests.gateway.admin.conftest import OPERATORS, Firm, Town

HOUR_AGO = int(time.time()) - 3600
# Tool, arguments, REST route with the same answer, and the roles that may read it: by hand.
TOOLS: dict[str, tuple[dict[str, Any], str, set[str]]] = {
    "get_usage": (
        {"start_time": HOUR_AGO, "end_time": HOUR_AGO + 7200, "group_by": ["model", "batch"]},
        f"/v1/organization/usage/completions?start_time={HOUR_AGO}&end_time={HOUR_AGO + 7200}"
        "&group_by=model&group_by=batch",
        {"owner", "admin", "finance", "developer", "viewer"},
    ),
    "get_costs": (
        {"start_time": HOUR_AGO, "end_time": HOUR_AGO + 7200},
        f"/v1/organization/costs?start_time={HOUR_AGO}&end_time={HOUR_AGO + 7200}",
        {"owner", "admin", "finance"},
    ),
    "list_keys": ({}, "/admin/v1/keys", {"owner", "admin", "developer"}),
    "list_limits": ({}, "/admin/v1/limits", {"owner", "admin", "finance", "developer", "viewer"}),
    "list_invoices": ({"limit": 5}, "/admin/v1/invoices?limit=5", {"owner", "finance"}),
    "get_invoice": ({"reference": "none"}, "/admin/v1/invoices/none", {"owner", "finance"}),
}


def send(town: Town, token: str | None, message: Any, **headers: str) -> httpx.Response:
    accept = {"accept": "application/json, text/event-stream"}
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    auth = {"authorization": f"Bearer {token}"} if token else {}
    content = message if isinstance(message, bytes) else json.dumps(message).encode()
    all_headers = {"content-type": "application/json", **accept, **auth, **given}
    return town.client.post("/mcp", content=content, headers=all_headers)


def ask(town: Town, token: str, method: str, **params: Any) -> dict[str, Any]:
    message = {"jsonrpc": "2.0", "id": 7, "method": method, "params": params}
    answer = send(town, token, message)
    assert answer.status_code == 200, answer.text
    told: dict[str, Any] = answer.json()
    assert told["jsonrpc"] == "2.0" and told["id"] == 7
    return told


def call(town: Town, token: str, name: str, **arguments: Any) -> dict[str, Any]:
    told = ask(town, token, "tools/call", name=name, arguments=arguments)
    result: dict[str, Any] = told["result"]
    return result


def test_the_handshake_agrees_on_a_version(town: Town) -> None:
    key = town.acme.keys["viewer"]
    for asked, agreed in (("2025-06-18", "2025-06-18"), ("2031-01-01", "2025-11-25")):
        result = ask(
            town,
            key,
            "initialize",
            protocolVersion=asked,
            capabilities={},
            clientInfo={"name": "test", "version": "1"},
        )["result"]
        assert result["protocolVersion"] == agreed
        assert result["serverInfo"]["name"] == "tollhouse" and "tools" in result["capabilities"]
    ready = send(town, key, {"jsonrpc": "2.0", "method": "notifications/initialized"})
    assert (ready.status_code, ready.content) == (202, b"")
    assert ask(town, key, "ping")["result"] == {}


@pytest.mark.parametrize("tool", TOOLS)
def test_each_role_reads_what_the_rest_route_gives_it(town: Town, tool: str) -> None:
    arguments, path, roles = TOOLS[tool]
    for role, key in town.acme.keys.items():
        listed = {each["name"] for each in ask(town, key, "tools/list")["result"]["tools"]}
        assert (tool in listed) is (role in roles), role
        route = town.call("GET", path, key)
        result = call(town, key, tool, **arguments)
        text = result["content"][0]["text"]
        assert result["isError"] is (route.status_code != 200), (role, text)
        assert (route.status_code == 403) is (role not in roles), role
        if route.status_code == 200:
            told = result["structuredContent"]
            assert json.loads(text) == told
            assert _without_last_use(told) == _without_last_use(route.json())
        else:
            assert text == route.json()["error"]["message"]


def _without_last_use(page: dict[str, Any]) -> dict[str, Any]:
    for each in page["data"]:
        each.pop("last_used_at", None)
    return page


def test_no_tenant_reads_another_and_no_secret_is_shown(town: Town) -> None:
    own = call(town, town.acme.keys["owner"], "list_keys")["content"][0]["text"]
    for secret in (*town.acme.keys.values(), *town.rival.keys.values()):
        assert secret not in own
    rivals = call(town, town.rival.keys["owner"], "list_keys")["structuredContent"]["data"]
    assert {each["project_id"] for each in rivals} == {town.rival.project_id}
    message = {
        "jsonrpc": "2.0",
        "id": 1,
        "method": "tools/call",
        "params": {"name": "list_keys"},
    }
    headers = {"authorization": f"Bearer {town.acme.keys['owner']}"}
    named = town.client.post(f"/mcp?tenant={town.rival.id}", json=message, headers=headers)
    assert named.json()["result"]["isError"] and "No tenant" in named.text
    headers = {"authorization": f"Bearer {OPERATORS}"}
    operator = town.client.post(f"/mcp?tenant={town.rival.id}", json=message, headers=headers)
    assert operator.json()["result"]["structuredContent"]["data"] == rivals


@pytest.mark.parametrize(
    ("message", "status", "code", "names"),
    [
        (b"{", 400, -32700, "JSON"),
        (b'{"jsonrpc": "2.0", "params": ' + b"[" * 20_000, 400, -32700, "JSON"),
        (b'{"jsonrpc": "2.0", "id": "\\ud800", "method": "ping"}', 400, -32700, "JSON"),
        ([], 400, -32600, "object"),
        ({"id": 1, "method": "ping"}, 400, -32600, "jsonrpc"),
        ({"jsonrpc": "2.0", "id": None, "method": "ping"}, 400, -32600, "id"),
        ({"jsonrpc": "2.0", "id": 2**70, "method": "ping"}, 400, -32600, "id"),
        ({"jsonrpc": "2.0", "id": 1, "method": "resources/list"}, 200, -32601, "resources/list"),
        ({"jsonrpc": "2.0", "id": 1, "method": "tools/call"}, 200, -32602, "name"),
        ({"jsonrpc": "2.0", "id": 1, "method": "initialize"}, 200, -32602, "protocolVersion"),
        (
            {"jsonrpc": "2.0", "id": 1, "method": "tools/list", "params": {"cursor": "x"}},
            200,
            -32602,
            "cursor",
        ),
    ],
)
def test_a_wrong_message_is_a_json_rpc_error(
    town: Town, message: Any, status: int, code: int, names: str
) -> None:
    answer = send(town, town.acme.keys["owner"], message)
    assert answer.status_code == status, answer.text
    told = answer.json()
    assert told["error"]["code"] == code and names in told["error"]["message"], told
    assert told["id"] == (1 if status == 200 else None)


@pytest.mark.parametrize(
    ("tool", "arguments", "names"),
    [
        ("delete_keys", {}, "delete_keys"),
        ("list_keys", {"role": "owner"}, "role"),
        ("get_usage", {}, "start_time"),
        ("get_usage", {"start_time": "today"}, "start_time"),
        ("get_usage", {"start_time": 10**400}, "start_time"),
        ("get_usage", {"start_time": 1, "bucket_width": "2d"}, "bucket_width"),
        ("get_usage", {"start_time": 1, "group_by": ["mood"]}, "group_by"),
        ("get_usage", {"start_time": 1, "page": "next"}, "page"),
        ("get_costs", {"start_time": 1, "models": ["tiny"]}, "models"),
        ("list_invoices", {"limit": 0}, "limit"),
        ("get_invoice", {"reference": "a\0b"}, "reference"),
    ],
)
def test_a_wrong_argument_is_refused_by_name(
    town: Town, tool: str, arguments: dict[str, Any], names: str
) -> None:
    told = ask(town, town.acme.keys["owner"], "tools/call", name=tool, arguments=arguments)
    assert told["error"]["code"] == -32602 and names in told["error"]["message"], told


def test_the_transport_is_what_the_specification_says(town: Town) -> None:
    key, ping = town.acme.keys["viewer"], {"jsonrpc": "2.0", "id": 1, "method": "ping"}
    assert send(town, None, ping).status_code == 401
    for method in ("GET", "DELETE"):
        refused = town.call(method, "/mcp", key)
        assert refused.status_code == 405 and refused.headers["allow"] == "POST"
    assert send(town, key, ping, origin="https://elsewhere.example").status_code == 403
    own = str(town.client.base_url).rstrip("/")
    assert send(town, key, ping, origin=own).status_code == 200
    old = send(town, key, ping, mcp_protocol_version="2024-11-05")
    assert old.status_code == 400 and "2025-06-18" in old.json()["error"]["message"]
    assert send(town, key, ping, mcp_protocol_version="2025-11-25").status_code == 200


def _issue(town: Town, firm: Firm, **more: Any) -> str:
    with town.services.database.transaction() as session:
        scope = scope_of_operator(firm.id)
        return keys.issue(
            session, scope, SystemClock(), project_id=firm.project_id, name="mcp", **more
        ).secret


def test_a_key_is_bound_to_its_routes_and_limits(town: Town) -> None:
    ping = {"jsonrpc": "2.0", "id": 1, "method": "ping"}
    chats = _issue(town, town.acme, scopes=KeyScopes(routes=frozenset({"/v1/chat/completions"})))
    assert send(town, chats, ping).status_code == 403
    clock = SystemClock()
    ends = clock.now() + timedelta(days=1)
    one = _issue(town, town.rival, expires_at=ends)
    with town.services.database.transaction() as session:
        rule = LimitRule(Scope.KEY, Unit.REQUESTS, 2, DAY)
        limits.set_rule(session, scope_of_operator(town.rival.id), clock, rule)
    got = [send(town, one, ping) for _ in range(3)]
    assert [each.status_code for each in got] == [200, 200, 429]
    assert int(got[2].headers["retry-after"]) > 0
    assert got[2].json()["error"]["code"] == "rate_limit_exceeded"
