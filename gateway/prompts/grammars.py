"""The grammar that our own engine follows, from the forms that clients ask for.

Tool calls are written as Hermes and Qwen models write them, one JSON object between tags, which
`gateway/answers/tool_calls.py` reads.
"""

import json
from collections.abc import Mapping
from typing import Any

from core.errors import BadRequest
from engine.protocol import Grammar
from gateway.request.inference import InferenceRequest

_MOST_CALLS = 16  # in one answer that must consist of calls
_JSON_OBJECT = {"type": "object"}


def grammar_of(request: InferenceRequest) -> Grammar | None:
    """None where the request leaves the output free."""
    given = request.engine_parameters
    if "structured_outputs" in given:
        return _structured(given["structured_outputs"])
    form = given.get("response_format")
    schema = None if form is None else _schema(form)
    names, forced = _tools(request)
    if names:
        return Grammar("lark", _tool_grammar(request, names, schema, forced=forced))
    return None if schema is None else Grammar("json_schema", json.dumps(schema))


def grammar_field(request: InferenceRequest) -> str:
    """The client's field that the grammar comes from."""
    given, named = request.engine_parameters, request.extra.get("named", {})
    if "structured_outputs" not in given and _tools(request)[0]:
        return "functions" if request.extra.get("legacy_functions") else "tools"
    name = "structured_outputs" if "structured_outputs" in given else "response_format"
    return str(named.get(name, name))


def _structured(given: Mapping[str, Any]) -> Grammar:
    ((kind, value),) = given.items()
    if kind == "json":
        return Grammar("json_schema", value if isinstance(value, str) else json.dumps(value))
    if kind == "json_object":
        return Grammar("json_schema", json.dumps(_JSON_OBJECT))
    if kind == "grammar":
        return Grammar("gbnf" if "::=" in value else "lark", value)
    return Grammar(kind, value if kind == "regex" else json.dumps(value))


def _schema(form: Mapping[str, Any]) -> Any:
    if form["type"] == "json_object":
        return _JSON_OBJECT
    described = form.get("json_schema")
    schema = described.get("schema") if isinstance(described, dict) else None
    if not isinstance(schema, dict):
        raise BadRequest(
            "response_format has no schema: json_schema.schema must be an object.",
            next_step="Correct response_format.",
            param="response_format",
            code="invalid_value",
        )
    return schema


def _tools(request: InferenceRequest) -> tuple[list[str], bool]:
    """The tools that the output may call, and whether it must. None where nothing is constrained:
    without `strict` and without a forced choice, the model writes as it likes."""
    every = [str(tool["function"]["name"]) for tool in request.tools or ()]
    choice = request.engine_parameters.get("tool_choice")
    if choice is None:
        return (every if "strict" in request.engine_parameters else []), False
    if choice == "required":
        return every, True
    if choice["type"] == "allowed_tools":
        allowed = choice.get("allowed_tools", choice)
        listed = allowed.get("tools", [])
        names = [_known(_name(each), every) for each in listed if isinstance(each, dict)]
        return names, allowed.get("mode") == "required"
    return [_known(_name(choice), every)], True


def _name(tool: Mapping[str, Any]) -> str:
    function = tool.get("function")
    return str(function.get("name") if isinstance(function, dict) else tool.get("name"))


def _known(name: str, every: list[str]) -> str:
    if name not in every:
        raise BadRequest(
            f"tool_choice names {name[:100]!r}, which is not among the tools.",
            next_step=f"Use one of {', '.join(every)[:300]}.",
            param="tool_choice",
            code="invalid_value",
        )
    return name


def _tool_grammar(request: InferenceRequest, names: list[str], schema: Any, *, forced: bool) -> str:
    """In Lark: calls, or text with calls in it, or the answer's own form instead of them."""
    one = request.single_tool_call or isinstance(request.engine_parameters.get("tool_choice"), dict)
    more = "" if one else f' ("\\n" call){{0,{_MOST_CALLS - 1}}}'
    lines = [f"calls: call{more}", 'call: "<tool_call>" rest', 'rest: "\\n" body "\\n</tool_call>"']
    functions = {str(t["function"]["name"]): t["function"] for t in request.tools or ()}
    lines.append("body: " + " | ".join(f"tool_{n}" for n in range(len(names))))
    for n, name in enumerate(names):
        lines.append(f"tool_{n}: %json {json.dumps(_call_schema(name, functions[name]))}")
    if forced:
        lines.insert(0, "start: calls")
    elif schema is not None:
        lines.insert(0, "start: calls | answer")
        lines.append(f"answer: %json {json.dumps(schema)}")
    else:
        lines.insert(0, "start: (before rest)* after")
        lines += ['before[lazy]: /(.|\\n)*/ "<tool_call>"', "after: /(.|\\n)*/"]
    return "\n".join(lines) + "\n"


def _call_schema(name: str, function: Mapping[str, Any]) -> dict[str, Any]:
    parameters = function.get("parameters") or _JSON_OBJECT
    return {
        "type": "object",
        "properties": {"name": {"const": name}, "arguments": _moved(parameters)},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _moved(schema: Any) -> Any:
    """The schema with references to its root pointing to its new place, below the call's."""
    if isinstance(schema, list):
        return [_moved(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {name: _moved(value) for name, value in schema.items()}
    ref = schema.get("$ref")
    if isinstance(ref, str) and ref.startswith("#"):
        moved["$ref"] = "#/properties/arguments" + ref[1:]
    return moved
