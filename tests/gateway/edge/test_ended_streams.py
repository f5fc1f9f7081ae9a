"""Requests that are ended from outside: by the end of a drain, and when the right of their key ends."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from core.tenants import keys
from core.tenants.models import Project
from core.tenants.organisations import change_tenant
from core.tenants.scope import scope_of_operator
from tests.gateway.deployment import MODEL, Deployment, running_deployment
from tests.gateway.serving.test_background import charged, ended, start

LONG = 400  # tokens, at 20 ms each
ROUTES = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": LONG},
    "/v1/completions": {"prompt": "Hi", "max_tokens": LONG},
    "/v1/responses": {"input": "Hi", "max_output_tokens": LONG},
    "/v1/messages": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": LONG},
}
WAYS = [(route, stream) for route in ROUTES for stream in (True, False)]
# What Messages says in place of a code.
KINDS = {"draining": "overloaded_error", "invalid_api_key": "authentication_error"}


class Asked:
    """One request in a thread of its own; `seconds` from `mark` to its end."""

    def __init__(self, deployment: Deployment, key: str, route: str, *, stream: bool) -> None:
        self.route, self.stream = route, stream
        self.status, self.read, self.ended_at = 0, b"", 0.0
        self.request_id: str | None = None
        self.begun = threading.Event()
        self._url, self._key = deployment.url, key

    def run(self) -> None:
        body = {"model": MODEL, "stream": self.stream, **ROUTES[self.route]}
        headers = {"authorization": f"Bearer {self._key}"}
        with (
            httpx.Client(base_url=self._url, timeout=60, headers=headers) as client,
            client.stream("POST", self.route, json=body) as answer,
        ):
            self.status, self.request_id = answer.status_code, answer.headers["x-request-id"]
            for data in answer.iter_raw():
                self.read += data
                if self.read.count(b"\ndata: ") + self.read.startswith(b"data: ") > 5:
                    self.begun.set()
        self.ended_at = time.monotonic()

    @property
    def error(self) -> str:
        """Its code, or on Messages its type; of a stream, of its last event alone."""
        if self.read.startswith(b"{"):
            found = json.loads(self.read)
        else:
            lines = [line[6:] for line in self.read.split(b"\n") if line.startswith(b"data: {")]
            found = json.loads(lines[-1])
        if found.get("type") == "response.failed":
            return str(found["response"]["error"]["code"])
        error = found.get("error") or found
        return str(error.get("code") or error["type"])


def all_of(deployment: Deployment, key: str, act: Callable[[], float]) -> list[Asked]:
    """A request of each way, ended by `act`, which returns when it did."""
    asked = [Asked(deployment, key, route, stream=stream) for route, stream in WAYS]
    submitted = len(deployment.engine.submitted)
    with ThreadPoolExecutor(len(asked)) as pool:
        running: list[Future[None]] = [pool.submit(each.run) for each in asked]
        assert all(each.begun.wait(30) for each in asked if each.stream)
        while len(deployment.engine.submitted) < submitted + len(asked):
            time.sleep(0.01)
        at = act()
        for each in running:
            each.result(30)
    for each in asked:
        each.ended_at -= at
    return asked


def on(asked: Asked, code: str, kind: str) -> str:
    """The code as the route shows it: Messages its kind, a response that has failed few codes."""
    if asked.route == "/v1/responses" and asked.stream:
        return "server_error"
    return kind if asked.route == "/v1/messages" else code


def check(deployment_events: Callable[[str | None], dict[str, Any]], asked: list[Asked]) -> None:
    """What a stream had is billed, and nothing of what came whole."""
    for each in asked:
        event = deployment_events(each.request_id)
        if each.stream:
            assert 0 < event["output_tokens"] < LONG and event["input_tokens"] > 0, event
        else:
            billed = (event["input_tokens"], event["output_tokens"], event["quantity"])
            assert billed == (0, 0, 0) and event["waived_tokens"] > 0, event


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    with running_deployment(
        tmp_path_factory.mktemp("ended"), token_delay_s=0.02, settings={"moderation": "off"}
    ) as made:
        yield made


def key_of(deployment: Deployment) -> tuple[str, str]:
    """A key's id and secret."""
    services = deployment.services
    scope = scope_of_operator(deployment.tenant_id)
    with services.database.transaction() as session:
        (project,) = session.query(Project).filter_by(tenant_id=deployment.tenant_id)
        made = keys.issue(session, scope, services.clock, project_id=project.id, name="k")
    return made.id, made.secret


def change(deployment: Deployment, what: str, key_id: str) -> float:
    services = deployment.services
    scope = scope_of_operator(deployment.tenant_id)
    with services.database.transaction() as session:
        if what == "revoked":
            keys.revoke(session, scope, services.clock, key_id)
        else:
            change_tenant(session, scope, services.clock, status=what)
    return time.monotonic()


@pytest.mark.parametrize(
    ("what", "status", "code"),
    [("revoked", 401, "invalid_api_key"), ("suspended", 403, "permission_denied")],
)
def test_what_runs_ends_with_the_right_of_its_key(
    slow: Deployment, what: str, status: int, code: str
) -> None:
    key_id, secret = key_of(slow)
    asked = all_of(slow, secret, lambda: change(slow, what, key_id))
    if what != "revoked":
        change(slow, "active", key_id)
    for each in asked:
        assert each.status == (200 if each.stream else status), each.read
        wanted = {"permission_denied": "permission_error", **KINDS}[code]
        assert each.error == on(each, code, wanted), each.read
        assert each.ended_at < 2.0, each.ended_at  # a second, and this machine is busy
    check(slow.event, asked)


def test_a_key_whose_tenant_is_active_again_serves(slow: Deployment) -> None:
    key_id, secret = key_of(slow)
    change(slow, "suspended", key_id)
    time.sleep(1.0)
    change(slow, "active", key_id)
    deadline = time.monotonic() + 10
    while True:
        body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
        headers = {"authorization": f"Bearer {secret}"}
        answer = httpx.post(f"{slow.url}/v1/chat/completions", json=body, headers=headers)
        if answer.status_code == 200:
            return
        assert time.monotonic() < deadline, answer.text
        time.sleep(0.1)


def test_a_background_response_ends_with_its_key_and_says_so(slow: Deployment) -> None:
    from openai import OpenAI

    key_id, secret = key_of(slow)
    with OpenAI(base_url=f"{slow.url}/v1", api_key=secret, max_retries=0) as client:
        made = start(client, tokens=LONG)
        time.sleep(0.5)
        change(slow, "revoked", key_id)
    with OpenAI(base_url=f"{slow.url}/v1", api_key=slow.key, max_retries=0) as client:
        assert ended(client, made.id).status == "failed"
    event = charged(slow, made.id)
    assert 0 < event["output_tokens"] < LONG and event["finish_reason"] == "invalid_api_key"


def test_a_deleted_background_response_stops_and_the_rest_is_waived(slow: Deployment) -> None:
    from openai import OpenAI

    with OpenAI(base_url=f"{slow.url}/v1", api_key=slow.key, max_retries=0) as client:
        made = start(client, tokens=LONG)
        time.sleep(0.3)
        client.responses.delete(made.id)
    event = charged(slow, made.id)
    assert event["output_tokens"] + event["waived_tokens"] < LONG / 2


def test_streams_that_a_drain_cuts_end_with_an_error_event(tmp_path: Path) -> None:
    running = running_deployment(
        tmp_path, token_delay_s=0.02, drain_s=0.5, settings={"moderation": "off"}
    )
    deployment = running.__enter__()
    events: dict[str, dict[str, Any]] = {}

    def _stop() -> float:
        at = time.monotonic()
        running.__exit__(None, None, None)
        return at

    asked = all_of(deployment, deployment.key, _stop)
    for each in asked:
        assert each.status == (200 if each.stream else 503), each.read
        assert each.error == on(each, "draining", KINDS["draining"]), each.read
        assert not each.stream or b"\nretry: 1000\ndata: " in each.read
    again = running_deployment(tmp_path)
    with again as deployment:
        for row in deployment.events(len(WAYS)):
            events[row["request_id"]] = row
    check(lambda request_id: events[str(request_id)], asked)
