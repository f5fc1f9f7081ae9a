"""The body of /v1/responses (text) and how it becomes an Ask."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from core.errors import UnsupportedParameter
from gateway.ask import Ask
from gateway.schemas.chat import MAX_MESSAGES
from gateway.schemas.decoding import (
    Request,
    check_range,
    clean_label,
    decode,
    refuse_unsupported,
)
from gateway.schemas.sampling import Positive, StreamOptions

ROUTE = "/v1/responses"


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
    """A message; the other kinds of items name themselves in `type` and are refused."""

    type: str | None = None
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | list[Part] | None = None
    id: str | None = None
    status: str | None = None
    phase: str | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: Any = None


class ResponsesBody(Request, kw_only=True):
    model: Annotated[str, Meta(min_length=1, max_length=300)]
    input: str | Annotated[list[Item], Meta(min_length=1, max_length=MAX_MESSAGES)]
    instructions: str | None = None
    max_output_tokens: Positive | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    metadata: dict[str, str] | None = None
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
    top_logprobs: int | None = None
    background: bool | None = None
    conversation: Any = None
    previous_response_id: str | None = None
    prompt: Any = None
    max_tool_calls: int | None = None
    context_management: Any = None
    moderation: Any = None


_HARMLESS: dict[str, tuple[Any, ...]] = {
    "tools": ([],),
    "tool_choice": ("auto", "none"),
    "store": (False,),
    "service_tier": ("auto", "default"),
    "include": ([],),
    "reasoning": ({}, {"effort": "none"}),
    "top_logprobs": (0,),
    "text": ({}, {"format": {"type": "text"}}, {"format": {"type": "text"}, "verbosity": "medium"}),
    "background": (False,),
    "conversation": (),
    "previous_response_id": (),
    "prompt": (),
    "max_tool_calls": (),
    "context_management": (),
    "moderation": (),
    "prompt_cache_retention": ("in-memory", "in_memory"),
    "prompt_cache_options": ({},),
}
_decoder = msgspec.json.Decoder(ResponsesBody)


def parse_responses(raw: bytes) -> Ask:
    body = decode(_decoder, raw)
    refuse_unsupported(body, _HARMLESS)
    check_range("temperature", body.temperature, 0, 2)
    check_range("top_p", body.top_p, 0, 1)
    messages: list[dict[str, Any]] = []
    if body.instructions:
        messages.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        messages.append({"role": "user", "content": body.input})
    else:
        messages += [_message(index, item) for index, item in enumerate(body.input)]
    return Ask(
        route=ROUTE,
        model=body.model,
        messages=messages,
        max_tokens=body.max_output_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        stream=bool(body.stream),
        include_usage=True,
        truncation=body.truncation or "disabled",
        end_user=clean_label("user", body.user or body.safety_identifier),
        extra={
            "instructions": body.instructions,
            "metadata": body.metadata or {},
            "parallel_tool_calls": body.parallel_tool_calls is not False,
        },
    )


def _message(index: int, item: Item) -> dict[str, Any]:
    if item.type not in (None, "message") or item.role is None or item.content is None:
        raise UnsupportedParameter(
            f"input[{index}] is not a message; this model reads messages of text only.",
            next_step="Send items with a role and content.",
            param=f"input[{index}]",
        )
    if isinstance(item.content, str):
        return {"role": item.role, "content": item.content}
    return {"role": item.role, "content": [_part(index, i, p) for i, p in enumerate(item.content)]}


def _part(item: int, index: int, part: Part) -> dict[str, Any]:
    text = part.refusal if part.type == "refusal" else part.text
    if part.type not in ("input_text", "output_text", "text", "refusal") or text is None:
        where = f"input[{item}].content[{index}]"
        raise UnsupportedParameter(
            f"{where} is not text; this model reads text only.",
            next_step="Send parts of type input_text.",
            param=where,
        )
    return {"type": "text", "text": text}
