"""How model families write tool calls: what a call begins and ends with, and how it is parsed.

Each `parse` returns objects with `name` and `arguments` (or as OpenAI writes them), and an empty list
for anything that is not a call.
"""

import ast
import json
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_LONGEST = 200_000  # characters of calls in Python's form that are parsed
_DEEPSEEK_CALL = re.compile(
    r"<｜tool▁call▁begin｜>\s*(?:function<｜tool▁sep｜>)?([^<\n]+?)(?:\n```json\n|<｜tool▁sep｜>)"
    r"(.*?)(?:\n```)?\s*<｜tool▁call▁end｜>",
    re.DOTALL,
)
_MISTRAL_CALL = re.compile(r"\s*([\w.-]+)\s*(?:\[CALL_ID\]\s*([\w-]+)\s*)?(?:\[ARGS\]\s*)?(\{.*)")


@dataclass(frozen=True, slots=True)
class ToolFormat:
    open: str
    close: str | None  # None: it ends where its brackets do
    parse: Callable[[str], list[Any]]


def parse_json(text: str) -> list[Any]:
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError):
        return []
    return parsed if isinstance(parsed, list) else [parsed]


def parse_python(text: str) -> list[Any]:
    """`[weather(city="Rome"), time()]`: literals by keyword, as Llama writes them."""
    if len(text) > _LONGEST:
        return []
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes that Python does not know
            parsed = ast.parse(text.strip(), mode="eval").body
        listed = parsed.elts if isinstance(parsed, ast.List) else [parsed]
        return [_python_call(each) for each in listed]
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return []


def parse_either(text: str) -> list[Any]:
    return parse_json(text) or parse_python(text)


def parse_mistral(text: str) -> list[Any]:
    """A list of objects, or a name before its arguments, as newer models write it."""
    if listed := parse_json(text):
        return listed
    found = _MISTRAL_CALL.fullmatch(text.replace("\n", " "))
    if found is None:
        return []
    # White space inside of strings is kept: JSON has no line breaks there.
    return [{"name": found[1], "id": found[2], "arguments": text[text.index("{") :]}]


def parse_deepseek(text: str) -> list[Any]:
    calls = [{"name": name, "arguments": given} for name, given in _DEEPSEEK_CALL.findall(text)]
    return [] if _DEEPSEEK_CALL.sub("", text).strip() else calls


def _python_call(node: ast.expr) -> dict[str, Any]:
    if not isinstance(node, ast.Call) or node.args:
        raise ValueError("not a call by keywords")
    given = {each.arg: _literal(each.value) for each in node.keywords if each.arg is not None}
    if len(given) < len(node.keywords):
        raise ValueError("a name is missing")
    return {"name": ast.unparse(node.func), "arguments": json.loads(json.dumps(given))}


def _literal(node: ast.expr) -> Any:
    """Also JSON's words for the three constants."""
    words = {"true": True, "false": False, "null": None}
    if isinstance(node, ast.Name) and node.id in words:
        return words[node.id]
    if isinstance(node, ast.List):
        return [_literal(each) for each in node.elts]
    if isinstance(node, ast.Dict):
        keys = [ast.literal_eval(key) for key in node.keys if key is not None]
        return dict(zip(keys, map(_literal, node.values), strict=True))
    return ast.literal_eval(node)


FORMATS = (
    ToolFormat("<tool_call>", "</tool_call>", parse_json),  # Hermes, Qwen
    ToolFormat("[TOOL_CALLS]", None, parse_mistral),
    ToolFormat("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", parse_deepseek),
    ToolFormat("<|python_tag|>", None, parse_either),  # Llama 3
    ToolFormat("<|python_start|>", "<|python_end|>", parse_either),  # Llama 4
)
# Tokens that are part of these forms though tokenizers may hide them as control tokens.
TOKENS = frozenset(
    {each.open for each in FORMATS}
    | {each.close for each in FORMATS if each.close}
    | {"[ARGS]", "[CALL_ID]", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"}
)
OPENING = re.compile("|".join(re.escape(each.open) for each in FORMATS))
# A call in Hermes' tags whose end is missing: it has a name, and perhaps a beginning of its arguments.
CUT_CALL = re.compile(
    r'<tool_call>\s*(?:\{(?:\s*"id"\s*:\s*"(?P<id>[^"\\]*)"\s*,)?'
    r'(?:\s*"name"\s*:\s*"(?P<name>[^"\\]*)"\s*,\s*"arguments"\s*:\s*(?P<arguments>(?:\{.*)?)|.*))?',
    re.DOTALL,
)
_LONGEST_OPENING = max(len(each.open) for each in FORMATS)
_BEGINS = re.compile("|".join(sorted({re.escape(each.open[0]) for each in FORMATS})))


def format_of(opening: str) -> ToolFormat:
    return next(each for each in FORMATS if each.open == opening)


def partial_opening(held: str) -> int:
    """Length of the longest suffix that is a prefix of an opening."""
    for found in _BEGINS.finditer(held, max(0, len(held) - _LONGEST_OPENING + 1)):
        suffix = held[found.start() :]
        if any(each.open.startswith(suffix) for each in FORMATS):
            return len(suffix)
    return 0


class BracketScanner:
    """Finds the end of a bracketed value incrementally, reading each character once."""

    def __init__(self) -> None:
        self._at = self._depth = 0
        self._quote = ""  # of the string that is open
        self._escaped = False

    def end_of(self, text: str, begin: int, quotes: str = '"') -> int | None:
        for position in range(max(self._at, begin), len(text)):
            character = text[position]
            self._at = position + 1
            if self._quote:
                if self._escaped:
                    self._escaped = False
                elif character == "\\":
                    self._escaped = True
                elif character == self._quote:
                    self._quote = ""
            elif character in quotes:
                self._quote = character
            elif character in "{[(":
                self._depth += 1
            elif character in "}])":
                self._depth -= 1
                if self._depth == 0:
                    return self._at
        return None
