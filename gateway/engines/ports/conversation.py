"""Readings of a chat's messages that several ports share."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

import orjson
from msgspec import Struct

from core.errors import BadRequest

ERROR_MARK = "Error: "  # before the text of a failed tool's result, whose message has `is_error`


class Data(Struct, frozen=True):
    """A `data:` URL."""

    media_type: str
    base64: str


def parts_of(content: Any) -> list[dict[str, Any]]:
    """The parts of a message's content, of which a string is one of text; an empty string is none."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if content else []
    return list(content or ())


def text_of(content: Any) -> str:
    """The content's text, without its other parts."""
    if isinstance(content, str):
        return content
    return "".join([str(part.get("text") or "") for part in content or ()])


def data_of_url(url: str) -> Data | None:
    """None for a URL of another kind."""
    if not url.startswith("data:"):
        return None
    head, _, body = url[5:].partition(",")
    media_type, _, coding = head.partition(";")
    if coding.rpartition(";")[2] != "base64":
        raise BadRequest(
            "A data: URL is not in base64.",
            next_step="Write it as data:<media type>;base64,<data>.",
            code="invalid_value",
        )
    return Data(media_type or "text/plain", body)


def arguments_of(call: dict[str, Any]) -> Any:
    """The arguments of a tool call of an earlier turn as an object."""
    written = call["function"].get("arguments") or "{}"
    try:
        arguments = orjson.loads(written)
    except ValueError:
        try:
            arguments = json.loads(written)
        except ValueError:
            arguments = None
    if not isinstance(arguments, dict):
        raise BadRequest(
            f"The arguments of the tool call {call.get('id')!r} are not a JSON object.",
            next_step="Return tool calls as they were received.",
            param="messages",
            code="invalid_value",
        )
    return arguments


def leading_system(
    messages: Sequence[dict[str, Any]],
) -> tuple[list[dict[str, Any]], Sequence[dict[str, Any]]]:
    """The parts of the system's messages before all others, and the rest of the messages."""
    parts: list[dict[str, Any]] = []
    for index, message in enumerate(messages):
        if message["role"] not in ("system", "developer"):
            return parts, messages[index:]
        parts += parts_of(message.get("content"))
    return parts, ()


def tool_names(messages: Sequence[dict[str, Any]]) -> dict[str, str]:
    """The name of each tool that was called, by the call's id."""
    return {
        str(call.get("id")): str(call["function"]["name"])
        for message in messages
        for call in message.get("tool_calls") or ()
        if call.get("function")
    }


def details_of(message: dict[str, Any], *formats: str) -> list[dict[str, Any]]:
    """The reasoning of an earlier answer that a provider of these formats wrote."""
    listed = message.get("reasoning_details") or ()
    return [each for each in listed if each.get("format") in formats]


def foreign_details(message: dict[str, Any], *formats: str) -> bool:
    """Whether the message has signed reasoning of another provider, which this one cannot verify."""
    listed = message.get("reasoning_details") or ()
    return any(each.get("format") not in formats for each in listed)


def with_details(
    blocks: list[dict[str, Any]], thoughts: Sequence[tuple[int, dict[str, Any]]]
) -> Iterator[dict[str, Any]]:
    """The blocks of an answer with its thoughts, each before the block of its place."""
    waiting = list(thoughts)
    for place, block in enumerate(blocks):
        while waiting and waiting[0][0] <= place:
            yield waiting.pop(0)[1]
        yield block
    for _, thought in waiting:
        yield thought


def allowed_tools(choice: Any, tools: Sequence[dict[str, Any]]) -> tuple[Any, list[dict[str, Any]]]:
    """(choice, tools) without `allowed_tools`: its mode, and the tools that it lists."""
    if not (isinstance(choice, dict) and choice.get("type") == "allowed_tools"):
        return choice, list(tools)
    given = choice.get("allowed_tools") or choice
    names = {(each.get("function") or each).get("name") for each in given.get("tools") or ()}
    kept = [each for each in tools if each["function"]["name"] in names]
    return given.get("mode") or "auto", kept


def named_tool(choice: Any) -> str | None:
    """The tool that must be called, if one is named."""
    if isinstance(choice, dict):
        name = (choice.get("function") or choice).get("name")
        return str(name) if name else None
    return None


def schema_of(form: Any) -> dict[str, Any] | None:
    """The JSON schema of a `response_format`; None for any JSON object."""
    if form.get("type") != "json_schema":
        return None
    held = form.get("json_schema") or {}
    schema = held.get("schema")
    return schema if isinstance(schema, dict) else {}


def has_cache_marks(messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]]) -> bool:
    """Whether the client marks what is to be cached."""
    return any("cache_control" in each for each in (*messages, *tools)) or any(
        isinstance(message.get("content"), list)
        and any("cache_control" in part for part in message["content"])
        for message in messages
    )


def cites(part: dict[str, Any]) -> bool:
    """Whether a document's answer is to cite it."""
    asked = (part.get("document") or part.get("file") or {}).get("citations")
    return bool(isinstance(asked, dict) and asked.get("enabled"))
