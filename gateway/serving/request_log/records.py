"""The record of one request: its usage event and, for a sink with content, its texts.

Texts are those that moderation let pass: the prompt as the engine got it and the answer as the client
did. A request that was not screened, or was blocked, has none.
"""

from typing import TYPE_CHECKING, Any

import msgspec

from gateway.request.media_parts import KINDS

if TYPE_CHECKING:
    from gateway.serving.context import RequestContext

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
