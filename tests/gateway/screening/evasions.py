"""What an attacker does to a text that a reader still reads: the rows and columns of the tests.

A new way of hiding text is one more row of `DISGUISES`, a new kind of rule one more of `RULES`, a new
surface one more of `PARTS` or `CONTINUED`.
"""

import json
from collections.abc import Callable
from typing import Any

from gateway.formats.chat.request import parse_chat
from gateway.formats.completions.request import parse_completion
from gateway.formats.messages.request import parse_messages
from gateway.formats.responses.request import parse_responses
from gateway.request.inference import InferenceRequest

# The rule in a policy's document, and a text that it matches.
RULES: dict[str, tuple[dict[str, Any], str]] = {
    "phrase": ({"deny": ["two words"]}, "two words"),
    "word": ({"deny": ["zorgblat"]}, "zorgblat"),
    "hyphenated": ({"deny": ["multi-tenant"]}, "multi-tenant"),
    "card": ({"entities": {"card": "block"}}, "4111 1111 1111 1111"),
    "email": ({"entities": {"email": "block"}}, "ann@acme.example"),
    "iban": ({"entities": {"iban": "block"}}, "DE89 3704 0044 0532 0130 00"),
    "pattern": (
        {"patterns": [{"name": "p", "pattern": r"code\sname\s[a-z]{5}", "action": "block"}]},
        "code name zebra",
    ),
}

# Between two words a reader sees a gap all the same.
GAPS = {
    "two spaces": "  ",
    "tab": "\t",
    "no-break space": "\u00a0",
    "em space": "\u2003",
    "ideographic space": "\u3000",
    "Hangul filler": "\u3164",
    "half-width Hangul filler": "\uffa0",
    "empty Braille cell": "\u2800",
    "spaces around nothing": " \u200b ",
}
# Only a phrase is read over these: the digits of a card are not on two lines.
LINES = {
    "line break": "\n",
    "carriage return and line break": "\r\n",
    "line separator": "\u2028",
    "vertical tab": "\x0b",
    "form feed": "\x0c",
    "next line": "\x85",
    "line break and indentation": "\n        ",
}
# Within a word a reader sees none of these.
NOTHING = {
    "zero-width space": "\u200b",
    "soft hyphen": "\u00ad",
    "grapheme joiner": "\u034f",
    "tag character": "\U000e0061",
    "Mongolian separator": "\u180e",
    "unassigned and ignorable": "\u2065",
    "Hangul filler": "\u3164",
    "Hangul choseong filler": "\u115f",
    "empty Braille cell": "\u2800",
}
# Of these, the ones that may also show as a gap.
FILLERS = ("\u3164", "\u115f", "\u2800", "\uffa0")


def _spaced(gap: str) -> Callable[[str], str]:
    return lambda text: text.replace(" ", gap)


def _stuffed(nothing: str) -> Callable[[str], str]:
    return lambda text: text[:2] + nothing + text[2:]


def disguises(kind: str) -> dict[str, str]:
    """The text of a rule, disguised in each way that applies to it."""
    text = RULES[kind][1]
    found = {name: _stuffed(sign)(text) for name, sign in NOTHING.items()}
    if kind not in ("word", "phrase", "hyphenated"):
        # Fillers show as gaps, which break an address or a number; only terms are read without them.
        found = {
            name: each for name, each in found.items() if not any(sign in each for sign in FILLERS)
        }
    gaps = {} if kind == "pattern" else GAPS
    lines = LINES if kind == "phrase" else {}
    if " " in text:
        found |= {f"gap: {name}": _spaced(gap)(text) for name, gap in (gaps | lines).items()}
    return found


def _user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


def _chat(parts: list[str]) -> InferenceRequest:
    body = {"model": "m", "messages": _user([{"type": "text", "text": each} for each in parts])}
    return parse_chat(json.dumps(body).encode())


def _messages(parts: list[str]) -> InferenceRequest:
    content = [{"type": "text", "text": each} for each in parts]
    return parse_messages(
        json.dumps({"model": "m", "max_tokens": 9, "messages": _user(content)}).encode()
    )


def _responses(parts: list[str]) -> InferenceRequest:
    content = [{"type": "input_text", "text": each} for each in parts]
    return parse_responses(json.dumps({"model": "m", "input": _user(content)}).encode())


def _system(parts: list[str]) -> InferenceRequest:
    system = [{"type": "text", "text": each} for each in parts]
    body = {"model": "m", "max_tokens": 9, "system": system, "messages": _user("Hi")}
    return parse_messages(json.dumps(body).encode())


def _tool_result(parts: list[str]) -> InferenceRequest:
    call = {"type": "tool_use", "id": "t", "name": "f", "input": {}}
    content = [{"type": "text", "text": each} for each in parts]
    result = {"type": "tool_result", "tool_use_id": "t", "content": content}
    turns = [*_user("Hi"), {"role": "assistant", "content": [call]}, *_user([result])]
    return parse_messages(json.dumps({"model": "m", "max_tokens": 9, "messages": turns}).encode())


def _function_output(parts: list[str]) -> InferenceRequest:
    output = [{"type": "input_text", "text": each} for each in parts]
    items = [
        *_user("Hi"),
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": output},
    ]
    return parse_responses(json.dumps({"model": "m", "input": items}).encode())


PARTS: dict[str, Callable[[list[str]], InferenceRequest]] = {
    "chat": _chat,
    "messages": _messages,
    "responses": _responses,
    "system blocks": _system,
    "tool result": _tool_result,
    "function output": _function_output,
}
# Their parts become one text of several lines, as every model reads it.
LINES_OF_TEXT = ("tool result", "function output")


def _continued_chat(text: str, **more: Any) -> InferenceRequest:
    turns = [*_user("Hi"), {"role": "assistant", "content": text}]
    body = {"model": "m", "messages": turns, "add_generation_prompt": False, **more}
    return parse_chat(json.dumps(body).encode())


def _prefilled(text: str) -> InferenceRequest:
    turns = [*_user("Hi"), {"role": "assistant", "content": text}]
    return parse_messages(json.dumps({"model": "m", "max_tokens": 9, "messages": turns}).encode())


def _completion(text: str) -> InferenceRequest:
    return parse_completion(json.dumps({"model": "m", "prompt": ["other", text]}).encode())


# A request whose answer continues a text, and the choice that does.
CONTINUED: dict[str, tuple[Callable[[str], InferenceRequest], int]] = {
    "continue_final_message": (lambda text: _continued_chat(text, continue_final_message=True), 0),
    "echo": (lambda text: _continued_chat(text, continue_final_message=True, echo=True), 0),
    "prefill": (_prefilled, 0),
    "completion": (_completion, 1),
}
