"""Compiles a request's grammar for the model's tokenizer, in bounded time and memory.

`llguidance` parses answers and makes the masks of allowed tokens. Its limits bound the work of each
step; the checks here bound the compilation and refuse what it would accept and never finish.
"""

import json
from collections import OrderedDict
from collections.abc import Callable
from functools import cache
from threading import Lock

from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark

from engine.decoding.grammar.lark import checked_lark
from engine.decoding.grammar.schema import JSON_OPTIONS, checked_schema
from engine.errors import RequestError
from engine.protocol import Grammar

MAX_BYTES = 256 << 10  # of a grammar's text
_MAX_CHOICES = 2000
_KEPT = 128  # compiled grammars
_LIMITS = LLParserLimits(
    initial_lexer_fuel=1_000_000,  # about 20 ms
    step_lexer_fuel=50_000,  # about 4 ms
    step_max_items=50_000,  # about 3 ms
    max_lexer_states=20_000,  # about 2 kB each
    max_grammar_size=100_000,
    verbose_errors=False,
)


class GrammarCompiler:
    """Of one model. Every method is safe in threads; compiling releases the interpreter's lock."""

    def __init__(self, tokenizer: Callable[[], str], vocab: int, eos: tuple[int, ...]) -> None:
        """`tokenizer`: reads the text of its tokenizer.json, at the first grammar."""
        self._tokenizer = cache(
            lambda: LLTokenizer(tokenizer(), n_vocab=vocab, eos_token=list(eos))
        )  # a tenth of a second to build for a large vocabulary
        self._compiled: OrderedDict[Grammar, LLMatcher] = OrderedDict()
        self._lock = Lock()

    def matcher(self, grammar: Grammar) -> LLMatcher:
        """A fresh matcher. Raises RequestError naming what cannot be served."""
        with self._lock:
            compiled = self._compiled.get(grammar)
            if compiled is not None:
                self._compiled.move_to_end(grammar)
                return compiled.deep_copy()
        compiled = self._compile(grammar)
        with self._lock:
            self._compiled[grammar] = compiled
            while len(self._compiled) > _KEPT:
                self._compiled.popitem(last=False)
        return compiled.deep_copy()

    def ready(self, grammar: Grammar) -> bool:
        """Whether `matcher` returns at once."""
        with self._lock:
            return grammar in self._compiled

    def _compile(self, grammar: Grammar) -> LLMatcher:
        matcher = LLMatcher(self._tokenizer(), _source(grammar), log_level=0, limits=_LIMITS)
        if not matcher.is_error():
            matcher.compute_bitmask()  # builds the first states of the lexer, and finds dead ends
        if matcher.is_error():
            raise refused(grammar.kind, matcher.get_error())
        if matcher.is_stopped() and not matcher.is_accepting():
            raise refused(grammar.kind, "nothing matches it")
        matcher.reset()
        return matcher


def refused(kind: str, why: str) -> RequestError:
    lines = [
        line.strip() for line in why.splitlines() if line.strip() and "non-verbose" not in line
    ]
    return RequestError("invalid_grammar", f"the {kind} cannot be served: {' '.join(lines)[:300]}")


def _source(grammar: Grammar) -> str:
    """The grammar in llguidance's own form. Raises RequestError."""
    kind, text = grammar.kind, grammar.text
    size = len(text.encode())
    if size > MAX_BYTES:
        raise refused(kind, f"it has {size} bytes, at most {MAX_BYTES} are allowed")
    if kind == "json_schema":
        checked = checked_schema(text)
        return LLMatcher.grammar_from_json_schema(checked, overrides=JSON_OPTIONS)  # type: ignore[arg-type]
    if kind == "regex":
        return LLMatcher.grammar_from_regex(text)
    if kind == "lark":
        return LLMatcher.grammar_from_lark(checked_lark(text))
    if kind == "gbnf":
        try:
            lark = any_to_lark(text)
        except Exception as error:
            raise refused(kind, str(error)) from error
        return LLMatcher.grammar_from_lark(checked_lark(lark))
    if kind == "choice":
        return LLMatcher.grammar_from_lark(_choices(text))
    raise RequestError(
        "invalid_grammar",
        f"the kind of grammar is {kind!r}: use json_schema, regex, lark, gbnf or choice",
    )


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
