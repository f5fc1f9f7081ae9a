"""Delivers a batch of records: to a webhook, or as an object of a bucket. Blocking; run in a thread."""

import gzip
import hashlib
import json
import tempfile
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from billing.notices import signing
from billing.notices.request_sinks import OTLP, Sink
from billing.stores import open_store
from core.errors import TollhouseError
from core.ids import new_id
from core.outbound import encode_json, post_json
from core.sealed_columns import check_opened
from core.settings import Settings
from gateway.request.media_parts import KINDS
from gateway.serving.request_log.otlp import traces_of

if TYPE_CHECKING:
    from gateway.serving.context import RequestContext


Record = dict[str, Any]
_TIMEOUT_S = 10.0


class Receivers:
    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def deliver(self, tenant_id: str, sink: Sink, batch: Sequence[Record], now: datetime) -> str:
        """What went wrong; empty if the batch was delivered."""
        if sink.is_bucket:
            return self._put(tenant_id, sink, batch, now)
        return self._post(tenant_id, sink, batch, now)

    def _post(self, tenant_id: str, sink: Sink, batch: Sequence[Record], now: datetime) -> str:
        body: Record = {
            "event": "requests",
            "tenant_id": tenant_id,
            "at": now.isoformat(),
            "records": batch,
        }
        if sink.format == OTLP:
            body = traces_of(batch, now)
        message_id = new_id("log")
        try:
            # Lone surrogates and other values that JSON has not are replaced, not fatal.
            body = json.loads(json.dumps(body, default=str))
            headers = dict(signing.headers(sink.secret, message_id, now, encode_json(body)))
            if sink.authorization:
                headers["authorization"] = check_opened(
                    sink.authorization, "The authorization of the receiver"
                )
            status = post_json(
                sink.url,
                body,
                headers,
                timeout_s=_TIMEOUT_S,
                private=self._settings.webhook_networks,
            )
        except (TollhouseError, OSError, ValueError) as error:
            return str(error)[:200] or type(error).__name__
        return "" if status < 300 else f"the receiver returned status {status}"

    def _put(self, tenant_id: str, sink: Sink, batch: Sequence[Record], now: datetime) -> str:
        """One object of JSON lines, by tenant and hour: tools that read logs prune by such names."""
        lines = "".join(json.dumps(each, default=str) + "\n" for each in batch)
        body = gzip.compress(lines.encode(), compresslevel=5)
        name = f"{tenant_id}/{now:%Y/%m/%d/%H}/{new_id('log')}.jsonl.gz"
        try:
            with tempfile.NamedTemporaryFile() as file:
                file.write(body)
                file.flush()
                digest = hashlib.sha256(body).hexdigest()
                store = open_store(sink.url, self._settings)
                store.put(name, Path(file.name), "application/gzip", digest)
        except Exception as error:  # the store's own errors
            return str(error)[:200] or type(error).__name__
        return ""


# The record of one request: its usage event and, for a sink with content, its texts.
#
# Texts are those that moderation let pass: the prompt as the engine got it and the answer as the client
# did. A request that was not screened, or was blocked, has none.


_LEFT_OUT = ("price_version", "paid_by", "settled_by")
_PARAMETERS = (
    *("temperature", "top_p", "max_tokens", "n", "seed", "stop", "frequency_penalty"),
    *("presence_penalty", "reasoning_effort", "stream"),
)


def record_of(ctx: "RequestContext", status: int, *, content: bool) -> dict[str, Any]:
    event = ctx.meter.event if ctx.meter is not None else None
    principal = ctx.principal
    record: dict[str, Any] = {
        "request_id": ctx.request_id,
        "tenant_id": principal.tenant_id,
        "project_id": principal.project_id,
        "key_id": principal.key_id,
        "route": ctx.surface.route,
        "status": status,
    }
    if event is not None:
        usage = msgspec.to_builtins(event)
        record |= {name: each for name, each in usage.items() if name not in _LEFT_OUT}
    if content and ctx.screening is not None and ctx.screening.action != "block":
        record |= {"request": _request(ctx), "choices": _choices(ctx)}
    return record


def _request(ctx: "RequestContext") -> dict[str, Any]:
    request = ctx.request
    shown: dict[str, Any] = {"model": request.model, "tools": request.tools}
    shown |= {name: getattr(request, name) for name in _PARAMETERS}
    if request.messages is not None:
        shown["messages"] = [_without_media(each) for each in request.messages]
    elif request.decoded_prompts:
        shown["prompts"] = list(request.decoded_prompts)
    elif request.inputs is not None:
        shown["inputs"] = request.inputs
    else:
        shown["prompts"] = list(request.prompts)
    return {name: each for name, each in shown.items() if each not in (None, (), [])}


def _without_media(message: dict[str, Any]) -> dict[str, Any]:
    parts = message.get("content")
    if not isinstance(parts, list) or not any(each.get("type") in KINDS for each in parts):
        return message
    kept = [
        {"type": each["type"], "omitted": True} if each.get("type") in KINDS else each
        for each in parts
    ]
    return {**message, "content": kept}


def _choices(ctx: "RequestContext") -> list[dict[str, Any]]:
    outputs = ctx.delivery.choices if ctx.delivery is not None else ()
    return [
        {
            "index": each.index,
            "text": "".join(each.text),
            "reasoning": "".join(each.reasoning) or None,
            "tool_calls": [{"name": call.name, "arguments": call.arguments} for call in each.calls],
            "finish_reason": each.finish_reason,
        }
        for each in outputs
    ]
