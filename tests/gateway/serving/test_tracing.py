"""Spans follow a request from HTTP to the ledger; without an endpoint there is nothing of them."""

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from core.errors import SettingError
from core.settings import Settings
from gateway.request.spans import NO_TRACE, NO_TRACER
from gateway.serving.tracing import make_tracer
from tests.gateway.deployment import MODEL, Deployment, running_deployment

STEPS = {"request", "auth", "admission", "moderation", "opened", "engine", "metering", "ledger"}
SECRET_WORDS = "xylophone marmalade"


class Traced:
    def __init__(self, deployment: Deployment, exporter: InMemorySpanExporter) -> None:
        self.deployment = deployment
        self._exporter = exporter

    def spans(self, request_id: str, wanted: set[str]) -> dict[str, ReadableSpan]:
        """Of one request, once all the wanted are there."""
        deadline = time.monotonic() + 60
        while True:
            every = self._exporter.get_finished_spans()
            traces = {
                each.context.trace_id
                for each in every
                if (each.attributes or {}).get("tollhouse.request_id") == request_id
            }
            found = {each.name: each for each in every if each.context.trace_id in traces}
            if wanted <= set(found):
                return found
            assert time.monotonic() < deadline, f"of {sorted(wanted)} came {sorted(found)}"
            time.sleep(0.02)


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Traced]:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    with running_deployment(
        tmp_path_factory.mktemp("traced"), tracer=provider.get_tracer("test")
    ) as deployment:
        yield Traced(deployment, exporter)


def ask(deployment: Deployment, **more: Any) -> httpx.Response:
    messages = [{"role": "user", "content": f"Tell me of {SECRET_WORDS}."}]
    body = {"model": MODEL, "max_tokens": 5, "messages": messages, **more}
    headers = {**deployment.headers, **more.pop("headers", {})}
    body.pop("headers", None)
    url = f"{deployment.url}/v1/chat/completions"
    return httpx.post(url, json=body, headers=headers, timeout=60)


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_is_followed_from_http_to_the_ledger(traced: Traced, stream: bool) -> None:
    answer = ask(traced.deployment, stream=stream, temperature=0.5, seed=7)
    assert answer.status_code == 200
    found = traced.spans(answer.headers["x-request-id"], STEPS)
    root = found["request"]
    assert root.parent is None and root.attributes is not None
    for name in STEPS - {"request", "opened", "metering"}:
        assert found[name].parent == root.context, name
    # What is written durably is a part of serving.
    assert found["opened"].parent == found["engine"].context
    assert found["metering"].parent == found["engine"].context
    assert root.attributes["http.route"] == "/v1/chat/completions"
    assert root.attributes["http.response.status_code"] == 200
    assert root.attributes["tollhouse.output_tokens"] == 5
    assert root.attributes["tollhouse.tenant_id"] == traced.deployment.tenant_id
    conventional = {
        name.removeprefix("gen_ai."): value
        for name, value in root.attributes.items()
        if name.startswith("gen_ai.")
    }
    assert conventional.pop("usage.input_tokens") == root.attributes["tollhouse.input_tokens"]
    assert conventional == {
        "operation.name": "chat",
        "provider.name": "tollhouse",
        "request.model": MODEL,
        "response.model": MODEL,
        "response.id": answer.headers["x-request-id"],
        "response.finish_reasons": ("length",),
        "usage.output_tokens": 5,
        "usage.cache_read.input_tokens": root.attributes["tollhouse.cached_tokens"],
        "request.max_tokens": 5,
        "request.temperature": 0.5,
        "request.seed": 7,
    }
    order = ["auth", "admission", "moderation", "engine", "opened", "metering"]
    starts = [found[name].start_time or 0 for name in order]
    assert starts == sorted(starts)
    assert (found["ledger"].end_time or 0) >= (found["metering"].start_time or 0)


def test_the_clients_own_trace_goes_on(traced: Traced) -> None:
    trace_id, parent = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
    answer = ask(traced.deployment, headers={"traceparent": f"00-{trace_id}-{parent}-01"})
    root = traced.spans(answer.headers["x-request-id"], {"request"})["request"]
    assert f"{root.context.trace_id:032x}" == trace_id
    assert root.parent is not None and f"{root.parent.span_id:016x}" == parent


@pytest.mark.parametrize("junk", ["", "00-zz-zz-01", "x" * 2_000])
def test_a_broken_traceparent_begins_a_trace_of_its_own(traced: Traced, junk: str) -> None:
    answer = ask(traced.deployment, headers={"traceparent": junk})
    assert answer.status_code == 200
    assert traced.spans(answer.headers["x-request-id"], {"request"})["request"].parent is None


def test_a_refusal_marks_its_step_and_quotes_nobody(traced: Traced) -> None:
    answer = ask(traced.deployment, model=f"no-{SECRET_WORDS}")
    assert answer.status_code == 404
    put = {"input": {"deny": ["marmalade"]}}
    url = f"{traced.deployment.url}/admin/v1/policies"
    with httpx.Client(headers=traced.deployment.headers, timeout=60) as client:
        try:
            assert client.put(url, json=put).status_code == 200
            blocked = ask(traced.deployment)
        finally:
            client.delete(url)
    assert blocked.status_code == 400
    wanted = {"request", "moderation", "metering", "ledger"}
    found = traced.spans(blocked.headers["x-request-id"], wanted)
    for name in ("request", "moderation"):
        assert found[name].status.status_code is StatusCode.ERROR
        assert found[name].status.description == "content_filter"


def test_no_span_holds_a_word_of_a_prompt(traced: Traced) -> None:
    answer = ask(traced.deployment)
    found = traced.spans(answer.headers["x-request-id"], STEPS)
    written = " ".join(each.to_json() for each in found.values())
    assert not [word for word in SECRET_WORDS.split() if word in written]


def test_without_an_endpoint_nothing_stands_around_the_parts(deployment: Deployment) -> None:
    assert make_tracer(Settings()) is None
    assert deployment.services.pipeline.tracer is NO_TRACER
    assert NO_TRACE.span("auth") is NO_TRACE.span("admission"), "a span was allocated"
    code = "import gateway.wiring, sys; sys.exit('opentelemetry.exporter' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_an_endpoint_makes_a_tracer(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path, tracing_endpoint="http://127.0.0.1:9/v1/traces")
    assert make_tracer(settings) is not None


def test_an_endpoint_without_the_package_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(SettingError, match="TOLLHOUSE_TRACING_ENDPOINT"):
        make_tracer(Settings(tracing_endpoint="http://127.0.0.1:9"))


def test_a_request_refused_before_admission_has_its_status(traced: Traced) -> None:
    answer = ask(traced.deployment, model="nothing")
    assert answer.status_code == 404
    root = traced.spans(answer.headers["x-request-id"], {"request"})["request"]
    assert root.attributes is not None
    assert root.attributes["http.response.status_code"] == 404
    assert root.status.status_code is StatusCode.ERROR
    assert root.status.description == "model_not_found"
