"""The tools of /v1/responses, which may be in namespaces, and their form for the chat API."""

from typing import Any

import msgspec

from core.errors import UnsupportedParameter
from gateway.edge.decoding import Request
from gateway.formats.chat import request
from gateway.prompts.tool_lists import flat_name


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
