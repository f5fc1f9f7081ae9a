"""What clients, probes and browsers do at the level of HTTP."""

import gzip
import http.client
import json
import socket
from collections.abc import Iterator
from urllib.parse import urlsplit

import anthropic
import httpx
import openai
import pytest

from core.errors import SettingError
from core.settings import load_settings
from tests.gateway.deployment import MODEL, Deployment, running_deployment

GOOD = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
CHAT = "/v1/chat/completions"
ORIGIN = "https://app.example.com"


@pytest.mark.parametrize("path", ["/health", "/healthz", "/readyz"])
def test_probes_may_use_get_and_head(deployment: Deployment, path: str) -> None:
    assert httpx.get(f"{deployment.url}{path}").status_code == 200
    head = httpx.head(f"{deployment.url}{path}")
    assert head.status_code == 200 and head.content == b""


@pytest.mark.parametrize("path", [CHAT, "/v1/messages", "/v1/models"])
def test_a_401_says_how_to_authenticate(deployment: Deployment, path: str) -> None:
    method = "GET" if path == "/v1/models" else "POST"
    answer = httpx.request(method, f"{deployment.url}{path}", json=GOOD)
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize("path", [CHAT, "/v1/messages", "/v1/messages/count_tokens"])
def test_a_gzip_body_is_read(deployment: Deployment, path: str) -> None:
    headers = deployment.headers | {"content-encoding": "gzip"}
    body = {k: v for k, v in GOOD.items() if "count" not in path or k != "max_tokens"}
    packed = gzip.compress(json.dumps(body).encode())
    answer = httpx.post(f"{deployment.url}{path}", content=packed, headers=headers, timeout=60)
    assert answer.status_code == 200, answer.text


def test_a_gzip_body_is_limited_by_its_content(deployment: Deployment) -> None:
    headers = deployment.headers | {"content-encoding": "gzip"}
    packed = gzip.compress(b" " * (200 << 20))
    assert len(packed) < 1 << 20
    url = f"{deployment.url}{CHAT}"
    bomb = httpx.post(url, content=packed, headers=headers, timeout=60)
    assert bomb.status_code == 413, bomb.text
    for broken in (packed[:5000], b"{}", gzip.compress(b"{}") + b"more"):
        answer = httpx.post(url, content=broken, headers=headers)
        assert answer.status_code == 400 and answer.json()["error"]["code"] == "invalid_encoding"
    other = httpx.post(url, content=b"{}", headers=deployment.headers | {"content-encoding": "br"})
    assert other.json()["error"]["code"] == "unsupported_encoding"


@pytest.mark.parametrize("stream", [False, True])
def test_http_1_0_gets_no_chunked_framing(deployment: Deployment, stream: bool) -> None:
    place = urlsplit(deployment.url)
    body = json.dumps(GOOD | {"stream": stream}).encode()
    head = f"POST {CHAT} HTTP/1.0\r\nauthorization: Bearer {deployment.key}\r\n"
    with socket.create_connection((place.hostname, place.port or 0), timeout=60) as connection:
        connection.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        parts = []
        while part := connection.recv(65_536):
            parts.append(part)
    head_of_answer, _, content = b"".join(parts).partition(b"\r\n\r\n")
    assert b" 200 " in head_of_answer.split(b"\r\n")[0]
    assert b"transfer-encoding" not in head_of_answer.lower()
    if stream:
        events = [line for line in content.decode().split("\n\n") if line]
        assert all(event.startswith("data: ") for event in events), content
        assert events[-1] == "data: [DONE]"
    else:
        assert json.loads(content)["object"] == "chat.completion"


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("POST", "/v1/messages/count_tokens", 401),
        ("POST", "/v1/messages/nothing", 404),
        ("GET", "/v1/messages", 405),
        ("POST", "/v1/messages", 413),
        ("POST", "/v1/messages/count_tokens", 413),
    ],
)
def test_errors_of_anthropics_routes_have_its_shape(
    deployment: Deployment, method: str, path: str, status: int
) -> None:
    content = b" " * (10 << 20) if status == 413 else b"{}"
    headers = {} if status == 401 else deployment.headers
    answer = httpx.request(method, f"{deployment.url}{path}", content=content, headers=headers)
    assert answer.status_code == status
    told = answer.json()
    assert told["type"] == "error" and told["error"]["message"], told
    assert told["request_id"] == answer.headers["request-id"]
    assert "code" not in told["error"]


def test_anthropics_sdk_reads_the_error_of_a_shared_route(deployment: Deployment) -> None:
    client = anthropic.Anthropic(base_url=deployment.url, api_key=deployment.key, max_retries=0)
    with client, pytest.raises(anthropic.NotFoundError) as caught:
        client.models.retrieve("nothing")
    assert isinstance(caught.value.body, dict)
    assert caught.value.body["error"]["type"] == "not_found_error"


def test_fields_that_no_route_knows_may_be_null(deployment: Deployment) -> None:
    url = f"{deployment.url}{CHAT}"
    message = {
        "role": "user",
        "content": [{"type": "text", "text": "Hi", "mood": None}],
        "to": None,
    }
    body = GOOD | {"messages": [message], "made_up": None, "stream_options": None}
    assert httpx.post(url, json=body, headers=deployment.headers).status_code == 200
    for given, named in (
        ({"made_up": 0}, "made_up"),
        ({"messages": [message, {"role": "user", "content": "x", "to": "you"}]}, "messages[].to"),
    ):
        answer = httpx.post(url, json=GOOD | given, headers=deployment.headers)
        assert answer.status_code == 400 and answer.json()["error"]["param"] == named


def test_top_p_of_zero_is_greedy(deployment: Deployment) -> None:
    client = openai.OpenAI(base_url=f"{deployment.url}/v1", api_key=deployment.key, max_retries=0)
    with client:
        client.chat.completions.create(**GOOD, top_p=0)
    sampling = deployment.engine.submitted[-1].sampling
    assert (sampling.top_p, sampling.top_k) == (1, 1)  # the built-in engine refuses a top_p of 0


@pytest.fixture(scope="module")
def open_to_pages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    settings = {"cors_origins": (ORIGIN,)}
    with running_deployment(tmp_path_factory.mktemp("cors"), settings=settings) as made:
        yield made


def test_a_page_of_an_allowed_origin_may_call_the_api(open_to_pages: Deployment) -> None:
    url = f"{open_to_pages.url}{CHAT}"
    asked = {"access-control-request-method": "POST"}
    asked |= {"access-control-request-headers": "authorization,content-type"}
    before = httpx.options(url, headers={"origin": ORIGIN} | asked)
    assert before.status_code == 200
    assert before.headers["access-control-allow-origin"] == ORIGIN
    assert "authorization" in before.headers["access-control-allow-headers"]
    headers = open_to_pages.headers | {"origin": ORIGIN}
    for stream in (False, True):
        answer = httpx.post(url, json=GOOD | {"stream": stream}, headers=headers, timeout=60)
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == ORIGIN
        assert "x-request-id" in answer.headers["access-control-expose-headers"]
        assert "access-control-allow-credentials" not in answer.headers
    other = {"origin": "https://elsewhere.example"}
    assert httpx.options(url, headers=other | asked).status_code == 400
    refused = httpx.post(url, json=GOOD, headers=open_to_pages.headers | other)
    assert "access-control-allow-origin" not in refused.headers


def test_without_the_setting_no_origin_is_allowed(deployment: Deployment) -> None:
    headers = deployment.headers | {"origin": ORIGIN}
    answer = httpx.post(f"{deployment.url}{CHAT}", json=GOOD, headers=headers)
    assert answer.status_code == 200 and "access-control-allow-origin" not in answer.headers


def test_what_is_no_origin_stops_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOLLHOUSE_CORS_ORIGINS", "app.example.com")
    with pytest.raises(SettingError, match="TOLLHOUSE_CORS_ORIGINS is wrong"):
        load_settings()


def test_a_connection_goes_on_after_head(deployment: Deployment) -> None:
    place = urlsplit(deployment.url)
    connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=60)
    for method in ("HEAD", "GET", "HEAD"):
        connection.request(method, "/health")
        answer = connection.getresponse()
        assert answer.status == 200
        answer.read()
    connection.close()
