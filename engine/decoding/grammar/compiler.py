"""Compiles a request's grammar for the model's tokenizer, in bounded time and memory.

`llguidance` parses answers and makes the masks of allowed tokens. Its limits bound the work of each
step; the checks here bound the compilation and refuse what it would accept and never finish. It is
imported by the first grammar: an engine that serves none runs without it.
"""

import json
import re
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from threading import Lock
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from engine.decoding.grammar.large_integers import lark_of
from engine.decoding.grammar.lark import checked_lark
from engine.decoding.grammar.schema import JSON_OPTIONS, checked_schema
from engine.errors import RequestError
from engine.protocol import Grammar

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_MAX_BYTES = 256 << 10  # of a grammar's text
_MAX_CHOICES = 2000
_KEPT = 128  # compiled grammars that nothing uses
_LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 1_000_000,  # about 20 ms
    "step_lexer_fuel": 50_000,  # about 4 ms
    "step_max_items": 50_000,  # about 3 ms
    "max_lexer_states": 20_000,  # about 2 kB each
    "max_grammar_size": 100_000,
    "verbose_errors": False,
}


@dataclass(frozen=True, eq=False, slots=True, weakref_slot=True)
class Compiled:
    """A grammar of one model, known to its compiler for as long as something holds it."""

    source: str  # in llguidance's own form
    first: "LLMatcher"  # at the beginning; its copies share a lexer

    def matcher(self) -> "LLMatcher":
        """A fresh one."""
        return self.first.deep_copy()


class GrammarCompiler:
    """Of one model. Every method is safe in threads; compiling releases the interpreter's lock."""

    def __init__(
        self, tokenizer: Callable[[], str], vocab: int, eos: tuple[int, ...], kept: int = _KEPT
    ) -> None:
        """`tokenizer`: reads the text of its tokenizer.json, at the first grammar. kept: how many stay
        compiled that nothing holds."""

        @cache  # a tenth of a second to build for a large vocabulary
        def tokens() -> "LLTokenizer":
            from llguidance import LLTokenizer

            return LLTokenizer(tokenizer(), n_vocab=vocab, eos_token=list(eos))

        self._tokenizer = tokens
        self._compiled: WeakValueDictionary[Grammar, Compiled] = WeakValueDictionary()
        self._latest: OrderedDict[Grammar, Compiled] = OrderedDict()
        self._kept = kept
        self._lock = Lock()

    def find(self, grammar: Grammar) -> Compiled | None:
        """If it is compiled."""
        with self._lock:
            compiled = self._compiled.get(grammar)
            if compiled is not None:
                self._keep(grammar, compiled)
            return compiled

    def compile(self, grammar: Grammar, source: str | None = None) -> Compiled:
        """source: what `source_of` gives, which takes its time with the interpreter's lock. Raises
        RequestError naming what cannot be served."""
        source = source_of(grammar) if source is None else source
        compiled = Compiled(source, self._matcher(grammar.kind, source))
        with self._lock:
            self._compiled[grammar] = compiled
            self._keep(grammar, compiled)
        return compiled

    def renew(self, grammar: Grammar, full: Compiled) -> Compiled:
        """One whose lexer has room again: the states of the other's have reached their limit."""
        with self._lock:
            known = self._compiled.get(grammar)
        return self.compile(grammar, full.source) if known in (None, full) else known

    def _keep(self, grammar: Grammar, compiled: Compiled) -> None:
        self._latest[grammar] = compiled
        self._latest.move_to_end(grammar)
        if len(self._latest) > self._kept:
            self._latest.popitem(last=False)

    def _matcher(self, kind: str, source: str) -> "LLMatcher":
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(**_LIMITS)
        matcher = LLMatcher(self._tokenizer(), source, log_level=0, limits=limits)
        if not matcher.is_error():
            matcher.compute_bitmask()  # builds the first states of the lexer, and finds dead ends
        if matcher.is_error():
            raise refused(kind, matcher.get_error())
        if matcher.is_stopped() and not matcher.is_accepting():
            raise refused(kind, "nothing matches it")
        matcher.reset()
        return matcher


def too_large(grammar: Grammar) -> RequestError | None:
    """Why the grammar is refused unread, if its text is too long."""
    size = len(grammar.text.encode())
    if size <= _MAX_BYTES:
        return None
    return refused(
        grammar.kind, f"it has {size} bytes, at most {_MAX_BYTES} are allowed: shorten it"
    )


# What the library says of settings that a client does not have.
_ONE_OF = re.compile(r"oneOf constraints are not supported\..* with anyOf")
_ONE_OF_WORDS = "a value could match two schemas of a oneOf: use anyOf, or make them differ"
# Its limits have many wordings; which of them a grammar meets, or the deadline, is the machine's speed.
_BEYOND_A_LIMIT = re.compile(r"too (?:many|big|large)\b|\bfuel\b", re.IGNORECASE)


def refused(kind: str, why: str) -> RequestError:
    why = _ONE_OF.sub(_ONE_OF_WORDS, why)
    lines = [
        line.strip() for line in why.splitlines() if line.strip() and "non-verbose" not in line
    ]
    cause = " ".join(lines)[:300]
    if _BEYOND_A_LIMIT.search(cause):
        cause = f"{cause.rstrip('.')}: simplify it"
    return RequestError("invalid_grammar", f"the {kind} cannot be served: {cause}")


def source_of(grammar: Grammar) -> str:
    """The grammar in llguidance's own form. Raises RequestError."""
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import any_to_lark

    kind, text = grammar.kind, grammar.text
    if kind == "json_schema":
        checked = checked_schema(text)
        if (lark := lark_of(checked, JSON_OPTIONS)) is not None:
            return LLMatcher.grammar_from_lark(lark)
        return LLMatcher.grammar_from_json_schema(checked, overrides=JSON_OPTIONS)  # type: ignore[arg-type]
    if kind == "regex":
        return LLMatcher.grammar_from_regex(text)
    if kind == "lark":
        return LLMatcher.grammar_from_lark(checked_lark(text))
    if kind == "gbnf":
        try:
            lark = any_to_lark(_CODE_POINT.sub(_character, text))
        except Exception as error:
            raise refused(kind, str(error)) from error
        return LLMatcher.grammar_from_lark(checked_lark(lark))
    if kind == "choice":
        return LLMatcher.grammar_from_lark(_choices(text))
    raise RequestError(
        "invalid_grammar",
        f"the kind of grammar is {kind!r}: use json_schema, regex, lark, gbnf or choice",
    )


# Escapes of GBNF; those of code points are read here, because the library does not know them.
_CODE_POINT = re.compile(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|.)", re.DOTALL)


def _character(escape: re.Match[str]) -> str:
    digits = escape[1] or escape[2]
    if digits is None:
        return escape[0]
    point = int(digits, 16)
    if point > 0x10FFFF or 0xD800 <= point < 0xE000:
        raise refused("gbnf", f"{escape[0]} is not a character")
    return chr(point) if point > 0x7F else f"\\x{point:02x}"


def _choices(text: str) -> str:
    try:
        choices = json.loads(text)
    except ValueError as error:
        raise refused("choice", str(error)) from error
    if not isinstance(choices, list) or not 0 < len(choices) <= _MAX_CHOICES:
        raise refused("choice", f"it must be a list of 1 to {_MAX_CHOICES} strings")
    if not all(isinstance(each, str) and each for each in choices):
        raise refused("choice", "each choice must be a string that is not empty")
    return "start: " + " | ".join(json.dumps(each) for each in choices)
