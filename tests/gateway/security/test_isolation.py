"""Tenant against tenant: nothing of one is reached through any route by another's credentials."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from core.clock import SystemClock
from core.tenants import adapters, keys
from core.tenants.organisations import create_project, create_tenant
from core.tenants.scope import scope_of_operator
from tests.gateway.deployment import Deployment, running_deployment

CHAT = "/v1/chat/completions"
SECRET_PROMPT = "what nobody else may read: heliotrope"


@dataclass
class Two:
    deployment: Deployment
    client: httpx.Client
    victim: str  # a key
    victim_tenant: str
    victim_project: str
    thief: str

    def call(self, method: str, path: str, key: str, **options: Any) -> httpx.Response:
        headers = {"authorization": f"Bearer {key}"} | options.pop("headers", {})
        return self.client.request(method, path, headers=headers, **options)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Two]:
    clock = SystemClock()
    with running_deployment(tmp_path_factory.mktemp("two")) as deployment:
        with deployment.services.database.transaction() as session:
            tenant = create_tenant(session, clock, name="victim")
            scope = scope_of_operator(tenant.id)
            project = create_project(session, scope, clock, name="default").id
            key = keys.issue(session, scope, clock, project_id=project, name="k", role="owner")
            adapters.register(
                session,
                scope,
                clock,
                name="victims-own",
                base_model="tiny",
                digest="0" * 64,
                path="nowhere",
                rank=4,
                bytes=1,
            )
        deployment.services.adapters.refresh()
        with httpx.Client(base_url=deployment.url, timeout=60) as client:
            made = Two(deployment, client, key.secret, tenant.id, project, deployment.key)
            body = {"model": "tiny", "messages": [{"role": "user", "content": SECRET_PROMPT}]}
            assert made.call("POST", CHAT, key.secret, json=body).status_code == 200
            deployment.events(1)
            yield made


def _paths(two: Two) -> Iterator[tuple[str, str]]:
    document = two.client.get("/openapi.json").json()
    for path, methods in document["paths"].items():
        for method in methods:
            if method != "parameters":
                yield method.upper(), path


def test_no_route_shows_another_tenants_ids_names_or_words(two: Two) -> None:
    telltale = (two.victim_tenant, two.victim_project, "victims-own", "heliotrope")
    seen = 0
    for method, path in _paths(two):
        if method != "GET":
            continue
        real = path.replace("{", "").replace("}", "")
        for query in ({}, {"tenant": two.victim_tenant}, {"project_ids": two.victim_project}):
            answer = two.call("GET", real, two.thief, params=query)
            assert answer.status_code < 500, (real, answer.text)
            shown = answer.text if answer.status_code == 200 else ""
            assert not [word for word in telltale if word in shown], (real, query)
            seen += 1
    assert seen >= 30


@pytest.mark.parametrize("name", ["victims-own", "tiny:victims-own"])
def test_anothers_adapter_is_not_there(two: Two, name: str) -> None:
    body = {"model": name, "messages": [{"role": "user", "content": "hello"}]}
    answer = two.call("POST", CHAT, two.thief, json=body)
    assert answer.status_code == 404 and answer.json()["error"]["code"] == "model_not_found"
    assert name not in two.call("GET", "/v1/models", two.thief).text
    assert name.rpartition(":")[2] in two.call("GET", "/v1/models", two.victim).text


def test_the_tenant_comes_from_the_key_and_from_nothing_in_the_request(two: Two) -> None:
    """Bodies and headers that claim another tenant change nothing about who is billed."""
    known = {row["request_id"] for row in two.deployment.events(1)}
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "hello"}],
        "user": two.victim_tenant,
        "safety_identifier": two.victim_tenant,
    }
    headers = {
        "x-tenant-id": two.victim_tenant,
        "openai-organization": two.victim_tenant,
        "openai-project": two.victim_project,
    }
    answer = two.call("POST", CHAT, two.thief, json=body, headers=headers)
    if answer.status_code == 200:
        rows = two.deployment.events(len(known) + 1)
        fresh = [row for row in rows if row["request_id"] not in known]
        assert [row["tenant_id"] for row in fresh] == [two.deployment.tenant_id]
    else:
        assert answer.status_code in (400, 403), answer.text


def test_the_engines_namespace_is_the_tenant_so_caches_are_apart(two: Two) -> None:
    """The root of the prefix chain is the tenant of the key: a shared prompt is not a shared cache."""
    body = {"model": "tiny", "messages": [{"role": "user", "content": SECRET_PROMPT}]}
    assert two.call("POST", CHAT, two.thief, json=body).status_code == 200
    assert two.call("POST", CHAT, two.victim, json=body).status_code == 200
    requests = two.deployment.engine.submitted[-2:]
    assert {request.namespace for request in requests} == {
        two.deployment.tenant_id,
        two.victim_tenant,
    }


def test_errors_tell_nothing_of_the_inside(two: Two) -> None:
    for body in ("{", '{"model": 7}', json.dumps({"model": "tiny"}), "[" * 100_000, "\ud800"):
        content = body.encode("utf-8", "surrogatepass")
        answer = two.call(
            "POST", CHAT, two.thief, content=content, headers={"content-type": "application/json"}
        )
        assert 400 <= answer.status_code < 500, answer.text
        assert "Traceback" not in answer.text and ".py" not in answer.text
