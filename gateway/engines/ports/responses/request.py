"""A chat as the body of /v1/responses, which keeps nothing: `store` is false."""

from collections.abc import Sequence
from typing import Any

from gateway.engines.ports.conversation import cites, details_of, foreign_details, parts_of, text_of
from gateway.engines.ports.port import Notes, refuse_set, refused
from gateway.request.engine import Job
from gateway.request.inference import InferenceRequest
from gateway.request.thoughts import OPENAI

_NAME = "openai-responses"
_ENCRYPTED = "reasoning.encrypted_content"
_LOGPROBS = "message.output_text.logprobs"


def responses_body(job: Job, model: str, notes: Notes) -> dict[str, Any]:
    """Raises UnsupportedParameter."""
    request = job.request
    refuse_set(request, _NAME, "frequency_penalty", "presence_penalty", "seed", "logit_bias")
    refuse_set(request, _NAME, "n", "stop")
    body: dict[str, Any] = {
        "model": model,
        "input": items(request, request.messages or (), notes),
        "store": False,
    }
    include = [_ENCRYPTED]
    if request.max_tokens is not None:
        limit = min(request.max_tokens, job.engine_request.sampling.max_tokens)
        body["max_output_tokens"] = limit
    for name in ("temperature", "top_p", "service_tier"):
        if (value := getattr(request, name)) is not None:
            body[name] = value
    if request.logprobs is not None:
        body["top_logprobs"] = request.logprobs
        include.append(_LOGPROBS)
    effort = request.reasoning_effort or request.extra.get("effort")
    thinking = request.extra.get("thinking") or {}
    if effort or thinking.get("type") in ("enabled", "adaptive"):
        body["reasoning"] = {"summary": "auto"} | ({"effort": effort} if effort else {})
        if thinking.get("budget_tokens"):
            notes.add("The budget of thinking tokens has no effect.")
    body |= _tools(request)
    if form := request.engine_parameters.get("response_format"):
        held = form.get("json_schema") or {}
        body["text"] = {"format": {"type": form["type"], **held}}
    body["include"] = include
    if request.end_user:
        body["safety_identifier"] = request.end_user
    return body


def items(
    request: InferenceRequest, messages: Sequence[dict[str, Any]], notes: Notes
) -> list[dict[str, Any]]:
    listed: list[dict[str, Any]] = []
    results: dict[str, dict[str, Any]] = {}
    for message in messages:
        role = message["role"]
        if role in ("tool", "function"):
            call_id = str(message.get("tool_call_id") or "")
            text = text_of(message.get("content"))
            result = {"type": "function_call_output", "call_id": call_id, "output": text}
            results[call_id] = result
            listed.append(result)
        elif role == "assistant":
            listed += _answer(message, notes)
        else:
            content = []
            for part in parts_of(message.get("content")):
                made = _part(part, request)
                held = results.get(str(part.get("of_call")))
                if held is None:
                    content.append(made)
                elif isinstance(held["output"], str):
                    held["output"] = [{"type": "input_text", "text": held["output"]}, made]
                else:
                    held["output"].append(made)
            if content:
                listed.append({"type": "message", "role": role, "content": content})
    return listed


def _answer(message: dict[str, Any], notes: Notes) -> list[dict[str, Any]]:
    if foreign_details(message, OPENAI):
        notes.add("Reasoning of another provider is not sent back.")
    listed = [_reasoning(each) for each in details_of(message, OPENAI)]
    if text := text_of(message.get("content")):
        part = {"type": "output_text", "text": text}
        listed.append({"type": "message", "role": "assistant", "content": [part]})
    for call in message.get("tool_calls") or ():
        function = call["function"]
        named = {"name": function["name"], "arguments": function.get("arguments") or "{}"}
        listed.append({"type": "function_call", "call_id": call["id"], **named})
    return listed


def _reasoning(detail: dict[str, Any]) -> dict[str, Any]:
    item = {"type": "reasoning", "summary": detail.get("parts") or []}
    if detail.get("id"):
        item["id"] = detail["id"]
    return {**item, "encrypted_content": detail.get("data") or ""}


def _part(part: dict[str, Any], request: InferenceRequest) -> dict[str, Any]:
    if cites(part):
        raise refused(request, "citations", _NAME)
    if part["type"] == "image_url":
        image = part["image_url"]
        detail = {"detail": image["detail"]} if image.get("detail") else {}
        return {"type": "input_image", "image_url": image["url"], **detail}
    if part["type"] == "input_audio":
        raise refused(request, "audio", _NAME)
    if part["type"] == "file":
        file = part["file"]
        named = {"url": "file_url", "file_data": "file_data", "file_id": "file_id"}
        kept = {to: file[name] for name, to in named.items() if file.get(name) is not None}
        if file.get("filename"):
            kept["filename"] = file["filename"]
        return {"type": "input_file", **kept}
    return {"type": "input_text", "text": part["text"]}


def _tools(request: InferenceRequest) -> dict[str, Any]:
    if not request.tools:
        return {}
    tools = []
    for tool in request.tools:
        function = tool["function"]
        parameters = function.get("parameters") or {"type": "object", "properties": {}}
        written = {"type": "function", "name": function["name"], "parameters": parameters}
        if function.get("description"):
            written["description"] = function["description"]
        tools.append({**written, "strict": bool(function.get("strict"))})
    body: dict[str, Any] = {"tools": tools}
    choice = request.engine_parameters.get("tool_choice")
    if isinstance(choice, dict) and choice.get("type") == "function":
        body["tool_choice"] = {"type": "function", "name": choice["function"]["name"]}
    elif isinstance(choice, dict):
        body["tool_choice"] = _allowed(choice)
    elif choice is not None:
        body["tool_choice"] = choice
    if request.single_tool_call:
        body["parallel_tool_calls"] = False
    return body


def _allowed(choice: dict[str, Any]) -> dict[str, Any]:
    given = choice.get("allowed_tools") or choice
    tools = [
        {"type": "function", "name": (each.get("function") or each).get("name")}
        for each in given.get("tools") or ()
    ]
    return {"type": "allowed_tools", "mode": given.get("mode") or "auto", "tools": tools}
