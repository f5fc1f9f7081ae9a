"""The bodies of Anthropic's /v1/messages and its count_tokens, as `InferenceRequest`s."""

import json
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from core.errors import BadRequest, UnsupportedParameter
from gateway.edge.api_errors import ROUTE
from gateway.edge.decoding import Request, check_label, check_range, decode, refuse_unsupported
from gateway.formats.chat.request import MAX_MESSAGES
from gateway.formats.messages.thinking import details_of, with_details
from gateway.formats.sampling import Positive, stops_of
from gateway.request import media_parts
from gateway.request.inference import InferenceRequest


class Block(Request):
    type: str
    text: str | None = None
    id: str | None = None
    name: str | None = None
    input: Any = None
    tool_use_id: str | None = None
    content: Any = None
    is_error: bool | None = None
    caller: Any = None  # the SDK returns these two unchanged
    toolset_name: str | None = None
    source: Any = None
    citations: Any = None
    cache_control: Any = None
    thinking: str | None = None
    signature: str | None = None
    data: str | None = None  # of a redacted thought
    title: str | None = None  # of a document, as is the next
    context: str | None = None


class Message(Request):
    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class Tool(Request):
    name: str
    input_schema: dict[str, Any] | None = None
    description: str | None = None
    type: str | None = None
    strict: bool | None = None
    cache_control: Any = None
    eager_input_streaming: bool | None = None  # a hint: input is streamed as soon as it is complete
    defer_loading: bool | None = None
    allowed_callers: list[str] | None = None
    input_examples: list[dict[str, Any]] | None = None


class Metadata(Request):
    user_id: str | None = None


class CountBody(Request, kw_only=True):
    model: Annotated[str, Meta(min_length=1, max_length=300)]
    messages: Annotated[list[Message], Meta(min_length=1, max_length=MAX_MESSAGES)]
    system: str | list[Block] | None = None
    tools: Annotated[list[Tool], Meta(max_length=512)] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    cache_control: Any = None  # a cache mark after the last block
    context_management: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    mcp_servers: Any = None
    thread: Any = None
    diagnostics: Any = None
    speed: str | None = None


class MessagesBody(CountBody, kw_only=True):
    max_tokens: Positive
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    metadata: Metadata | None = None
    service_tier: str | None = None
    container: Any = None


_COUNT_IGNORED_VALUES: dict[str, tuple[Any, ...]] = {"mcp_servers": ([],), "speed": ("standard",)}
_IGNORED_VALUES = _COUNT_IGNORED_VALUES | {
    "service_tier": ("auto", "standard_only"),
    "container": (),
}
_NAMED = {
    "response_format": "output_config.format",
    "strict": "tools[].strict",
    "continue_final_message": "a conversation that ends with the assistant's message",
}
# Thoughts of earlier turns are not shown to the model again, unless its provider signed them
# (`thinking.py`); those of a tool loop are `tool_reasoning`.
_OWN_BLOCKS: dict[str, tuple[str, ...]] = {
    "user": ("text", "image", "document"),
    "system": ("text",),
    "assistant": ("text", "tool_use", "thinking", "redacted_thinking"),
}
_THINKING = ("enabled", "adaptive", "disabled")
_EFFORTS = ("low", "medium", "high", "xhigh", "max")
# Thoughts of earlier turns are never in the prompt, so clearing them changes nothing.
_CLEARS_THINKING = "clear_thinking_"
_decoder = msgspec.json.Decoder(MessagesBody)
_count_decoder = msgspec.json.Decoder(CountBody)


def parse_messages(raw: bytes) -> InferenceRequest:
    body = decode(_decoder, raw)
    refuse_unsupported(body, _IGNORED_VALUES)
    check_range("temperature", body.temperature, 0, 1)
    check_range("top_p", body.top_p, 0, 1)
    user = body.metadata.user_id if body.metadata else None
    media: dict[str, str] = {}
    return InferenceRequest(
        route=ROUTE,
        model=body.model,
        messages=chat_messages(body, media),
        tools=_tools(body),
        max_tokens=body.max_tokens,
        clamp_max_tokens=True,  # the API demands a number, so SDKs send one of their own
        continue_final_message=_prefilled(body),
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=max(0, body.top_k) if body.top_k is not None else None,
        stop=stops_of("stop_sequences", body.stop_sequences),
        stream=bool(body.stream),
        include_usage=True,
        end_user=check_label("metadata.user_id", user),
        tool_reasoning=_tool_reasoning(body.messages),
        **_constraints(body, media),
    )


def parse_count(raw: bytes) -> InferenceRequest:
    body = decode(_count_decoder, raw)
    refuse_unsupported(body, _COUNT_IGNORED_VALUES)
    _check_options(body)
    media: dict[str, str] = {}
    return InferenceRequest(
        route=f"{ROUTE}/count_tokens",
        model=body.model,
        messages=chat_messages(body, media),
        tools=_tools(body),
        max_tokens=1,
        continue_final_message=_prefilled(body),
        engine_parameters=media_parts.needed(media),
        extra={"named": media},
    )


def _constraints(body: MessagesBody, media: dict[str, str]) -> dict[str, Any]:
    """tool_choice, strict tools, output_config and images as keyword arguments of
    `InferenceRequest`."""
    engine_parameters: dict[str, Any] = media_parts.needed(media)
    given = body.tool_choice or {}
    if forced := _forced(body):
        engine_parameters["tool_choice"] = forced
    if any(tool.strict for tool in body.tools or ()) and given != {"type": "none"}:
        engine_parameters["strict"] = True
    if form := (body.output_config or {}).get("format"):
        engine_parameters["response_format"] = _output_format(form)
    _check_options(body)
    extra: dict[str, Any] = {"named": _NAMED | media, "thinking_notes": _thinking_notes(body)}
    for name, value in (
        ("thinking", body.thinking),
        ("effort", (body.output_config or {}).get("effort")),
        ("cache_control", body.cache_control),
    ):
        if value is not None:
            extra[name] = value
    return {
        "single_tool_call": given.get("disable_parallel_tool_use") is True,
        "engine_parameters": engine_parameters,
        "extra": extra,
    }


def _prefilled(body: CountBody) -> bool:
    """Whether the conversation ends with the beginning of the answer."""
    last = body.messages[-1]
    if last.role != "assistant":
        return False
    text = last.content
    if not isinstance(text, str):
        text = text[-1].text or "" if text and text[-1].type == "text" else ""
    if not text or text != text.rstrip():
        raise BadRequest(
            "The last message is the assistant's: it must end with text, and not with white space.",
            next_step="Trim it, or end the conversation with a user message.",
            param="messages",
            code="invalid_value",
        )
    return True


def _forced(body: MessagesBody) -> Any:
    """tool_choice in the form of OpenAI's chat API; None where it leaves the choice."""
    given = body.tool_choice
    if given is None:
        return None
    kind = str(given.get("type")) if isinstance(given, dict) else ""
    forced: Any = {"auto": None, "none": None, "any": "required", "tool": "tool"}.get(kind, "")
    if forced == "" or (forced is not None and not body.tools):
        raise BadRequest(
            "tool_choice must have type auto, none, any or tool; any and tool need tools.",
            next_step="Correct tool_choice.",
            param="tool_choice",
            code="invalid_value",
        )
    if forced == "tool":
        return {"type": "function", "function": {"name": str(given.get("name"))}}
    return forced


def _output_format(form: Any) -> dict[str, Any]:
    """`output_config.format` in the form of OpenAI's response_format."""
    if not isinstance(form, dict) or form.get("type") != "json_schema":
        raise UnsupportedParameter(
            "output_config.format supports the type json_schema only.",
            next_step="Correct output_config.format.",
            param="output_config.format",
        )
    return {
        "type": "json_schema",
        "json_schema": {"name": "output", "schema": form.get("schema"), "strict": True},
    }


def chat_messages(body: CountBody, media: dict[str, str]) -> list[dict[str, Any]]:
    """The conversation in the format of chat templates. `media` takes the kinds of blocks that are not
    text, and where the first of each is."""
    result: list[dict[str, Any]] = []
    if body.system:
        result.append({"role": "system", "content": _texts("system", body.system)})
    for index, message in enumerate(body.messages):
        result += _message(f"messages[{index}]", message, media)
    return result


def _message(where: str, message: Message, media: dict[str, str]) -> list[dict[str, Any]]:
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    converted: list[dict[str, Any]] = []
    parts: list[dict[str, Any]] = []
    calls = [block for block in message.content if block.type == "tool_use"]
    for index, block in enumerate(message.content):
        here = f"{where}.content[{index}]"
        if block.type == "tool_result":
            content, images = _result(here, block, media)
            parts += images
            result: dict[str, Any] = {"role": "tool", "content": content}
            result["tool_call_id"] = block.tool_use_id or ""
            if block.is_error:
                result["is_error"] = True
            converted.append(_marked(result, block))
        elif block.type not in _OWN_BLOCKS[message.role]:
            raise _not_text(here)
        elif block.type == "image":
            parts.append(_marked(_image(here, block.source, media), block))
        elif block.type == "document":
            document = {"source": block.source, "title": block.title, "context": block.context}
            given = media_parts.document_of_anthropic(
                here, {**document, "citations": block.citations}
            )
            cites = isinstance(block.citations, dict) and block.citations.get("enabled")
            if given["type"] == "file" or cites:
                media.setdefault("documents", here)
            parts.append(_marked(given, block))
        elif block.type == "text":
            parts.append(_text(here, block))
    if parts or calls:
        own: dict[str, Any] = {"role": message.role, "content": parts or None}
        marks = [each.cache_control for each in calls if each.cache_control is not None]
        if marks:
            own["cache_control"] = marks[-1]
        if calls:
            own["tool_calls"] = [_call(block) for block in calls]
        if message.role == "assistant":
            own = with_details(own, details_of(message.content))
        converted.append(own)
    return converted


def _tool_reasoning(messages: list[Message]) -> dict[str, str]:
    found: dict[str, str] = {}
    for message in reversed(messages):
        blocks = message.content if isinstance(message.content, list) else []
        if message.role == "user" and not any(each.type == "tool_result" for each in blocks):
            break
        thought = "".join([each.thinking or "" for each in blocks if each.type == "thinking"])
        call = next((each.id for each in blocks if each.type == "tool_use"), None)
        if thought and call:
            found[call] = thought
    return found


def _texts(where: str, content: str | list[Block]) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content
    return [_text(f"{where}[{index}]", block) for index, block in enumerate(content)]


def _text(where: str, block: Block) -> dict[str, Any]:
    if block.type != "text" or block.text is None:
        raise _not_text(where)
    return _marked({"type": "text", "text": block.text}, block)


def _marked(holder: dict[str, Any], block: Block) -> dict[str, Any]:
    if block.cache_control is not None:
        holder["cache_control"] = block.cache_control
    return holder


def _image(where: str, source: Any, media: dict[str, str]) -> dict[str, Any]:
    media.setdefault("images", where)
    return media_parts.of_anthropic(where, source)


def _result(where: str, block: Block, media: dict[str, str]) -> tuple[str, list[dict[str, Any]]]:
    """The text of a tool's result, and its images, which a chat has in the user's next message. Chat
    templates have no field for a failed call, so its result says it."""
    content = block.content or ""
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    texts: list[str] = []
    images: list[dict[str, Any]] = []
    for index, each in enumerate(content if isinstance(content, list) else [None]):
        here = f"{where}.content[{index}]"
        if isinstance(each, dict) and each.get("type") == "image":
            image = _image(here, each.get("source"), media)
            images.append({**image, "of_call": block.tool_use_id or ""})
        elif isinstance(each, dict) and isinstance(each.get("text"), str):
            texts.append(each["text"])
        else:
            raise _not_text(where)
    text = "\n".join(texts)
    return (f"Error: {text}" if block.is_error else text), images


def _call(block: Block) -> dict[str, Any]:
    arguments = json.dumps(block.input if block.input is not None else {}, ensure_ascii=False)
    function = {"name": block.name or "", "arguments": arguments}
    return {"id": block.id or "", "type": "function", "function": function}


def _tools(body: CountBody) -> list[dict[str, Any]] | None:
    if not body.tools or body.tool_choice == {"type": "none"}:
        return None
    result = []
    for index, tool in enumerate(body.tools):
        if tool.type not in (None, "custom") or tool.input_schema is None:
            raise UnsupportedParameter(
                f"tools[{index}] is not a client tool; server tools are not supported.",
                next_step="Send a tool with a name and an input_schema.",
                param=f"tools[{index}].type",
            )
        _check_hints(index, tool)
        function: dict[str, Any] = {"name": tool.name, "parameters": tool.input_schema}
        if tool.description is not None:
            function["description"] = tool.description
        if tool.strict is not None:
            function["strict"] = tool.strict
        converted: dict[str, Any] = {"type": "function", "function": function}
        if tool.cache_control is not None:
            converted["cache_control"] = tool.cache_control
        result.append(converted)
    return result


def _check_hints(index: int, tool: Tool) -> None:
    """Raises UnsupportedParameter for a field that would change which tools the model sees or calls."""
    for name, given, harmless in (
        ("defer_loading", tool.defer_loading, (None, False)),
        ("allowed_callers", tool.allowed_callers, (None, [], ["direct"])),
        ("input_examples", tool.input_examples, (None, [])),
    ):
        if given not in harmless:
            where = f"tools[{index}].{name}"
            raise UnsupportedParameter(
                f"{where} is not supported by this model.",
                next_step=f"Remove {where}.",
                param=where,
            )


def _not_text(where: str) -> UnsupportedParameter:
    return UnsupportedParameter(
        f"{where} is not text; this model supports text only.",
        next_step="Send blocks of type text.",
        param=where,
    )


def _check_options(body: CountBody) -> None:
    """Raises UnsupportedParameter or BadRequest for what no model here does of what coding agents ask for
    beside the answer: thinking, effort and the editing of their context."""
    _refuse_thread(body.thread)
    _check_diagnostics(body.diagnostics)
    if body.thinking is not None and body.thinking.get("type") not in _THINKING:
        raise _invalid("thinking.type", f"one of {', '.join(_THINKING)}")
    config = body.output_config or {}
    for name in config.keys() - {"format", "effort"}:
        raise UnsupportedParameter(
            f"output_config.{name} is not supported.",
            next_step=f"Remove output_config.{name}.",
            param=f"output_config.{name}",
        )
    effort = config.get("effort")
    if effort is not None and effort not in _EFFORTS:
        raise _invalid("output_config.effort", f"one of {', '.join(_EFFORTS)}")
    _check_edits(body.context_management or {})


def _thinking_notes(body: CountBody) -> list[str]:
    """What has no effect on a model whose thinking cannot be set. An answer without it is valid, so the
    request is served."""
    notes = []
    if (body.thinking or {}).get("type") == "enabled":
        notes.append("thinking is returned in blocks of its own if the model marks it.")
    if (body.output_config or {}).get("effort") is not None:
        notes.append("output_config.effort has no effect on this model.")
    return notes


def _check_edits(management: dict[str, Any]) -> None:
    for index, edit in enumerate(management.get("edits") or ()):
        kind = edit.get("type") if isinstance(edit, dict) else None
        if not str(kind).startswith(_CLEARS_THINKING):
            where = f"context_management.edits[{index}]"
            raise UnsupportedParameter(
                f"{where} is not supported.", next_step="Remove it.", param=where
            )


def _refuse_thread(thread: Any) -> None:
    """Anthropic's SDKs begin with a thread and go on without one where the refusal has these
    details."""
    if thread is None:
        return
    error = UnsupportedParameter(
        "thread is not supported: conversations are not kept here.",
        next_step="Send the whole conversation without thread.",
        param="thread",
    )
    error.details = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    raise error


def _check_diagnostics(given: Any) -> None:
    """Without an earlier message there is nothing to compare with, so it asks for nothing."""
    if given is None or given == {} or given == {"previous_message_id": None}:
        return
    raise UnsupportedParameter(
        "diagnostics is not supported: messages are not kept here.",
        next_step="Remove diagnostics.",
        param="diagnostics",
    )


def _invalid(name: str, form: str) -> BadRequest:
    return BadRequest(
        f"{name} must be {form}.", next_step=f"Correct {name}.", param=name, code="invalid_value"
    )
