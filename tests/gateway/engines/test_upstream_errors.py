"""What clients and the breaker make of an upstream's errors: never the upstream's own words."""

import json
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from core.clock import SystemClock
from core.tenants import keys
from core.tenants.organisations import create_project, create_tenant
from core.tenants.scope import scope_of_operator
from tests.gateway.deployment import MODEL, Deployment, running_deployment
from tests.gateway.fake_upstream import Server, upstream

PATH = "/v1/chat/completions"
SECRET = "http://10.0.0.7:8000 said to org_other: my password is tulip"
GOOD = {
    "choices": [
        {"index": 0, "message": {"role": "assistant", "content": "Yes"}, "finish_reason": "stop"}
    ],
    "usage": {"prompt_tokens": 3, "completion_tokens": 1},
}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with upstream() as made:
        yield made


@pytest.fixture
def reseller(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    settings = {"upstreams": json.dumps([{"url": server.url, "name": "u", "model": MODEL}])}
    path = tmp_path_factory.mktemp("reseller")
    with running_deployment(path, engines=None, settings=settings) as deployment:
        yield deployment
    server.statuses.clear()


def key_of_another_tenant(deployment: Deployment) -> str:
    clock = SystemClock()
    with deployment.services.database.transaction() as session:
        tenant = create_tenant(session, clock, name="other")
        scope = scope_of_operator(tenant.id)
        project = create_project(session, scope, clock, name="default").id
        return keys.issue(session, scope, clock, project_id=project, name="k").secret


def ask(deployment: Deployment, key: str = "", **more: Any) -> httpx.Response:
    headers = {"authorization": f"Bearer {key}"} if key else deployment.headers
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
    return httpx.post(f"{deployment.url}{PATH}", json=body | more, headers=headers, timeout=60)


def test_no_word_of_the_upstream_reaches_the_tenant(
    reseller: Deployment, server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    bodies: list[Any] = [
        {"error": {"message": SECRET}},
        {"error": SECRET},
        {"detail": SECRET},
        SECRET,
    ]
    for status in (400, 401, 404, 413, 422, 429, 500, 502):
        server.answers[PATH], server.statuses[PATH] = bodies[status % 4], status
        answer = ask(reseller)
        assert answer.status_code >= 400
        for word in ("tulip", "10.0.0.7", "org_other", "None"):
            assert word not in answer.text
        if status not in (429,):
            assert answer.headers["x-request-id"] in answer.text, "the id under which it is logged"
        assert "tulip" in caplog.text
        caplog.clear()
        reseller.services.router.of(MODEL)[0].breaker.succeeded()
    server.statuses.clear()
    server.answers[PATH] = [{"error": {"message": SECRET, "code": 500}}]
    assert "tulip" not in ask(reseller, stream=True).text


def test_a_connection_error_does_not_name_the_host(tmp_path: Any) -> None:
    settings = {"upstreams": json.dumps([{"url": "http://127.0.0.1:9", "model": MODEL}])}
    with running_deployment(tmp_path, engines=None, settings=settings) as deployment:
        answer = ask(deployment)
        assert answer.status_code == 503
        assert "127.0.0.1" not in answer.text


@pytest.mark.parametrize(
    ("status", "error", "code"),
    [
        (400, {"message": "bad", "type": "BadRequestError"}, "upstream_refused"),
        (413, {"message": "too big"}, "payload_too_large"),
        (422, {"message": "no"}, "upstream_refused"),
        (400, {"message": "This model's maximum context length is 9"}, "context_length_exceeded"),
        (500, {"message": "exceeds the available context size"}, "context_length_exceeded"),
        (500, {"code": "content_filter", "message": "no"}, "content_filter"),
        (403, {"code": "content_policy_violation"}, "content_filter"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_errors_of_one_tenants_making_do_not_close_a_model_for_all(
    reseller: Deployment, server: Server, status: int, error: Any, code: str, stream: bool
) -> None:
    if stream:
        server.answers[PATH] = [{"error": {**error, "code": error.get("code", status)}}]
    else:
        server.answers[PATH], server.statuses[PATH] = {"error": error}, status
    for _ in range(4):
        answer = ask(reseller, stream=stream)
        assert answer.json()["error"]["code"] == code
    server.statuses.clear()
    server.answers[PATH] = GOOD
    assert ask(reseller).status_code == 200


def test_errors_that_one_tenant_gets_refuse_no_other(reseller: Deployment, server: Server) -> None:
    server.answers[PATH], server.statuses[PATH] = {"error": {"message": "bad prompt"}}, 500
    for _ in range(4):
        assert ask(reseller).status_code == 503
    assert reseller.services.router.of(MODEL)[0].breaker.state == "closed"
    server.statuses.clear()
    server.answers[PATH] = GOOD
    key = key_of_another_tenant(reseller)
    assert ask(reseller, key).status_code == 200
    deadline = time.monotonic() + 30
    while ask(reseller).status_code != 200:  # its own breaker lets one request through
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_failures_of_the_server_itself_do_open_the_breaker(
    reseller: Deployment, server: Server
) -> None:
    server.answers[PATH], server.statuses[PATH] = {"error": {"message": "CUDA error"}}, 500
    key = key_of_another_tenant(reseller)
    for _ in range(3):
        assert ask(reseller).status_code == 503
        assert ask(reseller, key).status_code == 503
    assert reseller.services.router.of(MODEL)[0].breaker.state in ("open", "half_open")


@pytest.mark.parametrize(("needs", "status"), [("disk,serving", 503), ("disk", 200)])
def test_a_process_without_an_engine_is_ready_where_pages_are_all_that_it_serves(
    tmp_path: Any, needs: str, status: int
) -> None:
    settings = {
        "upstreams": json.dumps([{"url": "http://127.0.0.1:9", "model": MODEL}]),
        "ready_needs": needs,
    }
    with running_deployment(tmp_path, engines=None, settings=settings) as deployment:
        replica = deployment.services.router.of(MODEL)[0]
        for _ in range(3):
            replica.breaker.failed()
        ready = httpx.get(f"{deployment.url}/readyz", timeout=10)
        assert ready.status_code == status
        (part,) = [p for name, p in ready.json()["parts"].items() if name.startswith("engine")]
        assert not part["ready"] and part["unserved"] == [MODEL]
