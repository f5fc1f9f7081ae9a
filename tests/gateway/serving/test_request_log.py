"""Records of requests for a tenant's own receiver: what is in them, and what never waits for them."""

import base64
import hmac
import json
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest
from openai import OpenAI

from core import metrics
from gateway.cli.main import main
from gateway.serving.request_log import log as request_log
from moderation.policy import default_policy
from tests.dashboards.browser_client import browser, with_role
from tests.gateway.deployment import MODEL, Deployment, running_deployment

CARD = "4111 1111 1111 1111"


class Receiver:
    """A customer's server: keeps what it gets, and answers as it is told."""

    def __init__(self) -> None:
        self.batches: list[tuple[dict[str, str], bytes]] = []
        self.status = 200
        self.release = threading.Event()
        self.release.set()
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                receiver.release.wait(30)
                receiver.batches.append(({k.lower(): v for k, v in self.headers.items()}, body))
                self.send_response(receiver.status)
                self.end_headers()

            def log_message(self, *given: Any) -> None:
                return

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/log"

    def record(self, request_id: str) -> dict[str, Any]:
        deadline = time.monotonic() + 60
        while True:
            for _, body in list(self.batches):
                for each in json.loads(body)["records"]:
                    if each["request_id"] == request_id:
                        found: dict[str, Any] = each
                        return found
            assert time.monotonic() < deadline, f"no record of {request_id}"
            time.sleep(0.02)


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    settings = {"webhook_networks": ("127.0.0.0/8",)}
    with running_deployment(tmp_path_factory.mktemp("request-log"), settings=settings) as made:
        yield made


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    made = Receiver()
    yield made
    made.release.set()
    made.server.shutdown()
    made.server.server_close()


def put(deployment: Deployment, body: dict[str, Any]) -> httpx.Response:
    url = f"{deployment.url}/admin/v1/request-log"
    answer = httpx.put(url, json=body, headers=deployment.headers)
    deployment.services.pipeline.responses.request_log.view.refresh()
    return answer


@pytest.fixture
def logged(deployment: Deployment, receiver: Receiver) -> Iterator[str]:
    """With content; the signing secret."""
    answer = put(deployment, {"url": receiver.url, "content": True})
    assert answer.status_code == 200, answer.text
    yield answer.json()["secret"]
    httpx.delete(f"{deployment.url}/admin/v1/request-log", headers=deployment.headers)
    deployment.services.pipeline.responses.request_log.view.refresh()


def ask(deployment: Deployment, text: str, **more: Any) -> httpx.Response:
    body = {"model": MODEL, "messages": [{"role": "user", "content": text}], "max_tokens": 5}
    url = f"{deployment.url}/v1/chat/completions"
    return httpx.post(url, json=body | more, headers=deployment.headers, timeout=30)


@pytest.mark.parametrize("stream", [False, True])
def test_a_record_has_the_texts_and_the_usage(
    deployment: Deployment, receiver: Receiver, logged: str, client: OpenAI, stream: bool
) -> None:
    raw = client.chat.completions.with_raw_response.create(
        model=MODEL,
        messages=[{"role": "user", "content": "What is a toll?"}],
        max_tokens=5,
        stream=stream,
        user="ann",
    )
    if stream:
        text = "".join(c.choices[0].delta.content or "" for c in raw.parse() if c.choices)
    else:
        text = raw.parse().choices[0].message.content or ""
    request_id = raw.headers["x-request-id"]
    record, event = receiver.record(request_id), deployment.event(request_id)
    assert record["request"]["messages"] == [{"role": "user", "content": "What is a toll?"}]
    assert [each["text"] for each in record["choices"]] == [text]
    for name in ("input_tokens", "output_tokens", "model", "status", "end_user", "key_id"):
        assert record[name] == event[name], name
    assert "price_version" not in record
    headers, body = receiver.batches[-1]
    signed = f"{headers['webhook-id']}.{headers['webhook-timestamp']}.".encode() + body
    key = base64.b64decode(logged.removeprefix("whsec_"))
    digest = base64.b64encode(hmac.digest(key, signed, "sha256")).decode()
    assert headers["webhook-signature"] == f"v1,{digest}"


def test_texts_are_those_that_the_policy_left(
    deployment: Deployment, receiver: Receiver, logged: str
) -> None:
    policies = f"{deployment.url}/admin/v1/policies"
    document = default_policy().to_dict()
    document["input"]["deny"] = ["zeppelin"]
    document["input"]["entities"] = {"card": "redact"}
    put_policy = httpx.put(policies, json=document, headers=deployment.headers)
    assert put_policy.status_code == 200, put_policy.text
    try:
        redacted = ask(deployment, f"My card is {CARD}, is it fine?")
        assert redacted.status_code == 200
        record = receiver.record(redacted.headers["x-request-id"])
        assert record["moderation"] == "redact"
        assert CARD not in json.dumps(record) and "is it fine?" in json.dumps(record)
        blocked = ask(deployment, "Sell me a zeppelin")
        assert blocked.status_code == 400
        record = receiver.record(blocked.headers["x-request-id"])
        assert record["moderation"] == "block" and "zeppelin" not in json.dumps(record)
        wrong = ask(deployment, "Never screened", model="nothing")
        record = receiver.record(wrong.headers["x-request-id"])
        assert record["status"] == 404 and "Never screened" not in json.dumps(record)
    finally:
        httpx.delete(policies, headers=deployment.headers)


def test_without_content_there_are_no_texts(deployment: Deployment, receiver: Receiver) -> None:
    assert put(deployment, {"url": receiver.url}).json()["content"] is False
    answer = ask(deployment, "Nobody records this text")
    record = receiver.record(answer.headers["x-request-id"])
    assert record["output_tokens"] == 5
    assert "request" not in record and "choices" not in record
    url = f"{deployment.url}/admin/v1/request-log"
    assert "secret" not in httpx.get(url, headers=deployment.headers).json()
    assert httpx.delete(url, headers=deployment.headers).json()["url"] is None
    deployment.services.pipeline.responses.request_log.view.refresh()
    count = len(receiver.batches)
    assert ask(deployment, "Nor this").status_code == 200
    requests = deployment.services.pipeline.responses.request_log
    assert deployment.tenant_id not in requests.view.sinks
    assert len(receiver.batches) == count


def test_a_receiver_that_hangs_or_fails_stops_no_request(
    deployment: Deployment, receiver: Receiver, logged: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_log, "MOST_WAITING", 10)
    receiver.release.clear()
    dropped = metric("dropped")
    answers = [ask(deployment, f"While it hangs {number}") for number in range(15)]
    assert {each.status_code for each in answers} == {200}
    assert metric("dropped") > dropped, "the queue is bounded"
    receiver.status = 500
    receiver.release.set()
    first = answers[0].headers["x-request-id"]
    receiver.record(first)  # it got the record, and refused it
    receiver.status = 200
    count = len(receiver.batches)
    deadline = time.monotonic() + 60
    while len(receiver.batches) == count:
        assert time.monotonic() < deadline, "it is sent again"
        time.sleep(0.02)
    assert first in receiver.batches[-1][1].decode()


def metric(result: str) -> float:
    found = metrics.request_log.labels(result)._value.get()
    return float(found)


@pytest.mark.parametrize(
    "url",
    [
        "http://169.254.169.254/latest/meta-data",
        "http://10.0.0.1/hook",
        "http://[::ffff:10.0.0.1]/hook",
        "file:///etc/passwd",
        "https://user:secret@example.com/",
        "ftp://example.com/",
        "",
    ],
)
def test_a_receiver_with_a_private_address_is_refused(deployment: Deployment, url: str) -> None:
    answer = put(deployment, {"url": url})
    assert answer.status_code in (400, 422), answer.text
    assert put(deployment, {"url": "https://example.com/", "texts": True}).status_code in (400, 422)


def test_only_owners_and_admins_set_it(deployment: Deployment) -> None:
    with httpx.Client(base_url=f"{deployment.url}/admin/v1", headers=deployment.headers) as admin:
        project = admin.get("/projects").json()["data"][0]["id"]
        for role in ("developer", "finance", "viewer"):
            key = admin.post("/keys", json={"project_id": project, "name": role, "role": role})
            headers = {"authorization": f"Bearer {key.json()['secret']}"}
            body = {"url": "https://example.com/"}
            answer = admin.put("/request-log", json=body, headers=headers)
            assert answer.status_code == 403


def test_the_command_and_the_page_set_it(
    deployment: Deployment,
    receiver: Receiver,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("TOLLHOUSE_DATA_DIR", str(deployment.services.settings.data_dir))
    monkeypatch.setenv("TOLLHOUSE_WEBHOOK_NETWORKS", "127.0.0.0/8")
    command = ["tenant", "request-log", "--tenant", "demo", "--json"]
    assert main([*command, "--url", receiver.url]) == 0
    assert json.loads(capsys.readouterr().out)["secret"].startswith("whsec_")
    assert main([*command, "--url", "http://10.0.0.1/"]) == 2
    capsys.readouterr()
    assert main(command) == 0
    assert json.loads(capsys.readouterr().out) == {
        "url": receiver.url,
        "content": False,
        "format": "records",
        "sample_percent": 100,
    }
    page = "/dashboard/request-settings"
    with closing(browser(deployment, with_role(deployment, "owner"))) as owner:
        assert receiver.url in owner.get(page).text
        form = {"act": "log", "url": receiver.url, "content": "yes"}
        made = owner.post(page, data=form)
        assert "whsec_" in made.text and "with texts" in made.text
        assert owner.post(page, data=form | {"url": "http://10.0.0.1/"}).status_code == 400
        assert receiver.url not in owner.post(page, data={"act": "log_off"}).text
    assert main([*command, "--off"]) == 0
    assert json.loads(capsys.readouterr().out)["url"] is None


def test_a_receiver_of_traces_gets_them_with_its_own_key(
    deployment: Deployment, receiver: Receiver
) -> None:
    body = {"url": receiver.url, "content": True, "format": "otlp", "authorization": "Basic abc"}
    set_to = put(deployment, body)
    assert set_to.status_code == 200 and set_to.json()["format"] == "otlp"
    assert "abc" not in set_to.text, "a key is not shown"
    answer = ask(deployment, "What is a toll?")
    deadline = time.monotonic() + 60
    while not receiver.batches:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    headers, sent = receiver.batches[-1]
    assert headers["authorization"] == "Basic abc"
    (span,) = json.loads(sent)["resourceSpans"][0]["scopeSpans"][0]["spans"]
    values = {each["key"]: each["value"] for each in span["attributes"]}
    assert values["tollhouse.request_id"] == {"stringValue": answer.headers["x-request-id"]}
    assert values["gen_ai.usage.output_tokens"] == {"intValue": "5"}
    assert "What is a toll?" in values["gen_ai.input.messages"]["stringValue"]
    for wrong in ({"format": "xml"}, {"sample_percent": 0}, {"authorization": "a\nb"}):
        assert put(deployment, body | wrong).status_code in (400, 422)
    httpx.delete(f"{deployment.url}/admin/v1/request-log", headers=deployment.headers)
    deployment.services.pipeline.responses.request_log.view.refresh()
