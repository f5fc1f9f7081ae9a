"""How a chat template reads turns that call tools.

Templates disagree: some join the content of a message to a string, which fails where it is null; some
take null for "only calls"; some print `None`. Some write the arguments of a call as JSON, some take
them for a text that is JSON already. What a template does is tried once, on a conversation of ours.
"""

import json
from collections.abc import Callable
from typing import Any

import jinja2
from msgspec import Struct

from core.errors import TollhouseError

_NAME, _VALUE, _KEY = "probe_tool", "probe value", "probe_key"
_FAILS = (jinja2.TemplateError, TollhouseError, TypeError, KeyError, ValueError, ArithmeticError)
_TOOL = {"type": "function", "function": {"name": _NAME, "parameters": {"type": "object"}}}


class CallTurns(Struct, frozen=True):
    null_content: bool  # the content, if it is null, of a turn that only calls stays null
    objects: bool  # arguments are objects, as transformers documents

    def message(self, message: dict[str, Any]) -> dict[str, Any]:
        """The message as the template reads it; the given one is not changed."""
        result = message
        if message.get("content") is None:
            calls = message["role"] == "assistant" and message.get("tool_calls")
            keeps = self.null_content and calls
            result = {**message, "content": None if keeps else ""}
        if self.objects and (calls := message.get("tool_calls")):
            result = {**result, "tool_calls": [_with_object(call) for call in calls]}
        return result


def call_turns(render: Callable[..., str]) -> CallTurns:
    """`render` takes messages and tools. Of the forms that the template renders, the first in which
    it names the tool, writes its arguments as JSON, and prints no `None`."""
    forms = [
        CallTurns(null_content, objects)
        for objects in (True, False)
        for null_content in (True, False)
    ]
    rendered = {form: text for form in forms if (text := _tried(render, form)) is not None}
    plain = min((text.count("None") for text in rendered.values()), default=0)
    shown = {form: text for form, text in rendered.items() if text.count("None") == plain}
    best = max((_merit(text) for text in shown.values()), default=0)
    return next(
        (form for form, text in shown.items() if _merit(text) == best), CallTurns(False, True)
    )


def _tried(render: Callable[..., str], form: CallTurns) -> str | None:
    function = {"name": _NAME, "arguments": json.dumps({_KEY: _VALUE})}
    call = {"id": "call12345", "type": "function", "function": function}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "probe question"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call12345", "name": _NAME, "content": "probe result"},
    ]
    try:
        return render([form.message(each) for each in messages], [_TOOL])
    except _FAILS:
        return None


def _merit(text: str) -> int:
    """How much of the call the template wrote as it should be."""
    called = text.rpartition("probe question")[2]
    named, valued = _NAME in called, _VALUE in called
    python, twice = f"'{_KEY}'" in called, f'\\"{_KEY}' in called
    return named + valued + (valued and not python and not twice)


def _with_object(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except (ValueError, RecursionError):
        return call
    if not isinstance(arguments, dict):
        return call
    return {**call, "function": {**function, "arguments": arguments}}
