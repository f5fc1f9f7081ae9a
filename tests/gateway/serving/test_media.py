"""Audio and images with OpenAI's SDK: passed on, limited, screened, and billed in their own units."""

import io
import json
import wave
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from msgspec.structs import replace
from openai import OpenAI

from billing.pricing import prices
from billing.rating.rating import rate
from billing.usage.tables import Charge
from core.clock import SystemClock
from core.money import PICO
from core.settings import Settings
from core.tenants.keys import Principal
from core.tenants.plans import LimitRule, Scope, Unit
from gateway.catalog.upstreams import read_upstreams
from gateway.engines.clients import make_engines
from gateway.request.inference import InferenceRequest
from gateway.screening.moderator import NoModeration, PromptBlocked, ScreeningResult
from tests.gateway.admission.test_over_http import Firm
from tests.gateway.deployment import Deployment, running_deployment
from tests.gateway.serving.upstream import Reply, Server, media_upstream

EVERY = [
    *("audio/transcriptions", "audio/translations", "audio/speech"),
    *("images/generations", "images/edits", "images/variations"),
]
PRICE = {"audio_second": "0.0001", "character": "15", "image": "0.04", "request": "0"}
PNG = b"\x89PNG\r\n\x1a\n" + b"0" * 64
STATUS = {429: openai.RateLimitError, 500: openai.InternalServerError, 400: openai.BadRequestError}


def wav(seconds: float, rate_hz: int = 8_000) -> bytes:
    """By the standard library's writer."""
    made = io.BytesIO()
    with wave.open(made, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate_hz)
        file.writeframes(b"\0\0" * int(seconds * rate_hz))
    return made.getvalue()


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with media_upstream() as made:
        yield made


@pytest.fixture(scope="module")
def media(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    with media_deployment(server, tmp_path_factory.mktemp("media")) as made:
        yield made


@contextmanager
def media_deployment(server: Server, path: Path) -> Iterator[Deployment]:
    entry = {
        "url": server.url,
        "name": "m",
        "model": "media",
        "upstream_model": "theirs",
        "endpoints": EVERY,
        "price": PRICE,
    }
    other = {"url": f"{server.url}/", "name": "t", "model": "text", "endpoints": ["audio/speech"]}
    settings = {"upstreams": json.dumps([entry, other]), "max_media_mb": 1}
    engines = make_engines(
        Settings(data_dir=path),
        read_upstreams(settings["upstreams"]),
        lambda _r: None,
        lambda _n, _e: None,
    )
    with running_deployment(path, settings=settings, engines=engines) as made:
        with made.services.database.transaction() as session:
            for model in ("media", "text"):
                prices.ensure_price(session, SystemClock(), model, PRICE, "test")
        made.services.prices.refresh()
        yield made


@pytest.fixture
def sdk(media: Deployment) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{media.url}/v1", api_key=media.key, max_retries=0, timeout=60) as made:
        yield made


def counts(event: dict[str, Any]) -> tuple[Any, ...]:
    return event["kind"], event["units"], event["status"], event["counted_by"]


def cost_of(media: Deployment, request_id: str) -> int:
    """What the ledger charges, in picounits."""
    media.event(request_id)
    with media.services.database.transaction() as session:
        while rate(session, SystemClock()).events:
            continue
        return session.get_one(Charge, request_id).amount


def test_a_transcription_is_billed_by_the_seconds_that_the_upstream_reports(
    media: Deployment, sdk: OpenAI, server: Server
) -> None:
    answer = {"text": "hello", "usage": {"type": "duration", "seconds": 61}}
    server.replies["/v1/audio/transcriptions"] = Reply(answer)
    file = wav(60.2)
    found = sdk.audio.transcriptions.with_raw_response.create(
        model="media", file=("call.wav", file, "audio/wav"), language="en", prompt="names: Ann"
    )
    assert found.parse().text == "hello"
    asked = server.asked[-1]
    assert asked.fields["model"] == "theirs" and asked.fields["language"] == "en"
    assert asked.fields["file"] == ("call.wav", file) and asked.fields["prompt"] == "names: Ann"
    request_id = found.headers["x-request-id"]
    event = media.event(request_id)
    assert counts(event) == ("audio", 61, 200, "upstream")
    assert cost_of(media, request_id) == 61 * PICO // 10_000


@pytest.mark.parametrize(
    ("reply", "seconds", "counted"),
    [
        (Reply(b"hello", kind="text/plain; charset=utf-8"), 3, "gateway"),
        (Reply({"text": "hello"}), 3, "gateway"),
        (Reply({"text": "a", "duration": 2.4, "language": "en"}), 3, "upstream"),
        (Reply({"text": "a", "duration": "7.01"}), 8, "upstream"),
        (Reply({"text": "a", "duration": -1}), 3, "gateway"),
        (Reply({"text": "a", "usage": [1]}), 3, "gateway"),
        (Reply(b"[1, 2"), 3, "gateway"),
    ],
)
def test_without_a_plausible_report_the_file_itself_says_how_long_it_is(
    media: Deployment, server: Server, reply: Reply, seconds: int, counted: str
) -> None:
    server.replies["/v1/audio/translations"] = reply
    found = httpx.post(
        f"{media.url}/v1/audio/translations",
        headers=media.headers,
        data={"model": "media", "response_format": "text"},
        files={"file": ("a.wav", wav(2.5), "audio/wav")},
    )
    assert found.status_code == 200
    expected = reply.body if isinstance(reply.body, bytes) else json.dumps(reply.body).encode()
    assert found.content == expected and found.headers["content-type"] == reply.kind
    event = media.event(found.headers["x-request-id"])
    assert (event["units"], event["counted_by"]) == (seconds, counted)


def test_a_streamed_transcription_passes_every_event(
    media: Deployment, sdk: OpenAI, server: Server
) -> None:
    usage = {
        "type": "tokens",
        "input_tokens": 14,
        "output_tokens": 5,
        "total_tokens": 19,
        "input_token_details": {"audio_tokens": 14, "text_tokens": 0},
    }
    events = [
        {"type": "transcript.text.delta", "delta": "hel"},
        {"type": "transcript.text.delta", "delta": "lo"},
        {"type": "transcript.text.done", "text": "hello", "usage": usage},
    ]
    whole = b"".join(b"data: " + json.dumps(each).encode() + b"\n\n" for each in events)
    pieces = tuple(whole[at : at + 37] for at in range(0, len(whole), 37))
    server.replies["/v1/audio/transcriptions"] = Reply(kind="text/event-stream", chunks=pieces)
    stream = sdk.audio.transcriptions.create(
        model="media", file=("a.wav", wav(1.5), "audio/wav"), stream=True
    )
    assert [each.type for each in stream] == [each["type"] for each in events]
    event = media.event(stream.response.headers["x-request-id"])
    assert (event["units"], event["input_tokens"], event["output_tokens"]) == (2, 14, 5)
    assert event["streamed"]


def test_speech_is_billed_by_characters_and_arrives_as_it_comes(
    media: Deployment, sdk: OpenAI, server: Server
) -> None:
    pieces = tuple(bytes([number]) * 4_000 for number in range(8))
    server.replies["/v1/audio/speech"] = Reply(kind="audio/mpeg", chunks=pieces)
    text = "Grüße, Ann – 4 €."
    with sdk.audio.speech.with_streaming_response.create(
        model="media", voice="alloy", input=text, speed=1.25
    ) as found:
        assert b"".join(found.iter_bytes()) == b"".join(pieces)
        assert found.headers["content-type"] == "audio/mpeg"
        request_id = found.headers["x-request-id"]
    asked = server.asked[-1].fields
    assert asked == {"model": "theirs", "voice": "alloy", "input": text, "speed": 1.25}
    assert counts(media.event(request_id)) == ("speech", 17, 200, "gateway")
    assert cost_of(media, request_id) == 17 * 15 * PICO // 10**6


def test_images_are_billed_as_they_were_delivered(
    media: Deployment, sdk: OpenAI, server: Server
) -> None:
    data = [{"b64_json": "AAAA"}, {"b64_json": "BBBB"}]
    usage = {"input_tokens": 9, "output_tokens": 2_000, "total_tokens": 2_009}
    server.replies["/v1/images/generations"] = Reply({"created": 1, "data": data, "usage": usage})
    found = sdk.images.with_raw_response.generate(
        model="media", prompt="a toll road", n=3, size="1024x1024"
    )
    assert [each.b64_json for each in found.parse().data or []] == ["AAAA", "BBBB"]
    request_id = found.headers["x-request-id"]
    event = media.event(request_id)
    assert counts(event) == ("image", 2, 200, "upstream")
    assert (event["input_tokens"], event["output_tokens"]) == (9, 2_000)
    assert cost_of(media, request_id) == 2 * PICO // 25


def test_edits_and_variations_carry_every_file(
    media: Deployment, sdk: OpenAI, server: Server
) -> None:
    server.replies["/v1/images/edits"] = Reply({"created": 1, "data": [{"b64_json": "AA"}]})
    server.replies["/v1/images/variations"] = Reply({"created": 1, "data": [{"b64_json": "AA"}]})
    edited = sdk.images.edit(
        model="media",
        image=[("a.png", PNG, "image/png"), ("b.png", PNG + b"1", "image/png")],
        mask=("m.png", PNG + b"2", "image/png"),
        prompt="a bridge",
    )
    sent = server.asked[-1].fields
    assert sent["image[]"] == ("b.png", PNG + b"1") and sent["mask"] == ("m.png", PNG + b"2")
    assert sent["prompt"] == "a bridge"
    with pytest.deprecated_call():  # by the SDK
        varied = sdk.images.create_variation(model="media", image=("a.png", PNG, "image/png"), n=2)
    assert server.asked[-1].fields["n"] == "2"
    for each in (edited, varied):
        assert media.event(each._request_id)["units"] == 1


@pytest.mark.parametrize("status", [429, 500, 400])
def test_a_refusal_of_the_upstream_is_an_error_in_our_words_and_costs_nothing(
    media: Deployment, sdk: OpenAI, server: Server, status: int
) -> None:
    secret = {"error": {"message": "node gpu-7 is on fire"}}
    server.replies["/v1/audio/speech"] = Reply(secret, status, headers={"retry-after": "7"})
    with pytest.raises(openai.APIStatusError) as refused:
        sdk.audio.speech.create(model="media", voice="alloy", input="hi")
    error = refused.value
    assert "gpu-7" not in str(error)
    assert error.status_code == (503 if status == 500 else status)
    event = media.event(error.response.headers["x-request-id"])
    assert (event["units"], event["output_tokens"]) == (0, 0)
    assert cost_of(media, event["request_id"]) == 0
    if status == 429:
        assert error.response.headers["retry-after"] == "7"


@pytest.mark.parametrize("chunks", [(), (b"abc", b"def")])
def test_a_cut_answer_costs_nothing_and_does_not_look_whole(
    media: Deployment, server: Server, chunks: tuple[bytes, ...]
) -> None:
    cut = Reply(kind="audio/mpeg", chunks=chunks, cut=True, waits=True)
    server.replies["/v1/audio/speech"] = cut
    server.may_cut.clear()
    body = {"model": "text", "voice": "alloy", "input": "hello"}
    url = f"{media.url}/v1/audio/speech"
    if chunks:
        with (
            pytest.raises(httpx.RemoteProtocolError),
            httpx.stream("POST", url, json=body, headers=media.headers) as found,
        ):
            request_id = found.headers["x-request-id"]
            server.may_cut.set()
            found.read()
    else:
        refused = httpx.post(url, json=body, headers=media.headers)
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "engine_unavailable"
        request_id = refused.headers["x-request-id"]
    assert cost_of(media, request_id) == 0


@pytest.mark.parametrize("chunks", [(), (b"abc",)])
def test_a_stalled_upstream_ends_at_the_requests_deadline(
    media: Deployment, server: Server, chunks: tuple[bytes, ...]
) -> None:
    server.replies["/v1/images/generations"] = Reply(chunks=chunks, stall=True)
    refused = httpx.post(
        f"{media.url}/v1/images/generations",
        json={"model": "media", "prompt": "a road"},
        headers={**media.headers, "x-request-timeout-ms": "300"},
    )
    assert refused.status_code == 503 and refused.json()["error"]["code"] == "deadline_exceeded"
    event = media.event(refused.headers["x-request-id"])
    assert (event["units"], event["status"]) == (0, 503)


def test_a_client_that_leaves_pays_for_what_it_heard(media: Deployment, server: Server) -> None:
    server.replies["/v1/audio/speech"] = Reply(kind="audio/mpeg", chunks=(b"a" * 10,), stall=True)
    body = {"model": "media", "voice": "alloy", "input": "hello"}
    with httpx.stream(
        "POST", f"{media.url}/v1/audio/speech", json=body, headers=media.headers
    ) as found:
        request_id = found.headers["x-request-id"]
        next(found.iter_raw())
    event = media.event(request_id)
    assert (event["units"], event["status"], event["finish_reason"]) == (5, 499, "disconnect")


def test_an_image_that_was_not_delivered_is_waived(media: Deployment, server: Server) -> None:
    server.replies["/v1/images/generations"] = Reply(chunks=(b'{"data": [',), stall=True)
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(
            f"{media.url}/v1/images/generations",
            json={"model": "media", "prompt": "a gone road", "user": "left"},
            headers=media.headers,
            timeout=0.5,
        )
    (event,) = media.events(1, end_user="left")
    assert (event["units"], event["status"]) == (0, 499)


def test_endpoints_that_no_upstream_declares_are_refused_by_name(
    media: Deployment, sdk: OpenAI, deployment: Deployment
) -> None:
    with pytest.raises(openai.NotFoundError) as refused:
        sdk.images.generate(model="text", prompt="a road")
    assert refused.value.code == "unsupported_endpoint"
    assert "text does not support /v1/images/generations" in str(refused.value)
    plain = httpx.post(f"{deployment.url}/v1/audio/speech", json={}, headers=deployment.headers)
    assert plain.status_code == 404 and plain.json()["error"]["code"] == "unsupported_endpoint"
    other = httpx.get(f"{media.url}/v1/audio/voices", headers=media.headers)
    assert other.status_code == 404 and other.json()["error"]["code"] == "unsupported_endpoint"


@pytest.mark.parametrize(
    ("route", "sent", "param"),
    [
        ("audio/speech", {"json": {"model": "media", "voice": "x"}}, "input"),
        ("audio/speech", {"json": {"model": "media", "input": 3}}, "input"),
        ("audio/speech", {"json": {"model": "media", "input": "x", "stream": True}}, "stream"),
        ("images/generations", {"json": {"model": "media", "prompt": "x", "n": 11}}, "n"),
        ("images/generations", {"json": {"model": "media", "prompt": "x", "n": True}}, "n"),
        ("images/generations", {"json": {"prompt": "x"}}, "model"),
        ("images/generations", {"content": b"[]"}, None),
        ("audio/transcriptions", {"json": {"model": "media"}}, None),
        ("audio/transcriptions", {"data": {"model": "media"}, "files": {"x": b""}}, "file"),
        ("audio/transcriptions", {"data": {"model": "media"}, "files": {"file": b""}}, "file"),
        ("images/edits", {"data": {"model": "media"}, "files": {"image": PNG}}, "prompt"),
    ],
)
def test_a_wrong_body_is_refused_by_name_before_anything_runs(
    media: Deployment, server: Server, route: str, sent: dict[str, Any], param: str | None
) -> None:
    before = len(server.asked)
    refused = httpx.post(f"{media.url}/v1/{route}", headers=media.headers, **sent)
    assert refused.status_code == 400, refused.text
    assert refused.json()["error"]["param"] == param
    assert len(server.asked) == before


def test_an_upload_is_bounded(media: Deployment, server: Server) -> None:
    before = len(server.asked)
    refused = httpx.post(
        f"{media.url}/v1/audio/transcriptions",
        headers=media.headers,
        data={"model": "media"},
        files={"file": ("long.wav", b"0" * (2 << 20))},
    )
    assert refused.status_code == 413 and len(server.asked) == before


def test_money_is_held_before_and_settled_to_the_unit(media: Deployment, server: Server) -> None:
    """A budget of 10 cents pays for two images; a third request is refused before the upstream."""
    path = "/v1/images/generations"
    server.replies[path] = Reply({"created": 1, "data": [{"b64_json": "AA"}]})
    with httpx.Client(base_url=media.url, timeout=30) as client:
        firm = Firm((media, client), "painters")
        firm.budget(PICO // 10)

        def _ask(n: int) -> httpx.Response:
            body = {"model": "media", "prompt": "x", "n": n}
            headers = {"authorization": f"Bearer {firm.key}"}
            return client.post(path, json=body, headers=headers)

        assert _ask(3).json()["error"]["code"] == "insufficient_quota"
        assert _ask(2).status_code == 200  # one is delivered, so one is kept
        assert _ask(1).status_code == 200
        asked = len(server.asked)
        assert _ask(1).json()["error"]["code"] == "insufficient_quota"
        assert len(server.asked) == asked
        events = media.events(2, tenant_id=firm.scope.tenant_id)
    assert [event["units"] for event in events] == [1, 1]


def test_limits_count_requests_of_audio_and_images(media: Deployment, server: Server) -> None:
    server.replies["/v1/audio/speech"] = Reply(b"abc", kind="audio/mpeg")
    with httpx.Client(base_url=media.url, timeout=30) as client:
        firm = Firm((media, client), "speakers", LimitRule(Scope.TENANT, Unit.REQUESTS, 2, 3600))
        body = {"model": "media", "voice": "x", "input": "hi"}
        headers = {"authorization": f"Bearer {firm.key}"}
        answers = [client.post("/v1/audio/speech", json=body, headers=headers) for _ in range(3)]
    assert [each.status_code for each in answers] == [200, 200, 429]
    assert answers[1].headers["x-ratelimit-remaining-requests"] == "0"


def test_texts_are_screened_and_redacted_before_they_leave(
    media: Deployment, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Screening(NoModeration):
        async def screen(
            self, request_id: str, principal: Principal, request: InferenceRequest
        ) -> ScreeningResult:
            if "attack" in request.prompts:
                raise PromptBlocked("blocked", paid_by="operator", next_step="", param="input")
            cut = tuple(text.replace("Ann", "[name]") for text in request.prompts)
            return ScreeningResult(replace(request, prompts=cut), "redact")

    monkeypatch.setattr(media.services.pipeline, "moderator", Screening())
    server.replies["/v1/audio/speech"] = Reply(b"abc", kind="audio/mpeg")
    url, before = f"{media.url}/v1/audio/speech", len(server.asked)
    body = {"model": "media", "voice": "Ann", "input": "hi Ann", "instructions": "as Ann"}
    found = httpx.post(url, json=body, headers=media.headers)
    assert found.status_code == 200
    assert server.asked[-1].fields == {
        "model": "theirs",
        "voice": "Ann",
        "input": "hi [name]",
        "instructions": "as [name]",
    }
    event = media.event(found.headers["x-request-id"])
    assert (event["moderation"], event["units"]) == ("redact", len("hi [name]"))
    blocked = httpx.post(url, json={**body, "input": "attack"}, headers=media.headers)
    assert blocked.status_code == 400
    assert blocked.json()["error"]["code"] == "content_filter"
    event = media.event(blocked.headers["x-request-id"])
    assert (event["units"], event["quantity"], event["paid_by"]) == (0, 0, "operator")
    assert len(server.asked) == before + 1


def test_the_costs_api_shows_the_units(media: Deployment, sdk: OpenAI, server: Server) -> None:
    server.replies["/v1/audio/speech"] = Reply(b"abc", kind="audio/mpeg")
    sdk.audio.speech.create(model="text", voice="alloy", input="12345")
    media.events(1, model="text", units=5)
    with media.services.database.transaction() as session:
        while rate(session, SystemClock()).events:
            continue
    now = int(SystemClock().now().timestamp())
    found = httpx.get(
        f"{media.url}/v1/organization/costs",
        params={"start_time": now - 86_400, "group_by": "line_item"},
        headers=media.headers,
    )
    lines = [line for day in found.json()["data"] for line in day["results"]]
    (line,) = [each for each in lines if each["line_item"] == "text, spoken characters"]
    assert line["quantity_unit"] == "characters" and line["quantity"] >= 5
    assert line["amount"]["value"] == pytest.approx(line["quantity"] * 15 / 10**6)
