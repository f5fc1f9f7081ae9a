"""Audio and images when requests are repeated or a model fails: each runs, and is charged, once."""

import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from billing.pricing import prices
from core.clock import SystemClock
from core.settings import Settings
from gateway.catalog.upstreams import read_upstreams
from gateway.engines.clients import make_engines
from tests.gateway.deployment import Deployment, running_deployment
from tests.gateway.serving.test_media import PRICE, cost_of, wav
from tests.gateway.serving.upstream import Reply, Server, media_upstream

SPEECH, TRANSCRIPTIONS = "/v1/audio/speech", "/v1/audio/transcriptions"
PRICE_OF_SECOND = PRICE | {"character": "30"}


@dataclass
class Pair:
    """Models on two servers; `first` falls back to `text`, which has no speech, and to `second`."""

    deployment: Deployment
    first: Server
    second: Server
    spans: InMemorySpanExporter


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    path, exporter, provider = (
        tmp_path_factory.mktemp("m"),
        InMemorySpanExporter(),
        TracerProvider(),
    )
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    with media_upstream() as first, media_upstream() as second:
        entries = [
            {"url": server.url, "name": name, "model": name, "endpoints": endpoints}
            for name, server, endpoints in (
                ("first", first, ["audio/speech", "audio/transcriptions"]),
                ("text", second, ["images/edits"]),
                ("second", second, ["audio/speech"]),
            )
        ]
        upstreams = json.dumps(entries)
        engines = make_engines(
            Settings(data_dir=path), read_upstreams(upstreams), lambda _r: None, lambda _n, _e: None
        )
        settings = {"upstreams": upstreams, "fallbacks": "first=text,second"}
        tracer = provider.get_tracer("test")
        with running_deployment(path, settings=settings, engines=engines, tracer=tracer) as made:
            with made.services.database.transaction() as session:
                for model, price in (("first", PRICE), ("second", PRICE_OF_SECOND)):
                    prices.ensure_price(session, SystemClock(), model, price, "test")
            made.services.prices.refresh()
            yield Pair(made, first, second, exporter)


@pytest.fixture
def pair(shared: Pair) -> Pair:
    for server in (shared.first, shared.second):
        server.asked.clear()
    return shared


@pytest.fixture(scope="module")
def sdk(shared: Pair) -> Iterator[OpenAI]:
    made = shared.deployment
    with OpenAI(base_url=f"{made.url}/v1", api_key=made.key, max_retries=0) as client:
        yield client


def speech(pair: Pair, key: str, text: str = "hello") -> tuple[str, dict[str, str], Any]:
    """Address, headers and body of a request."""
    headers = pair.deployment.headers | {"Idempotency-Key": key}
    body = {"model": "first", "voice": "alloy", "input": text}
    return f"{pair.deployment.url}{SPEECH}", headers, body


def speak(pair: Pair, key: str, text: str = "hello") -> httpx.Response:
    url, headers, body = speech(pair, key, text)
    return httpx.post(url, json=body, headers=headers, timeout=60)


def test_a_repeated_form_gets_the_first_answer_and_runs_nothing(pair: Pair, sdk: OpenAI) -> None:
    """The SDK draws another boundary for each attempt."""
    pair.first.replies[TRANSCRIPTIONS] = Reply({"text": "hello", "duration": 2})
    found = [
        sdk.audio.transcriptions.with_raw_response.create(
            model="first",
            file=("call.wav", wav(2), "audio/wav"),
            extra_headers={"Idempotency-Key": "form"},
        )
        for _ in range(2)
    ]
    assert [each.parse().text for each in found] == ["hello", "hello"]
    assert len(pair.first.asked) == 1
    first, again = (each.headers for each in found)
    assert first["x-request-id"] == again["x-request-id"]
    assert "idempotency-replayed" not in first and again["idempotency-replayed"] == "true"
    pair.deployment.event(first["x-request-id"])
    assert len(pair.deployment.events(1, route=TRANSCRIPTIONS)) == 1
    with pytest.raises(openai.BadRequestError) as refused:
        sdk.audio.transcriptions.create(
            model="first",
            file=("call.wav", wav(3), "audio/wav"),
            extra_headers={"Idempotency-Key": "form"},
        )
    assert refused.value.code == "idempotency_key_reused"
    assert len(pair.first.asked) == 1


def test_repeated_speech_is_the_same_bytes(pair: Pair) -> None:
    pair.first.replies[SPEECH] = Reply(kind="audio/mpeg", chunks=(b"abc", b"def"))
    first, again = speak(pair, "speech"), speak(pair, "speech")
    assert (first.content, again.content) == (b"abcdef", b"abcdef")
    assert again.headers["content-type"] == "audio/mpeg"
    assert again.headers["idempotency-replayed"] == "true"
    assert len(pair.first.asked) == 1
    assert speak(pair, "speech", "other").json()["error"]["code"] == "idempotency_key_reused"


def test_a_repetition_while_the_first_runs_is_told_so(pair: Pair) -> None:
    pair.first.replies[SPEECH] = Reply(kind="audio/mpeg", chunks=(b"abc",), stall=True)
    url, headers, body = speech(pair, "running")
    with httpx.stream("POST", url, json=body, headers=headers) as one:
        pieces = one.iter_raw()
        assert next(pieces) == b"abc"
        assert speak(pair, "running").json()["error"]["code"] == "idempotency_in_progress"
        request_id = one.headers["x-request-id"]
    # The client has left: its request is over, and the key is free again.
    pair.deployment.event(request_id)
    pair.first.replies[SPEECH] = Reply(b"whole", kind="audio/mpeg")
    waited = threading.Event()
    for _ in range(100):
        found = speak(pair, "running")
        if found.status_code == 200:
            break
        waited.wait(0.05)
    assert found.content == b"whole" and "idempotency-replayed" not in found.headers


@pytest.mark.parametrize("kind", ["audio/mpeg", "text/event-stream"])
def test_a_cut_answer_leaves_the_key_free(pair: Pair, kind: str) -> None:
    pair.first.may_cut.clear()
    pair.first.replies[SPEECH] = Reply(kind=kind, chunks=(b"data: 1\n\n",), cut=True, waits=True)
    key = f"cut {kind}"
    url, headers, body = speech(pair, key)
    with httpx.stream("POST", url, json=body, headers=headers, timeout=60) as found:
        pieces = found.iter_raw()
        assert next(pieces) == b"data: 1\n\n"
        pair.first.may_cut.set()
        if kind == "audio/mpeg":
            with pytest.raises(httpx.RemoteProtocolError):
                next(pieces)
        else:
            assert b"engine_unavailable" in b"".join(pieces)
    pair.first.replies[SPEECH] = Reply(b"whole", kind="audio/mpeg")
    assert speak(pair, key).content == b"whole"


def test_a_failed_model_falls_back_to_one_that_has_the_endpoint(pair: Pair) -> None:
    pair.first.replies[SPEECH] = Reply({}, 500)
    pair.second.replies[SPEECH] = Reply(b"abc", kind="audio/mpeg")
    found = speak(pair, "fallback")
    assert found.status_code == 200 and found.content == b"abc"
    assert found.headers["x-tollhouse-fallback"] == "first -> second"
    assert [each.fields["model"] for each in pair.second.asked] == ["second"]
    request_id = found.headers["x-request-id"]
    event = pair.deployment.event(request_id)
    assert (event["model"], event["units"], event["status"]) == ("second", 5, 200)
    assert event["routed"].startswith("fallback from first; ")
    assert cost_of(pair.deployment, request_id) == 5 * 30 * 10**6  # 30 USD a million characters


def test_a_refusal_that_every_model_would_give_is_not_tried_again(pair: Pair) -> None:
    pair.first.replies[SPEECH] = Reply({"error": {"message": "no such voice"}}, 400)
    found = speak(pair, "refused")
    assert found.status_code == 400 and not pair.second.asked
    event = pair.deployment.event(found.headers["x-request-id"])
    assert (event["model"], event["units"]) == ("first", 0)


def test_when_all_fail_the_last_error_is_told_and_nothing_is_charged(pair: Pair) -> None:
    pair.first.replies[SPEECH] = pair.second.replies[SPEECH] = Reply({}, 500)
    found = speak(pair, "all")
    assert found.status_code == 503
    request_id = found.headers["x-request-id"]
    event = pair.deployment.event(request_id)
    assert (event["units"], event["status"]) == (0, 503)
    assert cost_of(pair.deployment, request_id) == 0


def test_spans_follow_a_request_to_the_ledger(pair: Pair) -> None:
    pair.first.replies[SPEECH] = Reply(b"abc", kind="audio/mpeg")
    pair.second.replies[SPEECH] = Reply(b"abc", kind="audio/mpeg")
    found = speak(pair, "traced", "secret words")
    request_id = found.headers["x-request-id"]
    pair.deployment.event(request_id)
    wanted = {"request", "auth", "admission", "moderation", "opened", "engine", "metering"}
    every = pair.spans.get_finished_spans()
    (root,) = [
        each
        for each in every
        if each.name == "request" and (each.attributes or {})["tollhouse.request_id"] == request_id
    ]
    of_it = [each for each in every if each.context.trace_id == root.context.trace_id]
    assert wanted <= {each.name for each in of_it}
    assert root.attributes is not None
    assert root.attributes["http.route"] == SPEECH
    assert root.attributes["http.response.status_code"] == 200
    assert "secret" not in "".join(each.to_json() for each in of_it)
