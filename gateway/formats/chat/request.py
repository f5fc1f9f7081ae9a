"""The body of /v1/chat/completions and its conversion to an `InferenceRequest`."""

from collections.abc import Sequence
from operator import attrgetter
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from core.errors import BadRequest, UnsupportedParameter
from gateway.edge.decoding import (
    Metadata,
    Request,
    check_label,
    decode_open,
    given_names,
    refuse_unsupported,
)
from gateway.formats.sampling import (
    CHECKED_ALONE,
    MAX_LOGPROBS,
    Count,
    Positive,
    SamplingBody,
    check_logprob_ids,
    check_stream_options,
    sampling_of,
    structured_of,
    tier_of,
)
from gateway.prompts.predictions import text_of
from gateway.prompts.template_variables import checked
from gateway.request import media_parts, thoughts
from gateway.request.inference import PASSED, InferenceRequest
from gateway.request.plain_messages import plain_messages
from gateway.request.prompt_references import reference_of


def with_tool_calls(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with function calls and their results written as those of tools."""
    for each in messages:
        if "function_call" in each or each["role"] == "function":
            break
    else:
        return messages
    converted, last = [], "call_0"
    for index, message in enumerate(messages):
        message = dict(message)
        if (call := message.pop("function_call", None)) is not None:
            last = f"call_{index}"
            message["tool_calls"] = [{"id": last, "type": "function", "function": call}]
        elif message["role"] == "function":
            message |= {"role": "tool", "tool_call_id": last}
        converted.append(message)
    return converted


ROUTE = "/v1/chat/completions"
MAX_MESSAGES = 10_000
_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


class ContentPart(Request):
    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: Any = None
    input_audio: Any = None
    file: Any = None
    cache_control: Any = None  # a cache mark, which prompt order respects
    volatile: bool | None = None  # marks content that changes between requests, for prompt order
    rank: Count | None = None  # of a retrieved block; 1 is the best, the worst is dropped first


class FunctionCall(Request):
    name: str
    arguments: str


class ToolCall(Request):
    id: str
    type: str
    function: FunctionCall | None = None
    custom: Any = None


class Message(Request):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    function_call: FunctionCall | None = None
    refusal: str | None = None
    reasoning_content: str | None = None  # of an earlier answer: see `tool_reasoning`
    reasoning: str | None = None  # the same by its other name
    reasoning_details: list[Any] | None = (
        None  # of an earlier answer, for the provider that wrote it
    )
    audio: Any = None
    annotations: Any = None
    cache_control: Any = None
    volatile: bool | None = None


class FunctionDefinition(Request):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Request):
    type: str
    function: FunctionDefinition | None = None
    custom: Any = None
    cache_control: Any = None


class ChatBody(SamplingBody, kw_only=True):
    model: Annotated[str, Meta(min_length=1, max_length=300)]
    messages: Annotated[list[Message], Meta(max_length=MAX_MESSAGES)] | None = None
    prompt: dict[str, Any] | None = None  # a template: id, version and variables
    max_tokens: Positive | None = None
    max_completion_tokens: Positive | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    tools: Annotated[list[Tool], Meta(max_length=512)] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    response_format: Any = None
    truncation: Literal["auto", "disabled", "oldest", "ranked"] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    echo: bool | None = None  # vLLM's, as is the next
    include_reasoning: bool | None = None
    metadata: Metadata | None = None
    store: bool | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: Any = None
    prompt_cache_options: Any = None
    service_tier: str | None = None
    modalities: list[str] | None = None
    reasoning_effort: str | None = None
    verbosity: Any = None
    audio: Any = None
    prediction: dict[str, Any] | None = None
    web_search_options: Any = None
    moderation: Any = None
    functions: Annotated[list[FunctionDefinition], Meta(max_length=512)] | None = None
    function_call: Any = None


# Unsupported parameters, with the values that have no effect and are accepted.
_IGNORED_VALUES: dict[str, tuple[Any, ...]] = {
    "modalities": (["text"],),
    "verbosity": ("medium",),
    "audio": (),
    "web_search_options": (),
    "moderation": (),
    "prompt_cache_retention": ("in-memory", "in_memory"),
    "prompt_cache_options": ({},),
}


class PlainChatBody(ChatBody, kw_only=True):
    """One whose messages have texts alone: they are decoded to what the engine gets."""

    messages: Annotated[list[dict[str, str]], Meta(max_length=MAX_MESSAGES)]  # type: ignore[assignment]


_decoder = msgspec.json.Decoder(ChatBody)
_plain_decoder = msgspec.json.Decoder(PlainChatBody)
# Fields that need no check together with others: a chat that sets these alone is converted at once.
_SIMPLE = CHECKED_ALONE | {
    "model",
    "messages",
    "max_tokens",
    "max_completion_tokens",
    "user",
    "stream",
    "stream_options",
}
_NOT_PLAIN = b'"tool_call'  # in a message that has more than a text


def parse_chat(raw: bytes) -> InferenceRequest:
    extra_fields: dict[str, Any] = {}
    body, messages = _decoded(raw, extra_fields)
    given = given_names(body)
    if messages is not None and _SIMPLE.issuperset(given):
        check_stream_options(body)
        return InferenceRequest(
            route=ROUTE,
            model=body.model,
            messages=messages,
            max_tokens=body.max_completion_tokens or body.max_tokens,
            end_user=check_label("user", body.user or None),
            extra={"legacy_functions": False, "named": {}},
            **sampling_of(body, given),
        )
    for name in PASSED:
        if (value := getattr(body, name)) is not None and value not in _IGNORED_VALUES[name]:
            extra_fields[name] = value
            setattr(body, name, None)
    refuse_unsupported(body, _IGNORED_VALUES)
    check_stream_options(body)
    check_logprob_ids(body, scored=bool(body.logprobs))
    if body.top_logprobs is not None and not body.logprobs:
        raise BadRequest(
            "top_logprobs needs logprobs to be true.", param="top_logprobs", code="invalid_value"
        )
    choice, defined = choice_and_tools(body)
    tools = None if choice == "none" else defined
    media: dict[str, str] = {}  # kind -> where the first part of it is
    reasoning: dict[str, str] = {}
    if messages is None:
        reasoning = _tool_reasoning(body.messages or ())
        messages = [
            {"role": each.role, "content": each.content}
            if type(each.content) is str and _other_fields(each) == _NO_OTHER_FIELDS
            else parse_message(index, each, media)
            for index, each in enumerate(messages_of(body))
        ]
        messages = with_tool_calls(messages)
    if body.prediction is not None:
        text_of(body.prediction)
    structured, named = structured_of(body, body.response_format)
    extra: dict[str, Any] = {"legacy_functions": bool(body.functions), "named": media | named}
    if body.store:
        extra["store"] = body.metadata or {}
    return InferenceRequest(
        route=ROUTE,
        model=body.model,
        messages=messages,
        tools=[tool_of(index, each) for index, each in enumerate(tools)] if tools else None,
        max_tokens=body.max_completion_tokens or body.max_tokens,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        truncation=body.truncation or "disabled",
        end_user=check_label("user", body.user or body.safety_identifier),
        safety_identifier=check_label("safety_identifier", body.safety_identifier),
        metadata=body.metadata,
        single_tool_call=body.parallel_tool_calls is False or bool(body.functions),
        engine_parameters=engine_parameters_of(choice, body.response_format, tools)
        | structured
        | (dict.fromkeys(media, True) if media else {}),
        reasoning_effort=effort_of(body.reasoning_effort),
        tool_reasoning=reasoning,
        prediction=body.prediction,
        service_tier=tier_of(body.service_tier),
        prompt=reference_of(body.prompt) if body.prompt is not None else None,
        extra_fields=extra_fields,
        extra=extra,
        chat_template_kwargs=checked(body.chat_template_kwargs),
        continue_final_message=_continues(body, messages),
        echo=bool(body.echo),
        include_reasoning=body.include_reasoning is not False,
        **sampling_of(body, given),
    )


def _decoded(
    raw: bytes, extra_fields: dict[str, Any]
) -> tuple[ChatBody, list[dict[str, Any]] | None]:
    """The body, and its messages where all of them are plain. The general decoder reads all others,
    and tells what is wrong with one."""
    if raw.find(_NOT_PLAIN) < 0:  # `in` asks first whether it is a number, at ten times the cost
        try:
            body = _plain_decoder.decode(raw)
        except (ValueError, RecursionError):
            pass
        else:
            if (plain := plain_messages(body.messages)) is not None:
                return body, plain
    return decode_open(_decoder, raw, extra_fields), None


def messages_of(body: ChatBody) -> list[Message]:
    """Only a request that names a template may leave them out."""
    if body.messages:
        return body.messages
    if body.prompt is None:
        raise BadRequest(
            "messages is missing." if body.messages is None else "messages is empty.",
            next_step="Send at least one message.",
            param="messages",
            code="missing_required_parameter" if body.messages is None else "invalid_value",
        )
    return []


def effort_of(given: str | None, name: str = "reasoning_effort") -> str | None:
    """`name`: of the parameter, in the error."""
    if given is not None and given not in _EFFORTS:
        raise _invalid(name, f"one of {', '.join(_EFFORTS)}")
    return None if given == "none" else given


def _continues(body: ChatBody, messages: list[dict[str, Any]]) -> bool:
    """vLLM's two fields, which say the same: start a new answer, or continue the last one."""
    continues = bool(body.continue_final_message)
    if body.add_generation_prompt is not None and body.add_generation_prompt is continues:
        raise _invalid("add_generation_prompt", "the opposite of continue_final_message")
    if continues and (not messages or messages[-1]["role"] != "assistant"):
        raise _invalid(
            "continue_final_message", "false when the last message is not the assistant's"
        )
    return continues


def engine_parameters_of(choice: Any, form: Any, tools: list[Tool] | None) -> dict[str, Any]:
    """Validates parameters that only some engines support, and returns those that are set."""
    engine_parameters: dict[str, Any] = {}
    if choice is not None and choice not in ("auto", "none"):
        if choice != "required" and not (
            isinstance(choice, dict) and choice.get("type") in ("function", "allowed_tools")
        ):
            raise _invalid("tool_choice", "none, auto, required or a named function")
        if not tools:
            raise _invalid("tool_choice", "omitted without tools")
        engine_parameters["tool_choice"] = choice
    if form is not None and form != {"type": "text"}:
        kind = form.get("type") if isinstance(form, dict) else None
        if kind not in ("json_object", "json_schema"):
            raise _invalid("response_format", "an object of type text, json_object or json_schema")
        engine_parameters["response_format"] = form
    if tools and any(tool.function is not None and tool.function.strict for tool in tools):
        engine_parameters["strict"] = True
    return engine_parameters


def _invalid(name: str, form: str) -> BadRequest:
    return BadRequest(
        f"{name} must be {form}.", next_step=f"Correct {name}.", param=name, code="invalid_value"
    )


_OPTIONAL_FIELDS = (
    *("name", "tool_call_id", "refusal", "cache_control", "volatile"),
    thoughts.FIELD,
)
_optional_fields = attrgetter(*_OPTIONAL_FIELDS)
_NO_OPTIONAL_FIELDS = (None,) * len(_OPTIONAL_FIELDS)
# Fields of a message other than role and content; most messages have none of them.
_other_fields = attrgetter(*_OPTIONAL_FIELDS, "audio", "tool_calls", "function_call")
_NO_OTHER_FIELDS = (None,) * (len(_OPTIONAL_FIELDS) + 3)


def parse_message(
    index: int, message: Message, media: dict[str, str] | None = None
) -> dict[str, Any]:
    """`media` takes the kinds of parts that are not text, and where the first of each is. Without it
    they are refused."""
    where = f"messages[{index}]"
    if message.audio is not None:
        raise _not_text(f"{where}.audio")
    converted: dict[str, Any] = {"role": message.role}
    if isinstance(message.content, list):
        converted["content"] = [
            _part(f"{where}.content", i, p, media) for i, p in enumerate(message.content)
        ]
    elif message.content is not None or message.role == "assistant":
        converted["content"] = message.content
    else:
        raise BadRequest(
            f"{where}.content is missing.",
            next_step="Set it to a string or a list of text parts.",
            param=f"{where}.content",
            code="missing_required_parameter",
        )
    if message.tool_calls:
        converted["tool_calls"] = [_call_of(call) for call in message.tool_calls]
    rest = _optional_fields(message)
    if rest != _NO_OPTIONAL_FIELDS:
        converted |= {
            n: value for n, value in zip(_OPTIONAL_FIELDS, rest, strict=True) if value is not None
        }
    if message.reasoning_details:
        details = thoughts.checked(message.reasoning_details)
        converted[thoughts.FIELD] = thoughts.indexed(details)
    if message.function_call is not None:
        converted["function_call"] = msgspec.to_builtins(message.function_call)
    return converted


def _tool_reasoning(messages: Sequence[Message]) -> dict[str, str]:
    found: dict[str, str] = {}
    for message in reversed(messages):
        if message.role == "user":
            break
        thought = message.reasoning_content or message.reasoning
        if thought and message.tool_calls:
            found[message.tool_calls[0].id] = thought
    return found


def _call_of(call: ToolCall) -> dict[str, Any]:
    """Without fields that are null, which strict servers refuse."""
    return {n: value for n, value in msgspec.to_builtins(call).items() if value is not None}


def _part(
    where: str, index: int, part: ContentPart, media: dict[str, str] | None
) -> dict[str, Any]:
    if part.type == "refusal" and part.refusal is not None:
        return {"type": "text", "text": part.refusal}
    if media is not None and part.type in media_parts.KINDS:
        media.setdefault(media_parts.KINDS[part.type], f"{where}[{index}]")
        return media_parts.checked(f"{where}[{index}]", part.type, getattr(part, part.type))
    if part.type not in ("text", "input_text", "output_text") or part.text is None:
        raise _not_text(f"{where}[{index}]")
    converted: dict[str, Any] = {"type": "text", "text": part.text}
    if part.cache_control is not None:
        converted["cache_control"] = part.cache_control
    if part.volatile is not None:
        converted["volatile"] = part.volatile
    if part.rank is not None:
        converted["rank"] = part.rank
    return converted


def tool_of(index: int, tool: Tool) -> dict[str, Any]:
    if tool.type != "function" or tool.function is None:
        raise UnsupportedParameter(
            f"tools[{index}] has the type {tool.type[:80]!r}; this model supports functions only.",
            next_step="Send type function with a function object.",
            param=f"tools[{index}].type",
        )
    given = tool.function
    function: dict[str, Any] = {"name": given.name}
    if given.description is not None:
        function["description"] = given.description
    if given.parameters is not None:
        function["parameters"] = given.parameters
    if given.strict is not None:
        function["strict"] = given.strict
    converted: dict[str, Any] = {"type": "function", "function": function}
    if tool.cache_control is not None:
        converted["cache_control"] = tool.cache_control
    return converted


def _not_text(where: str) -> UnsupportedParameter:
    return UnsupportedParameter(
        f"{where} is not text; this model supports text only.",
        next_step="Send parts of type text.",
        param=where,
    )


def choice_and_tools(body: "ChatBody") -> tuple[Any, "list[Tool] | None"]:
    """tool_choice and tools, or what the legacy fields say in their words."""
    if not body.functions:
        if body.function_call not in (None, "none", "auto"):
            raise _wrong("function_call", "omitted without functions")
        return body.tool_choice, body.tools
    if body.tools or body.tool_choice is not None:
        raise _wrong("functions", "omitted when tools are set")
    tools = [Tool(type="function", function=each) for each in body.functions]
    choice = body.function_call
    if isinstance(choice, dict) and isinstance(choice.get("name"), str) and len(choice) == 1:
        choice = {"type": "function", "function": choice}
    elif choice not in (None, "none", "auto"):
        raise _wrong("function_call", 'none, auto or {"name": …}')
    return choice, tools


def _wrong(name: str, form: str) -> BadRequest:
    return BadRequest(
        f"{name} must be {form}.", next_step=f"Correct {name}.", param=name, code="invalid_value"
    )
