"""Records as OTLP: read by OpenTelemetry's own protocol and named as its conventions say."""

import base64
import json
from datetime import UTC, datetime
from typing import Any

from google.protobuf import json_format
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes as gen_ai

from billing.notices.request_sinks import Sink
from gateway.serving.request_log.otlp import traces_of

NOW = datetime(2026, 1, 2, 3, 4, 5, 678_000, tzinfo=UTC)
RECORD: dict[str, Any] = {
    "request_id": "req_1",
    "tenant_id": "org_a",
    "project_id": "proj_a",
    "key_id": "key_a",
    "route": "/v1/chat/completions",
    "status": 200,
    "model": "small",
    "occurred_at": "2026-01-02T03:04:05.250000+00:00",
    "finished_at": "2026-01-02T03:04:06.500000+00:00",
    "input_tokens": 12,
    "cached_tokens": 4,
    "output_tokens": 5,
    "waived_tokens": 0,
    "finish_reason": "stop",
    "end_user": "ada",
    "request": {
        "model": "alias",
        "temperature": 0.5,
        "max_tokens": 7,
        "stop": ("end",),
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "Hi"}, {"type": "image_url"}]},
        ],
    },
    "choices": [
        {
            "index": 0,
            "text": "Hello",
            "reasoning": "They greet.",
            "tool_calls": [{"name": "toll", "arguments": "{}"}],
            "finish_reason": "stop",
        }
    ],
}


def parsed(body: dict[str, Any]) -> ExportTraceServiceRequest:
    """By OpenTelemetry's messages, which refuse fields that they do not know. In JSON, ids are hex
    there and base64 in protobuf."""
    body = json.loads(json.dumps(body))
    for spans in body["resourceSpans"][0]["scopeSpans"]:
        for span in spans["spans"]:
            for name in ("traceId", "spanId"):
                span[name] = base64.b64encode(bytes.fromhex(span[name])).decode()
    return json_format.ParseDict(body, ExportTraceServiceRequest())


def span_of(record: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    found = parsed(traces_of([record], NOW))
    (span,) = found.resource_spans[0].scope_spans[0].spans
    values = {
        each.key: getattr(each.value, each.value.WhichOneof("value")) for each in span.attributes
    }
    return span, values


def test_a_span_has_the_conventions_names() -> None:
    span, values = span_of(RECORD)
    assert span.name == "chat small" and len(span.trace_id) == 16 and len(span.span_id) == 8
    start = int(datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC).timestamp()) * 10**9
    assert span.start_time_unix_nano == start + 250_000_000
    assert span.end_time_unix_nano == start + 1_500_000_000
    assert values[gen_ai.GEN_AI_OPERATION_NAME] == "chat"
    assert values[gen_ai.GEN_AI_REQUEST_MODEL] == "alias"
    assert values[gen_ai.GEN_AI_RESPONSE_MODEL] == "small"
    assert values[gen_ai.GEN_AI_USAGE_INPUT_TOKENS] == 12
    assert values[gen_ai.GEN_AI_USAGE_OUTPUT_TOKENS] == 5
    assert values[gen_ai.GEN_AI_REQUEST_TEMPERATURE] == 0.5
    assert values[gen_ai.GEN_AI_REQUEST_MAX_TOKENS] == 7
    assert [v.string_value for v in values[gen_ai.GEN_AI_RESPONSE_FINISH_REASONS].values] == [
        "stop"
    ]
    assert values["user.id"] == "ada" and values["tollhouse.request_id"] == "req_1"
    given = json.loads(values["gen_ai.input.messages"])
    assert given[1]["parts"] == [{"type": "text", "content": "Hi"}, {"type": "image_url"}]
    (made,) = json.loads(values["gen_ai.output.messages"])
    assert [part["type"] for part in made["parts"]] == ["reasoning", "text", "tool_call"]


def test_a_failed_request_without_texts() -> None:
    bare = {name: RECORD[name] for name in ("request_id", "route", "tenant_id")} | {"status": 429}
    span, values = span_of(bare)
    assert span.status.code == 2 and values["error.type"] == "429"
    assert "gen_ai.input.messages" not in values
    assert span.start_time_unix_nano == span.end_time_unix_nano > 0


def test_a_share_is_taken_by_the_request_alone() -> None:
    sink = Sink("id", "https://x", "s", True, NOW, sample_percent=20)
    taken = [n for n in range(5_000) if sink.takes(f"req_{n}")]
    assert 800 < len(taken) < 1_200
    assert taken == [n for n in range(5_000) if sink.takes(f"req_{n}")]
    assert all(Sink("id", "https://x", "s", True, NOW).takes(f"req_{n}") for n in range(50))
