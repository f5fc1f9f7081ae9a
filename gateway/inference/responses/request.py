"""The body of /v1/responses (text only) and its conversion to an `InferenceRequest`."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from core.errors import BadRequest, UnsupportedParameter
from gateway.inference.chat import request
from gateway.inference.chat.request import MAX_MESSAGES
from gateway.inference.decoding import (
    Metadata,
    Request,
    check_label,
    check_range,
    decode,
    refuse_unsupported,
)
from gateway.inference.prompt_references import reference_of
from gateway.inference.request import InferenceRequest
from gateway.inference.sampling import MAX_LOGPROBS, Count, Positive, StreamOptions, stops_of

ROUTE = "/v1/responses"
LOGPROBS = "message.output_text.logprobs"  # value of `include`
ENCRYPTED_REASONING = "reasoning.encrypted_content"  # of reasoning items, which no response has


class Part(Request):
    type: str
    text: str | None = None
    refusal: str | None = None
    annotations: Any = None
    logprobs: Any = None
    image_url: Any = None
    file_id: Any = None
    detail: Any = None
    file_data: Any = None
    filename: Any = None


class Item(Request):
    """A message, a function call or its output. Other item types are refused."""

    type: str | None = None
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | list[Part] | None = None
    id: str | None = None
    status: str | None = None
    phase: str | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    namespace: str | None = None
    output: Any = None
    summary: Any = None  # of a reasoning item
    encrypted_content: str | None = None


class Tool(Request):
    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    cache_control: Any = None
    tools: list["Tool"] | None = None  # of a namespace


class ResponsesBody(Request, kw_only=True):
    model: Annotated[str, Meta(min_length=1, max_length=300)]
    input: str | Annotated[list[Item], Meta(min_length=1, max_length=MAX_MESSAGES)] | None = None
    instructions: str | None = None
    max_output_tokens: Positive | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    tools: Annotated[list[Tool], Meta(max_length=512)] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    metadata: Metadata | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: Any = None
    prompt_cache_options: Any = None
    truncation: Literal["auto", "disabled"] | None = None
    text: Any = None
    store: bool | None = None
    service_tier: str | None = None
    include: list[str] | None = None
    reasoning: Any = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    background: bool | None = None
    conversation: Any = None
    previous_response_id: str | None = None
    prompt: Any = None
    max_tool_calls: int | None = None
    context_management: Any = None
    moderation: Any = None
    ignore_eos: bool | None = None
    min_tokens: Count | None = None
    seed: int | None = None
    stop: str | list[str] | None = None


_IGNORED_VALUES: dict[str, tuple[Any, ...]] = {
    "store": (False,),
    "service_tier": ("auto", "default"),
    "reasoning": ({}, {"effort": "none"}),
    "background": (False,),
    "conversation": (),
    "previous_response_id": (),
    "max_tool_calls": (),
    "context_management": (),
    "moderation": (),
    "prompt_cache_retention": ("in-memory", "in_memory"),
    "prompt_cache_options": ({},),
}
_decoder = msgspec.json.Decoder(ResponsesBody)


def parse_responses(raw: bytes) -> InferenceRequest:
    body = decode(_decoder, raw)
    refuse_unsupported(body, _IGNORED_VALUES)
    check_range("temperature", body.temperature, 0, 2)
    check_range("top_p", body.top_p, 0, 1)
    messages: list[dict[str, Any]] = []
    if body.instructions:
        messages.append({"role": "system", "content": body.instructions})
    before = len(messages)
    if body.input is None:
        if body.prompt is None:
            raise BadRequest(
                "input is missing.",
                next_step="Send input, or name a prompt.",
                param="input",
                code="missing_required_parameter",
            )
    elif isinstance(body.input, str):
        messages.append({"role": "user", "content": body.input})
    else:
        for index, item in enumerate(body.input):
            _add_item(messages, index, item)
    every = without_namespaces(body.tools or [])
    given = [_chat_tool(index, each) for index, each in enumerate(every)]
    if body.tool_choice == "none":
        given = []
    return InferenceRequest(
        route=ROUTE,
        model=body.model,
        messages=messages,
        tools=[request.tool_of(index, each) for index, each in enumerate(given)] or None,
        single_tool_call=body.parallel_tool_calls is False,
        engine_parameters=request.engine_parameters_of(
            _chat_choice(body.tool_choice), _format(body.text), given
        ),
        max_tokens=body.max_output_tokens,
        logprobs=_alternatives(body),
        temperature=body.temperature,
        top_p=body.top_p,
        seed=body.seed,
        stop=stops_of("stop", body.stop),
        ignore_eos=bool(body.ignore_eos),
        min_tokens=body.min_tokens or 0,
        stream=bool(body.stream),
        include_usage=True,
        truncation=body.truncation or "disabled",
        end_user=check_label("user", body.user or body.safety_identifier),
        prompt=reference_of(body.prompt, before) if body.prompt is not None else None,
        extra={
            "prompt": body.prompt,
            "instructions": body.instructions,
            "metadata": body.metadata or {},
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "tools": [_tool_object(each) for each in body.tools or ()],
            "namespaces": namespaces_of(body.tools or []),
            "tool_choice": body.tool_choice or "auto",
            "text": {"format": _requested_format(body.text) or {"type": "text"}},
            "named": {"response_format": "text.format", "strict": "tools[].strict"},
        },
    )


class ItemsBody(Request):
    """Items outside of a request, of a conversation."""

    items: Annotated[list[Item], Meta(max_length=MAX_MESSAGES)] | None = None
    metadata: Metadata | None = None


_items_decoder = msgspec.json.Decoder(ItemsBody)


def parse_items(raw: bytes) -> ItemsBody:
    """Raises the error that a request with the same items would get."""
    body = decode(_items_decoder, raw)
    for index, item in enumerate(body.items or ()):
        _add_item([], index, item)
    return body


def _alternatives(body: ResponsesBody) -> int | None:
    """Number of alternatives per output token; None when logprobs are not requested."""
    for name in body.include or ():
        if name not in (LOGPROBS, ENCRYPTED_REASONING):
            raise UnsupportedParameter(
                f"include has {name[:80]!r}, which is not supported.",
                next_step=f"Remove it; {LOGPROBS} is supported.",
                param="include",
            )
    if LOGPROBS in (body.include or ()):
        return body.top_logprobs or 0
    if body.top_logprobs:
        raise BadRequest(
            f"top_logprobs needs {LOGPROBS} in include.", param="top_logprobs", code="invalid_value"
        )
    return None


def flat_name(namespace: str, name: str) -> str:
    """A namespaced tool's name for the model: names of functions have no other structure."""
    return f"{namespace}__{name}"


def without_namespaces(tools: list[Tool]) -> list[Tool]:
    """The tools with those of namespaces in their place, under their flat names."""
    flat = []
    for tool in tools:
        if tool.type == "namespace" and tool.name and tool.tools:
            flat += [
                msgspec.structs.replace(each, name=flat_name(tool.name, each.name or ""))
                for each in tool.tools
            ]
        else:
            flat.append(tool)
    return flat


def namespaces_of(tools: list[Tool]) -> dict[str, tuple[str, str]]:
    """Namespace and own name by flat name."""
    return {
        flat_name(tool.name, each.name or ""): (tool.name, each.name or "")
        for tool in tools
        if tool.type == "namespace" and tool.name
        for each in tool.tools or ()
    }


def _chat_tool(index: int, tool: Tool) -> request.Tool:
    if tool.type != "function" or not tool.name:
        raise UnsupportedParameter(
            f"tools[{index}] is not a function; this model supports functions only.",
            next_step="Send type function with a name.",
            param=f"tools[{index}].type",
        )
    function = request.FunctionDefinition(
        name=tool.name,
        description=tool.description,
        parameters=tool.parameters,
        strict=tool.strict,
    )
    return request.Tool(type="function", function=function, cache_control=tool.cache_control)


def _tool_object(tool: Tool) -> dict[str, Any]:
    if tool.type == "namespace":
        inner = [_tool_object(each) for each in tool.tools or ()]
        return {
            "type": "namespace",
            "name": tool.name,
            "description": tool.description,
            "tools": inner,
        }
    return {
        "type": "function",
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.parameters,
        "strict": bool(tool.strict),
    }


def _chat_choice(given: Any) -> Any:
    if isinstance(given, dict) and given.get("type") == "function":
        return {"type": "function", "function": {"name": str(given.get("name"))}}
    return given


def _requested_format(text: Any) -> Any:
    """`text.format`. Raises UnsupportedParameter for other fields of `text`."""
    if text is None:
        return None
    unknown = set(text) - {"format", "verbosity"} if isinstance(text, dict) else {""}
    if unknown or text.get("verbosity") not in (None, "medium"):
        raise UnsupportedParameter(
            "text supports format only; this model has no verbosity setting.",
            next_step="Remove the other fields of text.",
            param="text",
        )
    return text.get("format")


def _format(text: Any) -> Any:
    """`text.format` in the form of the chat API's response_format."""
    form = _requested_format(text)
    if isinstance(form, dict) and form.get("type") == "json_schema":
        return {
            "type": "json_schema",
            "json_schema": {k: v for k, v in form.items() if k != "type"},
        }
    return form


def _add_item(messages: list[dict[str, Any]], index: int, item: Item) -> None:
    """Appends the item. Consecutive function calls join one assistant message. Reasoning of earlier
    turns is not shown to the model again."""
    if item.type == "reasoning":
        return
    if item.type == "function_call" and item.name and item.call_id:
        name = flat_name(item.namespace, item.name) if item.namespace else item.name
        function = {"name": name, "arguments": item.arguments or "{}"}
        call = {"id": item.call_id, "type": "function", "function": function}
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": None})
        messages[-1].setdefault("tool_calls", []).append(call)
    elif item.type == "function_call_output" and item.call_id:
        content = item.output
        if isinstance(content, list):
            content = "".join(_output_text(index, part) for part in content)
        elif not isinstance(content, str):
            raise _not_a_message(index)
        messages.append({"role": "tool", "tool_call_id": item.call_id, "content": content})
    else:
        messages.append(_message(index, item))


def _output_text(index: int, part: Any) -> str:
    if isinstance(part, dict) and isinstance(part.get("text"), str):
        return str(part["text"])
    raise _not_a_message(index)


def _message(index: int, item: Item) -> dict[str, Any]:
    if item.type not in (None, "message") or item.role is None or item.content is None:
        raise _not_a_message(index)
    if isinstance(item.content, str):
        return {"role": item.role, "content": item.content}
    return {"role": item.role, "content": [_part(index, i, p) for i, p in enumerate(item.content)]}


def _part(item: int, index: int, part: Part) -> dict[str, Any]:
    text = part.refusal if part.type == "refusal" else part.text
    if part.type not in ("input_text", "output_text", "text", "refusal") or text is None:
        where = f"input[{item}].content[{index}]"
        raise UnsupportedParameter(
            f"{where} is not text; this model supports text only.",
            next_step="Send parts of type input_text.",
            param=where,
        )
    return {"type": "text", "text": text}


def _not_a_message(index: int) -> UnsupportedParameter:
    return UnsupportedParameter(
        f"input[{index}] is not a message, a function call or a text output of one.",
        next_step="Send items with a role and content, or function_call and function_call_output.",
        param=f"input[{index}]",
    )
