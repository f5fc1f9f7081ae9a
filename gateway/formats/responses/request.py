"""The body of /v1/responses (text only) and its conversion to an `InferenceRequest`."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from core.errors import BadRequest, UnsupportedParameter
from gateway.edge.decoding import (
    Metadata,
    Request,
    check_label,
    check_range,
    decode,
    refuse_unsupported,
)
from gateway.formats.chat import request
from gateway.formats.chat.request import MAX_MESSAGES
from gateway.formats.responses.items import Conversation, Item
from gateway.formats.sampling import (
    MAX_LOGPROBS,
    Count,
    Positive,
    StreamOptions,
    client_id_of,
    stops_of,
    tier_of,
)
from gateway.prompts.tool_lists import flat_name
from gateway.request import media_parts
from gateway.request.inference import InferenceRequest
from gateway.request.prompt_references import reference_of


def effort_of(given: Any) -> str | None:
    """`reasoning.effort`. All reasoning is returned, so that the summary is at the model's choice."""
    if given is None:
        return None
    if not isinstance(given, dict):
        raise BadRequest("reasoning must be an object.", param="reasoning", code="invalid_type")
    for name, value in given.items():
        if name == "effort" and isinstance(value, str | None):
            continue
        if name == "summary" and value in (None, "auto"):
            continue
        raise UnsupportedParameter(
            f"reasoning.{name[:80]} with this value is not supported.",
            next_step="Send effort, and no summary or auto.",
            param=f"reasoning.{name[:80]}",
        )
    return request.effort_of(given.get("effort"), "reasoning.effort")


class Tool(Request):
    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    cache_control: Any = None
    tools: list["Tool"] | None = None  # of a namespace
    external_web_access: bool | None = None  # of a web search
    format: Any = None  # of a custom tool


def offered(tools: list[Tool]) -> tuple[list[tuple[str, Tool]], list[str]]:
    """The tools that the model is offered, each with its place in the request, those of namespaces
    under their flat names, and notes on the others: a web search that a client runs with, as Codex
    does, finds nothing here."""
    listed: list[tuple[str, Tool]] = []
    notes = ["tools: a web_search finds nothing here, so it is not offered."]
    for index, tool in enumerate(tools):
        if tool.type == "namespace" and tool.name and tool.tools:
            listed += [
                (
                    f"tools[{index}].tools[{inner}]",
                    msgspec.structs.replace(each, name=flat_name(tool.name, each.name or "")),
                )
                for inner, each in enumerate(tool.tools)
            ]
        elif not _is_left_out(tool):
            listed.append((f"tools[{index}]", tool))
    return listed, notes if any(map(_is_left_out, tools)) else []


def _is_left_out(tool: Tool) -> bool:
    return tool.type == "web_search" and tool.external_web_access is not None


def namespaces_of(tools: list[Tool]) -> dict[str, tuple[str, str]]:
    """Namespace and own name by flat name."""
    return {
        flat_name(tool.name, each.name or ""): (tool.name, each.name or "")
        for tool in tools
        if tool.type == "namespace" and tool.name
        for each in tool.tools or ()
    }


def chat_tool(where: str, tool: Tool) -> request.Tool:
    if tool.type != "function" or not tool.name or tool.external_web_access is not None:
        raise UnsupportedParameter(
            f"{where} has the type {tool.type[:80]!r}; this model supports functions only.",
            next_step="Send type function with a name.",
            param=f"{where}.type",
        )
    function = request.FunctionDefinition(
        name=tool.name,
        description=tool.description,
        parameters=tool.parameters,
        strict=tool.strict,
    )
    return request.Tool(type="function", function=function, cache_control=tool.cache_control)


def tool_object(tool: Tool) -> dict[str, Any]:
    if tool.type == "namespace":
        inner = [tool_object(each) for each in tool.tools or ()]
        return {
            "type": "namespace",
            "name": tool.name,
            "description": tool.description,
            "tools": inner,
        }
    if _is_left_out(tool):
        return {"type": "web_search", "external_web_access": tool.external_web_access}
    return {
        "type": "function",
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.parameters,
        "strict": bool(tool.strict),
    }


ROUTE = "/v1/responses"
LOGPROBS = "message.output_text.logprobs"  # value of `include`
ENCRYPTED_REASONING = "reasoning.encrypted_content"  # of reasoning items, of providers that sign it


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
    client_metadata: dict[str, str] | None = None  # of Codex: labels without an effect
    conversation: Any = None
    previous_response_id: str | None = None
    prompt: Any = None
    max_tool_calls: int | None = None
    context_management: Any = None
    moderation: Any = None
    ignore_eos: bool | None = None
    min_tokens: Count | None = None
    # vLLM's, beyond OpenAI's.
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    request_id: str | None = None
    seed: int | None = None
    stop: str | list[str] | None = None


_IGNORED_VALUES: dict[str, tuple[Any, ...]] = {
    "store": (False,),
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
    check_range("min_p", body.min_p, 0, 1)
    check_range("repetition_penalty", body.repetition_penalty, 0.01, 100)
    check_range("frequency_penalty", body.frequency_penalty, -2, 2)
    check_range("presence_penalty", body.presence_penalty, -2, 2)
    check_range("seed", body.seed, -(2**63), 2**63 - 1)
    conversation = Conversation()
    messages, media = conversation.messages, conversation.media
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
            conversation.add(index, item)
        conversation.end_outputs()
    verbosity: dict[str, Any] = {}
    if isinstance(body.text, dict) and body.text.get("verbosity") is not None:
        verbosity = {"verbosity": body.text["verbosity"]}
    every, notes = offered(body.tools or [])
    given = [chat_tool(where, each) for where, each in every]
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
        )
        | media_parts.needed(media),
        max_tokens=body.max_output_tokens,
        logprobs=_alternatives(body),
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k if body.top_k is None or body.top_k > 0 else 0,
        min_p=body.min_p,
        repetition_penalty=body.repetition_penalty,
        frequency_penalty=body.frequency_penalty,
        presence_penalty=body.presence_penalty,
        client_request_id=client_id_of(body.request_id),
        seed=body.seed,
        reasoning_effort=effort_of(body.reasoning),
        tool_reasoning=conversation.tool_reasoning,
        service_tier=tier_of(body.service_tier),
        stop=stops_of("stop", body.stop),
        ignore_eos=bool(body.ignore_eos),
        min_tokens=body.min_tokens or 0,
        stream=bool(body.stream),
        include_usage=True,
        extra_fields={} if verbosity.get("verbosity") in (None, "medium") else verbosity,
        truncation=body.truncation or "disabled",
        end_user=check_label("user", body.user or body.safety_identifier),
        safety_identifier=check_label("safety_identifier", body.safety_identifier),
        metadata=body.metadata,
        prompt=reference_of(body.prompt, before) if body.prompt is not None else None,
        extra={
            "prompt": body.prompt,
            "instructions": body.instructions,
            "metadata": body.metadata or {},
            "notes": notes,
            "encrypted_reasoning": ENCRYPTED_REASONING in (body.include or ()),
            "labels": {
                name: value
                for name in ("user", "safety_identifier", "prompt_cache_key")
                if (value := getattr(body, name)) is not None
            },
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "tools": [tool_object(each) for each in body.tools or ()],
            "namespaces": namespaces_of(body.tools or []),
            "tool_choice": body.tool_choice or "auto",
            "text": {"format": _requested_format(body.text) or {"type": "text"}} | verbosity,
            "named": {
                **media,
                "messages": "input",
                "max_tokens": "max_output_tokens",
                "response_format": "text.format",
                "strict": "tools[].strict",
                "verbosity": "text.verbosity",
                "reasoning_effort": "reasoning.effort",
            },
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
        Conversation().add(index, item)
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


def _chat_choice(given: Any) -> Any:
    if isinstance(given, dict) and given.get("type") == "function":
        return {"type": "function", "function": {"name": str(given.get("name"))}}
    return given


def _requested_format(text: Any) -> Any:
    """`text.format`. Raises UnsupportedParameter for other fields of `text`."""
    if text is None:
        return None
    unknown = set(text) - {"format", "verbosity"} if isinstance(text, dict) else {""}
    if unknown:
        raise UnsupportedParameter(
            "text supports format and verbosity only.",
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
