"""A request as the body of Gemini's generateContent.

Source: https://ai.google.dev/api/generate-content and Vertex AI's reference of the same method.
"""

import mimetypes
import re
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from core.errors import BadRequest
from gateway.engines.ports.conversation import (
    ERROR_MARK,
    allowed_tools,
    arguments_of,
    cites,
    data_of_url,
    details_of,
    foreign_details,
    has_cache_marks,
    leading_system,
    named_tool,
    parts_of,
    schema_of,
    text_of,
    tool_names,
)
from gateway.engines.ports.port import Notes, refuse_set, refused
from gateway.request.engine import Job
from gateway.request.inference import InferenceRequest
from gateway.request.thoughts import GEMINI

# Calls whose id the provider did not make: it matches their results by name and order.
_FOREIGN_IDS = ("call_", "toolu_")
_WITH_BUDGET = re.compile(r"gemini-(?:1|2)\b|gemini-2\.")
_BUDGETS = {"minimal": 512, "low": 1_024, "medium": 8_192, "high": 24_576}
_LEVELS = {"minimal": "minimal", "low": "low", "medium": "medium"}  # any other is high
_NAME = "gemini"


def content_body(job: Job, model: str, notes: Notes) -> dict[str, Any]:
    """Raises UnsupportedParameter."""
    request = job.request
    refuse_set(request, _NAME, "logit_bias")
    messages = request.messages or ()
    system, rest = leading_system(messages)
    body: dict[str, Any] = {"contents": contents(request, rest, tool_names(messages), notes)}
    if system:
        body["systemInstruction"] = {"parts": [{"text": part["text"]} for part in system]}
    if has_cache_marks(messages, request.tools or ()):
        notes.add("cache_control has no effect: the provider caches by itself.")
    body |= _tools(request, notes)
    if config := _config(job, model, notes):
        body["generationConfig"] = config
    return body


def contents(
    request: InferenceRequest,
    messages: Sequence[dict[str, Any]],
    names: Mapping[str, str],
    notes: Notes,
) -> list[dict[str, Any]]:
    turns: list[dict[str, Any]] = []
    for message in messages:
        role = message["role"]
        if role in ("tool", "function"):
            _extend(turns, "user", [_result(message, names)])
        elif role == "assistant":
            _extend(turns, "model", _answer(message, notes))
        else:
            if role != "user":
                notes.add("A system message within the conversation is sent as the user's.")
            own = []
            for part in parts_of(message.get("content")):
                made = _part(part, request, notes)
                if not _put_into_result(turns, part, made, names):
                    own.append(made)
            _extend(turns, "user", own)
    return [turn for turn in turns if turn["parts"]]


def _extend(turns: list[dict[str, Any]], role: str, parts: list[dict[str, Any]]) -> None:
    if turns and turns[-1]["role"] == role:
        turns[-1]["parts"] += parts
    else:
        turns.append({"role": role, "parts": parts})


def _put_into_result(
    turns: list[dict[str, Any]],
    part: dict[str, Any],
    made: dict[str, Any],
    names: Mapping[str, str],
) -> bool:
    """An image that a tool returned goes back into its result."""
    name = names.get(str(part.get("of_call")))
    if name is None or not turns or "inlineData" not in made:
        return False
    for held in reversed(turns[-1]["parts"]):
        if (result := held.get("functionResponse")) and result["name"] == name:
            result.setdefault("parts", []).append(made)
            return True
    return False


def _result(message: dict[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    call_id, text = str(message.get("tool_call_id") or ""), text_of(message.get("content"))
    name = names.get(call_id) or message.get("name")
    if not name:
        raise BadRequest(
            f"The tool result {call_id!r} has no call before it, whose name the provider needs.",
            next_step="Send the assistant's message with the call, too.",
            param="messages",
            code="invalid_value",
        )
    failed = bool(message.get("is_error"))
    said = {"error": text.removeprefix(ERROR_MARK)} if failed else {"output": text}
    return {"functionResponse": {"name": name, "response": said, **_own_id(call_id)}}


def _own_id(call_id: str) -> dict[str, str]:
    return {} if call_id.startswith(_FOREIGN_IDS) or not call_id else {"id": call_id}


def _answer(message: dict[str, Any], notes: Notes) -> list[dict[str, Any]]:
    if foreign_details(message, GEMINI):
        notes.add("Reasoning of another provider is not sent back.")
    details = details_of(message, GEMINI)
    signed = {each.get("id"): each.get("data") for each in details if each.get("id")}
    parts: list[dict[str, Any]] = [
        {"text": part["text"]} for part in parts_of(message.get("content")) if part.get("text")
    ]
    alone = [each.get("data") for each in details if not each.get("id")]
    if alone and parts:
        parts[-1]["thoughtSignature"] = alone[-1]
    elif alone and not message.get("tool_calls"):
        parts.append({"text": "", "thoughtSignature": alone[-1]})
    for call in message.get("tool_calls") or ():
        function, call_id = call["function"], str(call.get("id") or "")
        called = {"name": function["name"], "args": arguments_of(call), **_own_id(call_id)}
        part: dict[str, Any] = {"functionCall": called}
        if signature := _signature_of(call_id, signed):
            part["thoughtSignature"] = signature
        parts.append(part)
    return parts


def _signature_of(call_id: str, signed: Mapping[Any, Any]) -> Any:
    """By its id, which /v1/messages writes with another beginning."""
    return signed.get(call_id) or signed.get(call_id.replace("toolu_", "call_", 1))


def _part(part: dict[str, Any], request: InferenceRequest, notes: Notes) -> dict[str, Any]:
    if cites(part):
        raise refused(request, "citations", _NAME)
    if part["type"] == "image_url":
        if part["image_url"].get("detail") not in (None, "auto"):
            notes.add("The detail of an image has no effect.")
        return _media(part["image_url"]["url"], request, "images")
    if part["type"] == "input_audio":
        audio = part["input_audio"]
        return {
            "inlineData": {
                "mimeType": f"audio/{audio.get('format') or 'wav'}",
                "data": audio["data"],
            }
        }
    if part["type"] == "file":
        file = part["file"]
        url = file.get("file_data") or file.get("url")
        if not url:
            raise refused(request, "documents", _NAME, "a file is sent as data, not by id")
        return _media(url, request, "documents")
    return {"text": part["text"]}


def _media(url: str, request: InferenceRequest, kind: str) -> dict[str, Any]:
    data = data_of_url(url)
    if data is not None:
        return {"inlineData": {"mimeType": data.media_type, "data": data.base64}}
    media_type = mimetypes.guess_type(urlsplit(url).path)[0]
    if media_type is None:
        why = "the type of a URL without an ending is not known; send it as data"
        raise refused(request, kind, _NAME, why)
    return {"fileData": {"mimeType": media_type, "fileUri": url}}


def _tools(request: InferenceRequest, notes: Notes) -> dict[str, Any]:
    given = request.engine_parameters.get("tool_choice")
    choice, tools = allowed_tools(given, request.tools or ())
    if not tools:
        return {}
    declared = []
    for tool in tools:
        function = tool["function"]
        if function.get("strict"):
            notes.add("tools[].strict is not enforced.")
        written = {"name": function["name"], "description": function.get("description") or ""}
        if function.get("parameters"):
            written["parametersJsonSchema"] = function["parameters"]
        declared.append(written)
    body: dict[str, Any] = {"tools": [{"functionDeclarations": declared}]}
    config: dict[str, Any] = {}
    if name := named_tool(choice):
        config = {"mode": "ANY", "allowedFunctionNames": [name]}
    elif choice == "required":
        config = {"mode": "ANY"}
    if config:
        body["toolConfig"] = {"functionCallingConfig": config}
    if request.single_tool_call:
        notes.add("Of several tool calls only the first is returned.")
    return body


def _config(job: Job, model: str, notes: Notes) -> dict[str, Any]:
    request = job.request
    config: dict[str, Any] = {}
    for name, to in (
        ("temperature", "temperature"),
        ("top_p", "topP"),
        ("top_k", "topK"),
        ("seed", "seed"),
        ("presence_penalty", "presencePenalty"),
        ("frequency_penalty", "frequencyPenalty"),
    ):
        if (value := getattr(request, name)) is not None:
            config[to] = value
    if request.max_tokens is not None:
        config["maxOutputTokens"] = min(request.max_tokens, job.engine_request.sampling.max_tokens)
    if request.stop:
        config["stopSequences"] = list(request.stop)
    if request.n > 1:
        config["candidateCount"] = request.n
    if request.logprobs is not None:
        config |= {"responseLogprobs": True, "logprobs": request.logprobs}
    if form := request.engine_parameters.get("response_format"):
        config["responseMimeType"] = "application/json"
        if (schema := schema_of(form)) is not None:
            config["responseJsonSchema"] = schema
    if thinking := _thinking(request, model, notes):
        config["thinkingConfig"] = thinking
    return config


def _thinking(request: InferenceRequest, model: str, notes: Notes) -> dict[str, Any]:
    given = request.extra.get("thinking") or {}
    effort = request.reasoning_effort or request.extra.get("effort")
    has_budget = _WITH_BUDGET.search(model) is not None
    if given.get("type") == "disabled":
        return {"thinkingBudget": 0} if has_budget else {"thinkingLevel": "minimal"}
    config: dict[str, Any] = {}
    if given or effort:
        config["includeThoughts"] = given.get("display") != "omitted"
    if budget := given.get("budget_tokens"):
        config["thinkingBudget"] = budget
    elif effort and has_budget:
        notes.add("The effort is set as a budget of thinking tokens.")
        config["thinkingBudget"] = _BUDGETS.get(effort, _BUDGETS["high"])
    elif effort:
        config["thinkingLevel"] = _LEVELS.get(effort, "high")
        if effort not in (*_LEVELS, "high"):
            notes.add("The effort is set to high.")
    return config
