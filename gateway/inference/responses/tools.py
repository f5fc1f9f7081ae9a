"""The tools of /v1/responses, which may be in namespaces, and their form for the chat API."""

from typing import Any

import msgspec

from core.errors import UnsupportedParameter
from gateway.inference.chat import request
from gateway.inference.decoding import Request


class Tool(Request):
    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    cache_control: Any = None
    tools: list["Tool"] | None = None  # of a namespace
    external_web_access: bool | None = None  # of a web search


def offered(tools: list[Tool]) -> tuple[list[Tool], list[str]]:
    """The tools that the model is offered, those of namespaces under their flat names, and notes on
    the others: a web search that may not reach the web, which Codex sends with every request, finds
    nothing here."""
    searches = [each for each in tools if _is_offline_search(each)]
    notes = ["tools: a web_search without web access finds nothing here, so it is not offered."]
    left = [each for each in tools if not _is_offline_search(each)]
    return without_namespaces(left), notes if searches else []


def _is_offline_search(tool: Tool) -> bool:
    return tool.type == "web_search" and tool.external_web_access is False


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


def chat_tool(index: int, tool: Tool) -> request.Tool:
    if tool.type != "function" or not tool.name or tool.external_web_access is not None:
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


def tool_object(tool: Tool) -> dict[str, Any]:
    if tool.type == "namespace":
        inner = [tool_object(each) for each in tool.tools or ()]
        return {
            "type": "namespace",
            "name": tool.name,
            "description": tool.description,
            "tools": inner,
        }
    if _is_offline_search(tool):
        return {"type": "web_search", "external_web_access": False}
    return {
        "type": "function",
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.parameters,
        "strict": bool(tool.strict),
    }
