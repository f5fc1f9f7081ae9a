"""A request as the body of Anthropic's /v1/messages.

Source: https://docs.anthropic.com/en/api/messages and the types of the `anthropic` SDK.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from core.errors import BadRequest
from gateway.engines.ports.conversation import (
    ERROR_MARK,
    allowed_tools,
    arguments_of,
    data_of_url,
    details_of,
    foreign_details,
    leading_system,
    named_tool,
    parts_of,
    schema_of,
    text_of,
    with_details,
)
from gateway.engines.ports.port import Notes, refuse_set, refused
from gateway.request.engine import Job
from gateway.request.inference import InferenceRequest
from gateway.request.thoughts import ANTHROPIC

MAX_TOKENS = 8_192  # where neither the client nor the entry has a number, which the API demands
NO_SCHEMA: Mapping[str, Any] = {"type": "object", "properties": {}}
# Models that take a budget of thinking tokens and no effort: those before Claude 4.6.
_WITH_BUDGET = re.compile(
    r"claude-(?:3|(?:opus|sonnet|haiku)-4(?:-[0-5])?(?:-2025\d*|@|$|-v|-latest))"
)
_BUDGETS = {"minimal": 1_024, "low": 1_024, "medium": 4_096, "high": 16_384, "xhigh": 32_768}
_LARGEST_BUDGET = 32_768
_LEAST_BUDGET = 1_024
_EFFORTS = ("low", "medium", "high", "xhigh", "max")
_IMAGES = ("image/jpeg", "image/png", "image/gif", "image/webp")
_NAME = "anthropic"


class Style:
    """What differs between the places that serve this API, and between models."""

    def __init__(self, options: Mapping[str, Any], model: str, name: str = _NAME) -> None:
        self.max_tokens = int(options.get("max_tokens") or 0)
        way = str(options.get("thinking") or "")
        self.has_effort = way != "budget" if way else _WITH_BUDGET.search(model) is None
        self.name = name


def messages_body(job: Job, style: Style, notes: Notes) -> dict[str, Any]:
    """Without `model` and `stream`. Raises UnsupportedParameter."""
    request = job.request
    refuse_set(request, style.name, "frequency_penalty", "presence_penalty", "seed", "logprobs")
    refuse_set(request, style.name, "logit_bias", "n")
    body: dict[str, Any] = {"max_tokens": _max_tokens(job, style, notes)}
    system, rest = leading_system(request.messages or ())
    if system:
        body["system"] = [_text(part) for part in system]
    body["messages"] = conversation(request, rest, notes)
    if request.stop:
        body["stop_sequences"] = list(request.stop)
    for name in ("temperature", "top_p", "top_k"):
        if (value := getattr(request, name)) is not None:
            body[name] = value
    if (request.temperature or 0) > 1:
        raise refused(request, "temperature", style.name, "it is above 1")
    if request.end_user:
        body["metadata"] = {"user_id": request.end_user}
    body |= _tools(request, style, notes)
    body |= _output(request, body, style, notes)
    if (mark := request.extra.get("cache_control")) is not None:
        body["cache_control"] = mark
    return body


def _max_tokens(job: Job, style: Style, notes: Notes) -> int:
    request = job.request
    if request.max_tokens is not None:
        return min(request.max_tokens, job.engine_request.sampling.max_tokens)
    limit = style.max_tokens or MAX_TOKENS
    notes.add(f"max_tokens is {limit}, since the provider demands a number.")
    return limit


def conversation(
    request: InferenceRequest, messages: Sequence[dict[str, Any]], notes: Notes
) -> list[dict[str, Any]]:
    """Turns of the user and of the assistant. Results of tools come first in the user's turn."""
    turns: list[dict[str, Any]] = []
    for message in messages:
        role = message["role"]
        if role in ("tool", "function"):
            _extend(turns, "user", [_result(message)])
        elif role == "assistant":
            _extend(turns, role, _answer(message, notes))
        elif role == "user":
            own = []
            for part in parts_of(message.get("content")):
                if not _put_into_result(turns, part, request, notes):
                    own.append(_block(part, request, notes))
            _extend(turns, role, own)
        else:
            turns.append(
                {"role": "system", "content": [_text(p) for p in parts_of(message["content"])]}
            )
    return [turn for turn in turns if turn["content"]]


def _extend(turns: list[dict[str, Any]], role: str, blocks: list[dict[str, Any]]) -> None:
    if turns and turns[-1]["role"] == role:
        turns[-1]["content"] += blocks
    else:
        turns.append({"role": role, "content": blocks})


def _put_into_result(
    turns: list[dict[str, Any]], part: dict[str, Any], request: InferenceRequest, notes: Notes
) -> bool:
    """An image that a tool returned goes back into its result."""
    call_id = part.get("of_call")
    if call_id is None or not turns:
        return False
    for block in turns[-1]["content"]:
        if block["type"] == "tool_result" and block["tool_use_id"] == call_id:
            if isinstance(block["content"], str):
                text = block["content"]
                block["content"] = [{"type": "text", "text": text}] if text else []
            block["content"].append(_block(part, request, notes))
            return True
    return False


def _result(message: dict[str, Any]) -> dict[str, Any]:
    text = text_of(message.get("content"))
    block: dict[str, Any] = {
        "type": "tool_result",
        "tool_use_id": str(message.get("tool_call_id") or ""),
    }
    if message.get("is_error"):
        text = text.removeprefix(ERROR_MARK)
        block["is_error"] = True
    return _marked({**block, "content": text}, message)


def _answer(message: dict[str, Any], notes: Notes) -> list[dict[str, Any]]:
    blocks = [_text(part) for part in parts_of(message.get("content")) if part.get("text")]
    calls = [
        {
            "type": "tool_use",
            "id": call["id"],
            "name": call["function"]["name"],
            "input": arguments_of(call),
        }
        for call in message.get("tool_calls") or ()
    ]
    if calls:
        calls[-1] = _marked(calls[-1], message)
    elif blocks:
        blocks[-1] = _marked(blocks[-1], message)
    blocks += calls
    if foreign_details(message, ANTHROPIC):
        notes.add("Reasoning of another provider is not sent back.")
    details = details_of(message, ANTHROPIC)
    places = [(_place(each), _thought(each)) for each in details]
    return list(with_details(blocks, places))


def _place(detail: dict[str, Any]) -> int:
    index = detail.get("index")
    return index if type(index) is int and index >= 0 else 0


def _thought(detail: dict[str, Any]) -> dict[str, Any]:
    if detail["type"] == "reasoning.encrypted":
        return {"type": "redacted_thinking", "data": detail.get("data") or ""}
    text, signature = detail.get("text") or "", detail.get("signature") or ""
    return {"type": "thinking", "thinking": text, "signature": signature}


def _block(part: dict[str, Any], request: InferenceRequest, notes: Notes) -> dict[str, Any]:
    if part["type"] == "image_url":
        return _marked(_image(part["image_url"], notes), part)
    if part["type"] == "file":
        return _marked(_document(part["file"], request), part)
    if part["type"] == "input_audio":
        raise refused(request, "audio", _NAME)
    if (held := part.get("document")) is not None:
        source = {"type": "text", "media_type": "text/plain", "data": part["text"]}
        return _marked({"type": "document", "source": source, **held}, part)
    return _text(part)


def _text(part: dict[str, Any]) -> dict[str, Any]:
    return _marked({"type": "text", "text": part["text"]}, part)


def _marked(block: dict[str, Any], holder: Mapping[str, Any]) -> dict[str, Any]:
    mark = holder.get("cache_control")
    return block if mark is None else {**block, "cache_control": mark}


def _image(image: dict[str, Any], notes: Notes) -> dict[str, Any]:
    if image.get("detail") not in (None, "auto"):
        notes.add("The detail of an image has no effect.")
    data = data_of_url(image["url"])
    if data is None:
        return {"type": "image", "source": {"type": "url", "url": image["url"]}}
    if data.media_type not in _IMAGES:
        raise BadRequest(
            f"An image is {data.media_type[:40]}, which this model's provider does not read.",
            next_step=f"Send one of {', '.join(_IMAGES)}.",
            code="invalid_value",
        )
    source = {"type": "base64", "media_type": data.media_type, "data": data.base64}
    return {"type": "image", "source": source}


def _document(file: dict[str, Any], request: InferenceRequest) -> dict[str, Any]:
    source: dict[str, Any]
    if file.get("url") is not None:
        source = {"type": "url", "url": file["url"]}
    elif (data := data_of_url(file.get("file_data") or "")) is not None:
        source = {"type": "base64", "media_type": data.media_type, "data": data.base64}
    else:
        raise refused(request, "documents", _NAME, "a file is sent as data, not by id")
    block: dict[str, Any] = {"type": "document", "source": source}
    if file.get("filename"):
        block["title"] = file["filename"]
    for name in ("context", "citations"):
        if file.get(name) is not None:
            block[name] = file[name]
    return block


def _tools(request: InferenceRequest, style: Style, notes: Notes) -> dict[str, Any]:
    given = request.engine_parameters.get("tool_choice")
    choice, tools = allowed_tools(given, request.tools or ())
    if not tools:
        return {}
    if given is not choice:
        notes.add("tool_choice allows some tools: the others are not sent.")
    written: dict[str, Any] = {"tools": [_tool(each) for each in tools]}
    if name := named_tool(choice):
        kind: dict[str, Any] = {"type": "tool", "name": name}
    else:
        kind = {"type": {"required": "any"}.get(choice or "auto", "auto")}
    if request.single_tool_call:
        kind["disable_parallel_tool_use"] = True
    if kind != {"type": "auto"}:
        written["tool_choice"] = kind
    return written


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    function = tool["function"]
    written = {
        "name": function["name"],
        "input_schema": function.get("parameters") or dict(NO_SCHEMA),
    }
    for name in ("description", "strict"):
        if function.get(name) is not None:
            written[name] = function[name]
    return _marked(written, tool)


def _output(
    request: InferenceRequest, body: dict[str, Any], style: Style, notes: Notes
) -> dict[str, Any]:
    """Thinking, its effort, and the form of the answer."""
    written, config = thinking_of(request, body["max_tokens"], style, notes)
    if form := request.engine_parameters.get("response_format"):
        schema = schema_of(form)
        if schema is None:
            raise refused(request, "response_format", style.name, "it takes a JSON schema")
        config["format"] = {"type": "json_schema", "schema": schema}
    return written | ({"output_config": config} if config else {})


def thinking_of(
    request: InferenceRequest, most: int, style: Style, notes: Notes
) -> tuple[dict[str, Any], dict[str, Any]]:
    """(`thinking`, `output_config`); `most`: tokens of the answer."""
    written: dict[str, Any] = {}
    config: dict[str, Any] = {}
    if effort := request.extra.get("effort"):
        config["effort"] = effort
    if thinking := request.extra.get("thinking"):
        written["thinking"] = thinking
    elif (wanted := request.reasoning_effort) is not None:
        if style.has_effort:
            written["thinking"] = {"type": "adaptive", "display": "summarized"}
            config["effort"] = wanted if wanted in _EFFORTS else "low"
        else:
            written["thinking"] = _budget(wanted, most, request, style)
        if wanted not in _EFFORTS or not style.has_effort:
            notes.add("reasoning_effort is set as a budget of tokens, or as the nearest effort.")
    return written, config


def _budget(effort: str, most: int, request: InferenceRequest, style: Style) -> dict[str, Any]:
    budget = min(_BUDGETS.get(effort, _LARGEST_BUDGET), most - 1)
    if budget < _LEAST_BUDGET:
        why = f"thinking takes at least {_LEAST_BUDGET} tokens, and max_tokens is {most}"
        raise refused(request, "reasoning_effort", style.name, why)
    return {"type": "enabled", "budget_tokens": budget}
