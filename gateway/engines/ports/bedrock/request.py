"""A request as the body of Bedrock's Converse.

Source: the service model of `bedrock-runtime` in botocore. Fields beyond it are those of one model
family, in `additionalModelRequestFields`.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from core.errors import BadRequest
from gateway.engines.ports.anthropic.request import Style, thinking_of
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

_NAME = "bedrock"
_IMAGES = {"image/png": "png", "image/jpeg": "jpeg", "image/gif": "gif", "image/webp": "webp"}
_DOCUMENTS = {
    "application/pdf": "pdf",
    "text/csv": "csv",
    "application/msword": "doc",
    "application/vnd.openxmlformats-officedocument.wordprocessingml.document": "docx",
    "application/vnd.ms-excel": "xls",
    "application/vnd.openxmlformats-officedocument.spreadsheetml.sheet": "xlsx",
    "text/html": "html",
    "text/plain": "txt",
    "text/markdown": "md",
}
_OTHER_IN_NAME = re.compile(r"[^0-9A-Za-z \-()\[\]]+|\s{2,}")


def converse_body(job: Job, model: str, options: Mapping[str, Any], notes: Notes) -> dict[str, Any]:
    """Raises UnsupportedParameter."""
    request = job.request
    refuse_set(request, _NAME, "frequency_penalty", "presence_penalty", "seed", "logprobs")
    refuse_set(request, _NAME, "logit_bias", "n")
    system, rest = leading_system(request.messages or ())
    body: dict[str, Any] = {"messages": conversation(request, rest, notes)}
    if system:
        body["system"] = [
            block for part in system for block in _with_mark({"text": part["text"]}, part)
        ]
    config: dict[str, Any] = {}
    if request.max_tokens is not None:
        config["maxTokens"] = min(request.max_tokens, job.engine_request.sampling.max_tokens)
    for name, to in (("temperature", "temperature"), ("top_p", "topP")):
        if (value := getattr(request, name)) is not None:
            config[to] = value
    if request.stop:
        config["stopSequences"] = list(request.stop)
    if config:
        body["inferenceConfig"] = config
    body |= _tools(request, notes)
    if form := request.engine_parameters.get("response_format"):
        body["outputConfig"] = {"textFormat": _format(form, request)}
    fields = _own_fields(request, model, options, config, notes)
    if fields:
        body["additionalModelRequestFields"] = fields
    if guardrail := options.get("guardrail"):
        version = str(options.get("guardrail_version") or "DRAFT")
        body["guardrailConfig"] = {"guardrailIdentifier": guardrail, "guardrailVersion": version}
    return body


def _own_fields(
    request: InferenceRequest,
    model: str,
    options: Mapping[str, Any],
    config: Mapping[str, Any],
    notes: Notes,
) -> dict[str, Any]:
    """Fields of Claude's and Nova's that Converse has no name for."""
    fields: dict[str, Any] = {}
    if request.top_k is not None:
        if "anthropic" not in model and "claude" not in model:
            raise refused(request, "top_k", _NAME, "only Claude takes it")
        fields["top_k"] = request.top_k
    wants = request.reasoning_effort or request.extra.get("thinking") or request.extra.get("effort")
    if not wants:
        return fields
    if "anthropic" not in model and "claude" not in model:
        if request.reasoning_effort is not None:
            raise refused(request, "reasoning_effort", _NAME, "only Claude takes it")
        notes.add("thinking has no effect on this model.")
        return fields
    most = int(config.get("maxTokens") or 8_192)
    thinking, output = thinking_of(request, most, Style(options, model, _NAME), notes)
    return fields | thinking | ({"output_config": output} if output else {})


def conversation(
    request: InferenceRequest, messages: Sequence[dict[str, Any]], notes: Notes
) -> list[dict[str, Any]]:
    turns: list[dict[str, Any]] = []
    for message in messages:
        role = message["role"]
        if role in ("tool", "function"):
            _extend(turns, "user", _with_mark(_result(message), message))
        elif role == "assistant":
            _extend(turns, role, _answer(message, notes))
        else:
            if role != "user":
                notes.add("A system message within the conversation is sent as the user's.")
            own: list[dict[str, Any]] = []
            for part in parts_of(message.get("content")):
                block = _block(part, request, notes)
                if not _put_into_result(turns, part, block):
                    own += _with_mark(block, part)
            _extend(turns, "user", own)
    return [turn for turn in turns if turn["content"]]


def _extend(turns: list[dict[str, Any]], role: str, blocks: list[dict[str, Any]]) -> None:
    if turns and turns[-1]["role"] == role:
        turns[-1]["content"] += blocks
    else:
        turns.append({"role": role, "content": blocks})


def _put_into_result(
    turns: list[dict[str, Any]], part: dict[str, Any], block: dict[str, Any]
) -> bool:
    call_id = part.get("of_call")
    if call_id is None or not turns:
        return False
    for held in turns[-1]["content"]:
        if (result := held.get("toolResult")) and result["toolUseId"] == call_id:
            result["content"].append(block)
            return True
    return False


def _result(message: dict[str, Any]) -> dict[str, Any]:
    text, failed = text_of(message.get("content")), bool(message.get("is_error"))
    result: dict[str, Any] = {
        "toolUseId": str(message.get("tool_call_id") or ""),
        "content": [{"text": text.removeprefix(ERROR_MARK) if failed else text}],
    }
    if failed:
        result["status"] = "error"
    return {"toolResult": result}


def _answer(message: dict[str, Any], notes: Notes) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    for part in parts_of(message.get("content")):
        if part.get("text"):
            blocks += _with_mark({"text": part["text"]}, part)
    for call in message.get("tool_calls") or ():
        function = call["function"]
        used = {"toolUseId": call["id"], "name": function["name"], "input": arguments_of(call)}
        blocks.append({"toolUse": used})
    if blocks:
        blocks += _with_mark({}, message)[1:]
    if foreign_details(message, ANTHROPIC):
        notes.add("Reasoning of another provider is not sent back.")
    places = [
        (each["index"] if type(each.get("index")) is int else 0, _thought(each))
        for each in details_of(message, ANTHROPIC)
    ]
    return list(with_details(blocks, places))


def _thought(detail: dict[str, Any]) -> dict[str, Any]:
    if detail["type"] == "reasoning.encrypted":
        return {"reasoningContent": {"redactedContent": detail.get("data") or ""}}
    text = {"text": detail.get("text") or "", "signature": detail.get("signature") or ""}
    return {"reasoningContent": {"reasoningText": text}}


def _with_mark(block: dict[str, Any], holder: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The block, and after it a point up to which the prompt is cached, where one is marked."""
    mark = holder.get("cache_control")
    if mark is None:
        return [block]
    point = {"type": "default"}
    if isinstance(mark, dict) and mark.get("ttl") in ("5m", "1h"):
        point["ttl"] = mark["ttl"]
    return [block, {"cachePoint": point}]


def _block(part: dict[str, Any], request: InferenceRequest, notes: Notes) -> dict[str, Any]:
    if part["type"] == "image_url":
        if part["image_url"].get("detail") not in (None, "auto"):
            notes.add("The detail of an image has no effect.")
        return _image(part["image_url"]["url"], request)
    if part["type"] == "file":
        return _document(part["file"], request)
    if part["type"] == "input_audio":
        audio = part["input_audio"]
        return {
            "audio": {"format": audio.get("format") or "wav", "source": {"bytes": audio["data"]}}
        }
    if (held := part.get("document")) is not None:
        block: dict[str, Any] = {"name": _name(held.get("title")), "format": "txt"}
        kept = {name: held[name] for name in ("context", "citations") if name in held}
        return {"document": {**block, "source": {"text": part["text"]}, **kept}}
    return {"text": part["text"]}


def _name(title: Any) -> str:
    """Bedrock takes letters, digits, single spaces, hyphens and brackets."""
    return _OTHER_IN_NAME.sub(" ", str(title or ""))[:200].strip() or "document"


def _image(url: str, request: InferenceRequest) -> dict[str, Any]:
    if url.startswith("s3://"):
        raise refused(request, "images", _NAME)
    data = data_of_url(url)
    if data is None:
        raise refused(request, "images", _NAME, "it fetches no addresses; send the image as data")
    if data.media_type not in _IMAGES:
        raise BadRequest(
            f"An image is {data.media_type[:40]}, which this model's provider does not read.",
            next_step=f"Send one of {', '.join(_IMAGES)}.",
            code="invalid_value",
        )
    return {"image": {"format": _IMAGES[data.media_type], "source": {"bytes": data.base64}}}


def _document(file: dict[str, Any], request: InferenceRequest) -> dict[str, Any]:
    block: dict[str, Any] = {"name": _name(file.get("filename"))}
    if (data := data_of_url(file.get("file_data") or "")) is not None:
        if data.media_type not in _DOCUMENTS:
            raise refused(request, "documents", _NAME, f"it does not read {data.media_type[:60]}")
        block |= {"format": _DOCUMENTS[data.media_type], "source": {"bytes": data.base64}}
    else:
        raise refused(request, "documents", _NAME, "a file is sent as data")
    for field in ("context", "citations"):
        if file.get(field) is not None:
            block[field] = file[field]
    return {"document": block}


def _tools(request: InferenceRequest, notes: Notes) -> dict[str, Any]:
    given = request.engine_parameters.get("tool_choice")
    choice, tools = allowed_tools(given, request.tools or ())
    if not tools:
        return {}
    written: list[dict[str, Any]] = []
    for tool in tools:
        function = tool["function"]
        spec: dict[str, Any] = {
            "name": function["name"],
            "inputSchema": {
                "json": function.get("parameters") or {"type": "object", "properties": {}}
            },
        }
        for name in ("description", "strict"):
            if function.get(name):
                spec[name] = function[name]
        written += _with_mark({"toolSpec": spec}, tool)
    config: dict[str, Any] = {"tools": written}
    if chosen := named_tool(choice):
        config["toolChoice"] = {"tool": {"name": chosen}}
    elif choice == "required":
        config["toolChoice"] = {"any": {}}
    if request.single_tool_call:
        notes.add("Of several tool calls only the first is returned.")
    return {"toolConfig": config}


def _format(form: dict[str, Any], request: InferenceRequest) -> dict[str, Any]:
    schema = schema_of(form)
    if schema is None:
        raise refused(request, "response_format", _NAME, "it takes a JSON schema")
    held = form.get("json_schema") or {}
    named: dict[str, Any] = {"schema": orjson.dumps(schema).decode()}
    named["name"] = str(held.get("name") or "output")
    if held.get("description"):
        named["description"] = held["description"]
    return {"type": "json_schema", "structure": {"jsonSchema": named}}
