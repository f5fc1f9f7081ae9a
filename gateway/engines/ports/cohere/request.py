"""A chat as the body of Cohere's /v2/chat.

Source: https://docs.cohere.com/reference/chat
"""

from collections.abc import Sequence
from typing import Any

from gateway.engines.ports.conversation import (
    allowed_tools,
    cites,
    foreign_details,
    has_cache_marks,
    named_tool,
    parts_of,
    schema_of,
    text_of,
)
from gateway.engines.ports.port import Notes, refuse_set, refused
from gateway.request.engine import Job
from gateway.request.inference import InferenceRequest

FORMAT = "cohere-v2"  # of the plan before tool calls, which goes back
_NAME = "cohere"
_BUDGETS = {"minimal": 256, "low": 1_024, "medium": 4_096}


def chat_body(job: Job, model: str, notes: Notes) -> dict[str, Any]:
    """Raises UnsupportedParameter."""
    request = job.request
    refuse_set(request, _NAME, "logprobs", "logit_bias", "n")
    body: dict[str, Any] = {
        "model": model,
        "messages": messages(request, request.messages or (), notes),
        "stream": request.stream,
    }
    if has_cache_marks(request.messages or (), request.tools or ()):
        notes.add("cache_control has no effect: the provider caches by itself.")
    if request.max_tokens is not None:
        body["max_tokens"] = min(request.max_tokens, job.engine_request.sampling.max_tokens)
    for name, to in (
        ("temperature", "temperature"),
        ("top_p", "p"),
        ("top_k", "k"),
        ("seed", "seed"),
        ("frequency_penalty", "frequency_penalty"),
        ("presence_penalty", "presence_penalty"),
    ):
        if (value := getattr(request, name)) is not None:
            body[to] = value
    if request.stop:
        body["stop_sequences"] = list(request.stop)
    body |= _tools(request, notes)
    if form := request.engine_parameters.get("response_format"):
        schema = schema_of(form)
        body["response_format"] = {"type": "json_object"} | (
            {"json_schema": schema} if schema else {}
        )
    if thinking := _thinking(request, notes):
        body["thinking"] = thinking
    return body


def messages(
    request: InferenceRequest, given: Sequence[dict[str, Any]], notes: Notes
) -> list[dict[str, Any]]:
    listed: list[dict[str, Any]] = []
    for message in given:
        role = message["role"]
        if role in ("tool", "function"):
            call_id = str(message.get("tool_call_id") or "")
            text = text_of(message.get("content"))
            listed.append({"role": "tool", "tool_call_id": call_id, "content": text})
        elif role == "assistant":
            listed.append(_answer(message, notes))
        else:
            content = [_part(part, request) for part in parts_of(message.get("content"))]
            listed.append({"role": "system" if role == "developer" else role, "content": content})
    return listed


def _answer(message: dict[str, Any], notes: Notes) -> dict[str, Any]:
    if foreign_details(message, FORMAT):
        notes.add("Reasoning of another provider is not sent back.")
    answer: dict[str, Any] = {"role": "assistant"}
    if text := text_of(message.get("content")):
        answer["content"] = text
    plans = [
        each.get("text") or ""
        for each in message.get("reasoning_details") or ()
        if each.get("format") == FORMAT
    ]
    if calls := message.get("tool_calls"):
        named = ("id", "type", "function")
        answer["tool_calls"] = [
            {name: each[name] for name in named if name in each} for each in calls
        ]
        if plans:
            answer["tool_plan"] = "".join(plans)
    return answer


def _part(part: dict[str, Any], request: InferenceRequest) -> dict[str, Any]:
    if cites(part):
        raise refused(request, "citations", _NAME)
    if part["type"] == "image_url":
        return {"type": "image_url", "image_url": part["image_url"]}
    if part["type"] == "text":
        return {"type": "text", "text": part["text"]}
    kind = "audio" if part["type"] == "input_audio" else "documents"
    raise refused(request, kind, _NAME)


def _tools(request: InferenceRequest, notes: Notes) -> dict[str, Any]:
    given = request.engine_parameters.get("tool_choice")
    choice, tools = allowed_tools(given, request.tools or ())
    if name := named_tool(choice):
        tools = [each for each in tools if each["function"]["name"] == name]
        choice = "required"
        notes.add("A named tool is the only one that is sent.")
    if not tools:
        return {}
    fields = ("name", "description", "parameters")
    written = [
        {
            "type": "function",
            "function": {k: each["function"][k] for k in fields if k in each["function"]},
        }
        for each in tools
    ]
    body: dict[str, Any] = {"tools": written}
    if choice == "required":
        body["tool_choice"] = "REQUIRED"
    if any(each["function"].get("strict") for each in tools):
        body["strict_tools"] = True
    if request.single_tool_call:
        notes.add("Of several tool calls only the first is returned.")
    return body


def _thinking(request: InferenceRequest, notes: Notes) -> dict[str, Any]:
    given = request.extra.get("thinking") or {}
    if given.get("type") == "disabled":
        return {"type": "disabled"}
    effort = request.reasoning_effort or request.extra.get("effort")
    budget = given.get("budget_tokens") or _BUDGETS.get(str(effort))
    if not given and not effort:
        return {}
    if effort:
        notes.add("The effort is set as a budget of thinking tokens.")
    return {"type": "enabled"} | ({"token_budget": budget} if budget else {})
