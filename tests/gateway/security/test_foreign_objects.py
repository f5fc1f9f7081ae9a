"""Every operation of `/openapi.json` and every form of the pages, by every role, with another tenant's
objects: none is read, none is changed, and nothing of them is in a refusal.

The bodies are drawn from the document; `NAMED` adds those that name an object elsewhere than in the path.
The owner of the objects then sends the same requests, and they are found: the refusals are about the
tenant and not about the request.
"""

import re
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from html.parser import HTMLParser
from typing import Any

import httpx
import pytest

from core.tenants.roles import MEMBER_ROLES
from dashboards.navigation import SECTIONS
from tests.dashboards.browser_client import browser
from tests.gateway.deployment import MODEL, Deployment, running_deployment
from tests.gateway.security.foreign_objects import (
    MESSAGES,
    WORD,
    Firm,
    example,
    firm,
    make_objects,
    rows_of,
)

ALL = frozenset(MEMBER_ROLES)
MONEY = frozenset({"owner", "admin", "finance"})
ADMINS = frozenset({"owner", "admin"})
BUILDERS = ADMINS | {"developer"}
OWNER = frozenset({"owner"})
BOOKS = OWNER | {"finance"}
NOBODY: frozenset[str] = frozenset()
# Who may read and who may write below a path, by hand from docs/admin.md; the longest prefix decides.
RULES = {
    "/": (ALL, ALL),
    "/v1/organization/costs": (MONEY, NOBODY),
    "/v1/exports": (MONEY, MONEY),
    "/v1/organization/projects": (ALL, ADMINS),
    "/v1/organization/projects/{project_id}/": (BUILDERS, ADMINS),
    "/v1/organization/users": (ADMINS, ADMINS),
    "/v1/organization/invites": (ADMINS, ADMINS),
    "/v1/organization/admin_api_keys": (BUILDERS, ADMINS),
    "/v1/events": (NOBODY, OWNER),
    "/v1/load_lora_adapter": (NOBODY, BUILDERS),
    "/v1/unload_lora_adapter": (NOBODY, BUILDERS),
    "/admin/v1/": (NOBODY, NOBODY),  # the operator's alone, unless a longer path says more
    "/admin/v1/tenant": (ALL, OWNER),
    "/admin/v1/tenants": (NOBODY, NOBODY),
    "/admin/v1/projects": (ALL, ADMINS),
    "/admin/v1/members": (ADMINS, ADMINS),
    "/admin/v1/keys": (BUILDERS, ADMINS),
    "/admin/v1/plans": (ALL, NOBODY),
    "/admin/v1/limits": (ALL, ADMINS),
    "/admin/v1/adapters": (ALL, BUILDERS),
    "/admin/v1/adapters/{digest}/release": (NOBODY, NOBODY),
    "/admin/v1/policies": (BUILDERS, ADMINS),
    "/admin/v1/appeals": (BUILDERS, ADMINS),
    "/admin/v1/appeals/{appeal_id}/ruling": (NOBODY, NOBODY),
    "/admin/v1/suspensions": (BUILDERS, NOBODY),
    "/admin/v1/invoices": (BOOKS, OWNER),
    "/admin/v1/invoices/{reference}/credit-notes": (NOBODY, NOBODY),
    "/admin/v1/credit-notes": (BOOKS, NOBODY),
    "/admin/v1/budgets": (MONEY, MONEY),
    "/admin/v1/export-schedules": (MONEY, MONEY),
    "/admin/v1/prompts": (ALL, BUILDERS),
    "/admin/v1/organisations/usage": (MONEY, NOBODY),
    "/admin/v1/storage": (ALL, NOBODY),
    "/admin/v1/audit": (MONEY, NOBODY),
    "/admin/v1/audit/stream": (ALL, OWNER),
    "/admin/v1/single-sign-on": (ADMINS, OWNER),
    "/admin/v1/decisions": (BUILDERS, NOBODY),
    "/admin/v1/billing": (BOOKS, NOBODY),
    "/admin/v1/billing-plans": (NOBODY, NOBODY),
    "/admin/v1/erasures": (NOBODY, ADMINS),
    "/admin/v1/payments": (BOOKS, NOBODY),
    "/admin/v1/payment-methods": (BOOKS, BOOKS),
    "/admin/v1/subscription": (BOOKS, NOBODY),
    "/admin/v1/response-cache": (ALL, OWNER),
    "/admin/v1/request-log": (ALL, OWNER),
}
# Parameters of paths that only the operator may call: any value gets the same refusal.
OPERATORS_PARAMETERS = (
    *("account", "act_id", "appeal_id", "exemption", "line_id", "month", "payment_id"),
    *("/admin/v1/plans/ name", "/admin/v1/operators/ name", "/admin/v1/suspensions/ key_id"),
)


@dataclass
class World:
    deployment: Deployment
    client: httpx.Client
    acme: Firm
    rival: Firm
    objects: dict[str, str]
    document: dict[str, Any]
    before: dict[str, int]

    def send(self, key: str, request: "Sent") -> httpx.Response:
        headers = {"authorization": f"Bearer {key}"}
        return self.client.request(request.method, request.path, headers=headers, **request.options)

    def unchanged(self) -> list[str]:
        """The tables in which a row of the rival's differs."""
        now = rows_of(self.deployment.services.database, self.rival.id)
        return [name for name, total in self.before.items() if now[name] != total]

    def leaks(self, answer: httpx.Response, sent: str = "") -> list[str]:
        """What of the rival's is in the answer and was not in the request."""
        own = {self.rival.id, WORD, *self.objects.values()} - {"a" * 64}
        return [word for word in own if word in answer.text and word not in sent and len(word) > 7]


@dataclass(frozen=True)
class Sent:
    """A request that names a foreign object."""

    template: str
    method: str
    path: str
    options: dict[str, Any]

    def __str__(self) -> str:
        return f"{self.method} {self.path} {self.options}"


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with (
        running_deployment(tmp_path_factory.mktemp("foreign")) as deployment,
        httpx.Client(base_url=deployment.url, timeout=60) as client,
    ):
        acme, rival = (firm(deployment.services, name) for name in ("acme", "rival"))
        objects = make_objects(deployment, client, rival)
        document = client.get("/openapi.json").json()
        before = _at_rest(deployment, rival)
        yield World(deployment, client, acme, rival, objects, document, before)


def _at_rest(deployment: Deployment, rival: Firm) -> dict[str, int]:
    """Once what the making of the objects began (batches, shipping, rating) is done."""
    deadline = time.monotonic() + 60
    sums, since = rows_of(deployment.services.database, rival.id), time.monotonic()
    while time.monotonic() < since + 1.5:
        assert time.monotonic() < deadline, "the rival's rows still change"
        time.sleep(0.2)
        now = rows_of(deployment.services.database, rival.id)
        if now != sums:
            sums, since = now, time.monotonic()
    return sums


def test_no_operation_reads_or_changes_a_foreign_object(world: World) -> None:
    found: list[str] = []
    sent = 0
    for request in requests(world):
        for role in MEMBER_ROLES:
            answer = world.send(world.acme.keys[role], request)
            found += [f"{role}: {request}: {each}" for each in wrong(world, request, answer)]
            sent += 1
    assert not found, "\n".join(found)
    assert not world.unchanged(), world.unchanged()
    assert sent > 500


def test_a_foreign_object_in_a_body_is_answered_as_one_that_does_not_exist(world: World) -> None:
    invented = {
        name: value[:-6] + "zzzzzz" if "_" in value else "nobodys-adapter"
        for name, value in world.objects.items()
    }
    for role in MEMBER_ROLES:
        key = world.acme.keys[role]
        for real, other in zip(named(world.objects), named(invented), strict=True):
            answer, wanted = world.send(key, real), world.send(key, other)
            assert answer.status_code == wanted.status_code in (400, 403, 404), (real, answer.text)
            text = wanted.text
            for name, value in invented.items():
                text = text.replace(value, world.objects[name]) if value in str(other) else text
            assert _without_ids(answer) == re.sub(REQUEST_ID, "", text), real
    assert not world.unchanged(), world.unchanged()


REQUEST_ID = r"req_\w+"


def _without_ids(answer: httpx.Response) -> str:
    return re.sub(REQUEST_ID, "", answer.text)


def wrong(world: World, request: Sent, answer: httpx.Response) -> list[str]:
    shown = f"{answer.status_code} {answer.text[:200]}"
    if answer.status_code not in (403, 404):
        return [shown]
    return [f"shows {each}: {shown}" for each in world.leaks(answer, str(request))]


def requests(world: World) -> Iterator[Sent]:
    parts = world.document["components"]["schemas"]
    for template, operations in world.document["paths"].items():
        for method in sorted({*operations} & {"get", "post", "put", "patch", "delete"}):
            operation = operations[method]
            options = BODIES.get(template) or _options(operation, parts)
            verb = method.upper()
            if method in ("get", "delete"):
                options = {}
            if "{" in template:
                yield Sent(template, verb, _filled(world, template), options)
            plain = re.sub(r"\{[^}]+\}", "nothing", template)
            if TENANT.items() <= _parameters(operation).items():
                given = TENANTS.get(template, options)
                yield Sent(template, verb, plain, given | {"params": {"tenant": world.rival.name}})


def _parameters(operation: dict[str, Any]) -> dict[str, str]:
    return {each["name"]: each["in"] for each in operation.get("parameters", ())}


def _options(operation: dict[str, Any], parts: dict[str, Any]) -> dict[str, Any]:
    content = operation.get("requestBody", {}).get("content", {})
    if "application/json" in content:
        return {"json": example(content["application/json"]["schema"], parts)}
    return {"data": {"name": "x"}} if content else {}


def named(objects: dict[str, str]) -> Iterator[Sent]:
    for (verb, template), options in NAMED.items():
        yield Sent(template, verb, template, _with_objects(options, objects))


def _filled(world: World, template: str) -> str:
    def value(match: re.Match[str]) -> str:
        name = match[1]
        for key in world.objects:
            prefix, _, short = key.rpartition(" ")
            if prefix and short == name and template.startswith(prefix):
                return world.objects[key]
        if any(
            template.startswith(each.rpartition(" ")[0]) and each.rpartition(" ")[2] == name
            for each in OPERATORS_PARAMETERS
        ):
            return "1"
        return world.objects[name]  # a KeyError: make an object for the new parameter

    return re.sub(r"\{([^}:]+)[^}]*\}", value, template)


TENANT = {"tenant": "query"}
# Bodies for which the required fields are not enough.
BODIES: dict[str, dict[str, Any]] = {
    "/v1/conversations/{conversation_id}": {"json": {"metadata": {"a": "b"}}},
    "/v1/conversations/{conversation_id}/items": {
        "json": {"items": [{"type": "message", "role": "user", "content": "x"}]}
    },
    "/admin/v1/export-schedules/{schedule_id}": {"json": {"paused": True}},
    "/admin/v1/prompts/{prompt_id}/versions": {"json": {"messages": MESSAGES}},
    "/admin/v1/members/{member_id}/password": {"json": {"password": "another long password 2"}},
}
# Bodies of requests with another tenant's name, where the drawn one is complete without an object.
TENANTS = {"/mcp": {"json": {"jsonrpc": "2.0", "id": 1, "method": "tools/list"}}}
# Requests whose bodies or queries name the rival's object; `<key>` is its id.
CHAT = {"model": MODEL, "messages": MESSAGES}
NAMED: dict[tuple[str, str], dict[str, Any]] = {
    ("POST", "/v1/chat/completions"): {"json": CHAT | {"model": "<model>"}},
    ("POST", "/v1/completions"): {"json": {"model": "<model>", "prompt": "x"}},
    ("POST", "/v1/messages"): {"json": CHAT | {"model": "<model>", "max_tokens": 1}},
    ("POST", "/v1/messages/count_tokens"): {"json": CHAT | {"model": "<model>"}},
    ("POST", "/tokenize"): {"json": {"model": "<model>", "prompt": "x"}},
    ("POST", "/detokenize"): {"json": {"model": "<model>", "tokens": [1]}},
    ("POST", "/v1/responses"): {
        "json": {"model": MODEL, "input": "x", "previous_response_id": "<response_id>"}
    },
    ("POST", "/v1/responses/input_tokens"): {
        "json": {"model": MODEL, "input": "x", "previous_response_id": "<response_id>"}
    },
    ("POST", "/v1/batches"): {
        "json": {
            "input_file_id": "<file_id>",
            "endpoint": "/v1/chat/completions",
            "completion_window": "24h",
        }
    },
    ("POST", "/v1/unload_lora_adapter"): {"json": {"lora_name": "<name>"}},
    ("POST", "/admin/v1/keys"): {"json": {"project_id": "<project_id>", "name": "x"}},
    ("PUT", "/admin/v1/limits"): {
        "json": {"scope": "key", "unit": "requests", "limit": 1, "target": "<key_id>"}
    },
    ("POST", "/admin/v1/budgets"): {
        "json": {"cap": "1", "scope": "project", "scope_id": "<project_id>"}
    },
    ("PUT", "/admin/v1/policies"): {
        "json": {}, "params": {"level": "project", "target": "<project_id>"}
    },
}  # fmt: skip


def _with_objects(value: Any, objects: dict[str, str]) -> Any:
    if isinstance(value, dict):
        return {key: _with_objects(each, objects) for key, each in value.items()}
    if isinstance(value, str) and value.startswith("<"):
        return objects[value.strip("<>")]
    return value


class _Forms(HTMLParser):
    """The forms of a page: the address and the fields, with the first choice of each."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str]]] = []
        self._open = False
        self._select = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        if tag == "form":
            self._open = given.get("method", "get").lower() == "post"
            if self._open:
                self.found.append((given.get("action", ""), {}))
        elif self._open and tag in ("input", "button", "textarea") and given.get("name"):
            value = given.get("value", "") or given.get("placeholder", "") or "x"
            self.found[-1][1].setdefault(given["name"], value)
        elif self._open and tag == "select":
            self._select = given.get("name", "")
        elif self._open and tag == "option" and self._select:
            self.found[-1][1].setdefault(self._select, given.get("value", ""))

    def handle_endtag(self, tag: str) -> None:
        self._open = self._open and tag != "form"
        self._select = "" if tag == "select" else self._select


def test_no_form_of_the_owners_pages_works_for_another_tenant(world: World) -> None:
    pages = [section.path for section in SECTIONS if not section.operator]
    pages.append(f"/invoices/{world.objects['reference']}")
    forms: list[tuple[str, dict[str, str]]] = []
    with closing(browser(world.deployment, world.rival.keys["owner"])) as client:
        for path in pages:
            forms += _forms(client.get(f"/dashboard{path}"))
    named = [form for form in forms if _names_an_object(world, form)]
    assert len(named) > 10 and len(forms) > len(named)
    before = _at_rest(world.deployment, world.rival)
    found: list[str] = []
    for role in MEMBER_ROLES:
        with closing(browser(world.deployment, world.acme.keys[role])) as client:
            for path in pages:
                found += [
                    f"{role} {path} shows {each}"
                    for each in world.leaks(client.get(f"/dashboard{path}"), path)
                ]
            for action, fields in named:
                answer = client.post(action, data=fields)
                shown = f"{role} {action} {fields}: {answer.status_code}"
                if answer.status_code not in (400, 403, 404):
                    found.append(shown)
                found += [
                    f"{shown} shows {each}" for each in world.leaks(answer, f"{action} {fields}")
                ]
    assert not found, "\n".join(found)
    assert _at_rest(world.deployment, world.rival) == before


def _forms(page: httpx.Response) -> list[tuple[str, dict[str, str]]]:
    assert page.status_code == 200, page.url
    parser = _Forms()
    parser.feed(page.text)
    own = page.url.path
    forms = [(action or own, fields) for action, fields in parser.found]
    return [form for form in forms if not form[0].endswith(("/sign-out", "/theme"))]


def _names_an_object(world: World, form: tuple[str, dict[str, str]]) -> bool:
    action, fields = form
    named = {world.rival.id, *world.objects.values()}
    return any(each in action or each in fields.values() for each in named)


def test_the_owner_of_the_objects_finds_them(world: World) -> None:
    """Last, because it changes them: the deeper paths first, deletions after everything else."""
    found: list[str] = []
    ordered = [
        *(each for each in named(world.objects) if "unload" not in each.path),
        *(each for each in requests(world) if "params" not in each.options),
    ]
    ordered.sort(
        key=lambda each: (each.path.endswith("/archive"), each.method == "DELETE", -len(each.path))
    )
    for request in ordered:
        if "credit-notes" in request.path:
            continue  # the invoice has none
        answer = world.send(world.rival.keys["owner"], request)
        if answer.status_code == 404 or (answer.status_code == 403 and not _operators(request)):
            found.append(f"{request}: {answer.status_code} {answer.text[:200]}")
    assert not found, "\n".join(found)


def _operators(request: Sent) -> bool:
    read, write = _rule(request.template)
    return not (read if request.method == "GET" else write)


def _rule(template: str) -> tuple[frozenset[str], frozenset[str]]:
    return RULES[max((each for each in RULES if template.startswith(each)), key=len)]


def test_a_role_may_do_what_the_table_says_and_nothing_else(world: World) -> None:
    """With objects that do not exist: who may use the route hears 404 or 400, the others 403."""
    found: list[str] = []
    for template, operations in world.document["paths"].items():
        path = re.sub(r"\{[^}]+\}", "nothing", template)
        for method in sorted({*operations} & {"get", "post", "put", "patch", "delete"}):
            read, write = _rule(template)
            for role in MEMBER_ROLES:
                sent = Sent(template, method.upper(), path, {})
                status = world.send(world.acme.keys[role], sent).status_code
                may = role in (read if method == "get" else write)
                if status == 401 or (status == 403) == may:
                    found.append(f"{role}: {method} {template}: {status}")
    assert not found, "\n".join(found)
