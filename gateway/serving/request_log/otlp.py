"""Records of requests as OTLP traces in JSON, with the GenAI semantic conventions.

One span a request, in the encoding of opentelemetry-proto 1.x over HTTP (`/v1/traces`); attribute
names are those of OpenTelemetry's semantic conventions for generative AI, 1.37.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

_OPERATIONS = {
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
    "/v1/rerank": "embeddings",
    "/v1/score": "embeddings",
}
_REQUESTED = {
    "temperature": "gen_ai.request.temperature",
    "top_p": "gen_ai.request.top_p",
    "max_tokens": "gen_ai.request.max_tokens",
    "seed": "gen_ai.request.seed",
    "stop": "gen_ai.request.stop_sequences",
    "frequency_penalty": "gen_ai.request.frequency_penalty",
    "presence_penalty": "gen_ai.request.presence_penalty",
}
_COUNTED = {
    "input_tokens": "gen_ai.usage.input_tokens",
    "cached_tokens": "gen_ai.usage.cache_read.input_tokens",
    "output_tokens": "gen_ai.usage.output_tokens",
}
_OWN = ("request_id", "project_id", "key_id", "route", "adapter", "engine_id", "waived_tokens")
_KIND_SERVER = 2
_ERROR = 2
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def traces_of(records: Iterable[Mapping[str, Any]], now: datetime) -> dict[str, Any]:
    """The body of an ExportTraceServiceRequest."""
    resource = {"attributes": _attributes({"service.name": "tollhouse"})}
    scope = {"scope": {"name": "tollhouse"}, "spans": [_span(each, now) for each in records]}
    return {"resourceSpans": [{"resource": resource, "scopeSpans": [scope]}]}


def _span(record: Mapping[str, Any], now: datetime) -> dict[str, Any]:
    digest = hashlib.sha256(str(record["request_id"]).encode()).hexdigest()
    operation = _OPERATIONS.get(record["route"], "chat")
    request = record.get("request") or {}
    model = record.get("model") or request.get("model") or ""
    failed = record["status"] >= 400
    attributes: dict[str, Any] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "tollhouse",
        "gen_ai.request.model": request.get("model") or model,
        "gen_ai.response.model": model,
        "gen_ai.response.id": record["request_id"],
        "gen_ai.response.finish_reasons": _reasons(record),
        "gen_ai.input.messages": _input(request),
        "gen_ai.output.messages": _output(record),
        "http.response.status_code": record["status"],
        "error.type": str(record["status"]) if failed else None,
        "user.id": record.get("end_user"),
    }
    attributes |= {name: request.get(field) for field, name in _REQUESTED.items()}
    attributes |= {name: record.get(field) for field, name in _COUNTED.items()}
    attributes |= {f"tollhouse.{name}": record.get(name) for name in _OWN}
    span: dict[str, Any] = {
        "traceId": digest[:32],
        "spanId": digest[32:48],
        "name": f"{operation} {model}".strip(),
        "kind": _KIND_SERVER,
        "startTimeUnixNano": _nanos(record.get("occurred_at"), now),
        "endTimeUnixNano": _nanos(record.get("finished_at"), now),
        "attributes": _attributes(attributes),
    }
    if failed:
        span["status"] = {"code": _ERROR}
    return span


def _reasons(record: Mapping[str, Any]) -> list[str] | None:
    reasons = [
        each["finish_reason"] for each in record.get("choices") or () if each["finish_reason"]
    ]
    return reasons or ([record["finish_reason"]] if record.get("finish_reason") else None)


def _input(request: Mapping[str, Any]) -> str | None:
    messages = [
        {"role": each.get("role", "user"), "parts": _parts(each.get("content"))}
        for each in request.get("messages") or ()
    ]
    texts = [*request.get("prompts", ()), *request.get("inputs", ())]
    messages += [{"role": "user", "parts": _parts(text)} for text in texts]
    return json.dumps(messages, default=str) if messages else None


def _output(record: Mapping[str, Any]) -> str | None:
    found = []
    for each in record.get("choices") or ():
        parts: list[dict[str, Any]] = []
        if each.get("reasoning"):
            parts.append({"type": "reasoning", "content": each["reasoning"]})
        if each["text"]:
            parts.append({"type": "text", "content": each["text"]})
        parts += [{"type": "tool_call", **call} for call in each["tool_calls"]]
        reason = each["finish_reason"] or ""
        found.append({"role": "assistant", "parts": parts, "finish_reason": reason})
    return json.dumps(found, default=str) if found else None


def _parts(content: Any) -> list[dict[str, Any]]:
    if isinstance(content, list) and all(isinstance(each, dict) for each in content):
        return [
            {"type": "text", "content": each["text"]}
            if isinstance(each.get("text"), str)
            else {"type": str(each.get("type", "unknown"))}
            for each in content
        ]
    return [] if content is None else [{"type": "text", "content": str(content)}]


def _nanos(value: Any, now: datetime) -> str:
    moment = datetime.fromisoformat(value) if isinstance(value, str) else now
    since = moment - _EPOCH
    return str((since.days * 86_400 + since.seconds) * 10**9 + since.microseconds * 1_000)


def _attributes(values: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [
        {"key": name, "value": _value(value)}
        for name, value in values.items()
        if value not in (None, "", [], ())
    ]


def _value(value: Any) -> dict[str, Any]:
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}
    if isinstance(value, float):
        return {"doubleValue": value}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return {"arrayValue": {"values": [_value(each) for each in value]}}
    return {"stringValue": str(value)}
