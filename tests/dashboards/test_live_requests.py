"""The live list: rows come as requests are shipped, of the viewer's tenant and query alone, each once."""

import threading
import time
from contextlib import closing

import httpx
import pytest

from core.tenants.organisations import create_tenant
from dashboards import live_requests
from tests.dashboards.browser_client import browser, with_role
from tests.gateway.deployment import MODEL, Deployment

LIVE = "/dashboard/requests/live"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_requests, "_EVERY_S", 0.05)
    monkeypatch.setattr(live_requests, "_LIFE_S", 4.0)


def ask(deployment: Deployment, **body: object) -> str:
    plain = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
    url = f"{deployment.url}/v1/chat/completions"
    answer = httpx.post(url, json=plain | body, headers=deployment.headers, timeout=60)
    request_id = answer.headers["x-request-id"]
    deployment.event(request_id)
    return request_id


class Listener:
    """The lines of one connection, read in a thread until the server ends it."""

    def __init__(self, client: httpx.Client, query: str = "", since: str = "") -> None:
        self.lines: list[str] = []
        self._headers = {"last-event-id": since} if since else {}
        self._client, self._url = client, f"{LIVE}{query}"
        self._thread = threading.Thread(target=self._listen)
        self._thread.start()

    def _listen(self) -> None:
        with self._client.stream("GET", self._url, headers=self._headers) as answer:
            assert answer.status_code == 200
            assert answer.headers["content-type"].startswith("text/event-stream")
            for line in answer.iter_lines():
                self.lines.append(line)

    def until_open(self) -> "Listener":
        deadline = time.monotonic() + 20
        while not any(line.startswith(": ") for line in self.lines):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        return self

    def all(self) -> list[str]:
        """The rows, once the connection has ended."""
        self._thread.join(30)
        return [line for line in self.lines if line.startswith("data: ")]


def test_rows_come_as_requests_end_and_each_once(
    deployment: Deployment, owner: httpx.Client
) -> None:
    old = ask(deployment)
    listener = Listener(owner).until_open()
    names = [ask(deployment) for _ in range(3)]
    rows = listener.all()
    assert [next(name for name in names if name in row) for row in rows] == names
    assert not any(old in row for row in rows)
    assert all(row.startswith("data: <tr><td>") for row in rows)


def test_only_what_the_query_finds(deployment: Deployment, owner: httpx.Client) -> None:
    listener = Listener(owner, "?q=end:nothing").until_open()
    ask(deployment)
    assert listener.all() == []


def test_another_tenant_sees_nothing(deployment: Deployment) -> None:
    services = deployment.services
    with services.database.transaction() as session:
        other = create_tenant(session, services.clock, name="other")
    with closing(browser(deployment, services.operator_token)) as operator:
        operator.post("/dashboard/operator/look", data={"act": "look", "tenant": other.name})
        listener = Listener(operator).until_open()
        ask(deployment)
        assert listener.all() == []


def test_a_lost_connection_goes_on_where_it_ended(
    deployment: Deployment, owner: httpx.Client
) -> None:
    ask(deployment)
    listener = Listener(owner).until_open()
    ask(deployment)
    assert len(listener.all()) == 1
    last = [line for line in listener.lines if line.startswith("id: ")][-1].removeprefix("id: ")
    missed = ask(deployment)
    assert any(missed in row for row in Listener(owner, since=last).all())


def test_a_role_without_costs_gets_no_charges(deployment: Deployment, owner: httpx.Client) -> None:
    with closing(browser(deployment, with_role(deployment, "viewer"))) as viewer:
        assert viewer.get("/dashboard/costs").status_code == 403
        listeners = [Listener(each).until_open() for each in (viewer, owner)]
        ask(deployment)
        without, whole = (each.all()[0].count("<td") for each in listeners)
    assert whole == without + 1


def test_without_a_session_there_is_no_list(deployment: Deployment) -> None:
    answer = httpx.get(f"{deployment.url}{LIVE}")
    assert answer.status_code == 303 and answer.headers["location"].endswith("/sign-in")
