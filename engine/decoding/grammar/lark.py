"""Checks that a Lark grammar has an end: that `start` derives at least one finite text.

`start: "a" start` compiles, and an answer under it could never stop. Only the shape of the rules is
read; whatever is not understood here counts as having an end, and llguidance judges it.
"""

import json
import re

from engine.decoding.grammar.schema import JSON_OPTIONS, checked_schema
from engine.errors import RequestError

_TOKEN = re.compile(
    r"""(?P<skip>\s+|//[^\n]*)
    |(?P<text>"(?:\\.|[^"\\])*"i?|/(?:\\.|[^/\\\n])+/[imslux]*|<[^>\s]+>|%\w+|@\w+)
    |(?P<name>[A-Za-z_!?][\w-]*)
    |(?P<repeat>~\s*\d+(?:\s*\.\.\s*\d+)?|\{\d*,?\d*\})
    |(?P<mark>.)""",
    re.VERBOSE | re.DOTALL,
)
_RULE = re.compile(r"^[?!]*([A-Za-z_][\w-]*)(?:\.-?\d+)?(?:\[[^\]\n]*\])?\s*:", re.MULTILINE)
_PASSES = 200
_BRACED = ("%json", "%regex", "%lark")  # what follows is between braces, and ends
_SCHEMA = re.compile(r"%json\s*(?=\{)")
_DECODER = json.JSONDecoder()


def checked_lark(text: str) -> str:
    """The grammar, with its JSON schemas checked. Raises RequestError where `start` never ends."""
    text = _with_checked_schemas(text)
    rules = _rules(text)
    if "start" not in rules:
        return text
    ending: set[str] = set()
    for _ in range(_PASSES):
        before = len(ending)
        for name, body in rules.items():
            if name not in ending and _Ends(body, rules.keys() - ending).read():
                ending.add(name)
        if len(ending) == before:
            break
    if "start" not in ending:
        raise RequestError(
            "invalid_grammar", "the grammar cannot be served: the rule start never ends"
        )
    return text


def _with_checked_schemas(text: str) -> str:
    parts, at = [], 0
    for match in _SCHEMA.finditer(text):
        if match.start() < at:
            continue
        try:
            schema, length = _DECODER.raw_decode(text[match.end() :])
        except (ValueError, RecursionError):
            break  # llguidance says what is wrong
        schema.setdefault("x-guidance", JSON_OPTIONS)
        parts.append(text[at : match.end()] + checked_schema(json.dumps(schema)))
        at = match.end() + length
    return "".join(parts) + text[at:]


def _rules(text: str) -> dict[str, list[tuple[str, str]]]:
    """The tokens (kind, text) of each rule's body."""
    starts = list(_RULE.finditer(text))
    ends = [match.start() for match in starts[1:]] + [len(text)]
    rules: dict[str, list[tuple[str, str]]] = {}
    for match, end in zip(starts, ends, strict=True):
        body = text[match.end() : end]
        tokens = [(m.lastgroup or "", m.group()) for m in _TOKEN.finditer(body)]
        rules[match.group(1)] = [each for each in tokens if each[0] != "skip"]
    return rules


class _Ends:
    """Whether a rule's body can end, when the rules `open_rules` are not known to."""

    def __init__(self, tokens: list[tuple[str, str]], open_rules: set[str]) -> None:
        self._tokens = tokens
        self._at = 0
        self._open = open_rules

    def read(self) -> bool:
        """One of the alternatives up to a closing bracket or the end of the body."""
        found, sequence = False, True
        while self._at < len(self._tokens):
            kind, text = self._tokens[self._at]
            self._at += 1
            if text == "|":
                found, sequence = found or sequence, True
            elif kind == "mark" and text in ")]":
                break
            else:
                sequence &= self._item(kind, text)
        return found or sequence

    def _item(self, kind: str, text: str) -> bool:
        if text in _BRACED:
            self._skip_braces()
            return True
        if kind == "text" and text.startswith("%"):
            self._at = len(self._tokens)  # a directive: read by llguidance
            return True
        if kind == "mark" and text in "([":
            ends = self.read() or text == "["
        else:
            ends = kind != "name" or text not in self._open
        if self._at < len(self._tokens):
            repeat = self._tokens[self._at][1]
            if repeat in ("?", "*") or re.match(r"~\s*0\b|\{0?,|\{0\}", repeat):
                return True
        return ends

    def _skip_braces(self) -> None:
        depth = 0
        while self._at < len(self._tokens):
            kind, text = self._tokens[self._at]
            self._at += 1
            depth += (text == "{") - (text == "}") if kind == "mark" else 0
            if not depth:
                return
