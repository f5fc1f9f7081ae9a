"""The grammars of one model: tried in a process apart, compiled once, followed by every sequence."""

from collections.abc import Callable
from functools import cache

from engine.decoding.grammar.checker import GrammarChecker
from engine.decoding.grammar.compiler import Compiled, GrammarCompiler, too_large
from engine.decoding.grammar.digit_runs import DigitRuns
from engine.decoding.grammar.matchers import Matchers
from engine.errors import RequestError
from engine.protocol import Grammar


class Grammars:
    def __init__(
        self,
        tokenizer: Callable[[], str | None],
        vocab: int,
        eos: tuple[int, ...],
        *,
        spare: bool = False,
        lists: bool = False,
    ) -> None:
        """`tokenizer`: reads the text of the model's tokenizer.json; None where it has none. spare:
        whether the model leaves a core free. lists: whether ids are listed where few are allowed."""
        self._tokenizer = cache(tokenizer)
        self._compiler = GrammarCompiler(self._text, vocab, eos)
        self._checker = GrammarChecker(self._text, vocab, eos)
        runs = DigitRuns(self._text, vocab)
        self.matchers = Matchers(self._compiler, vocab, runs=runs, spare=spare, lists=lists)

    def ready(self, grammar: Grammar) -> bool:
        """Whether `prepare` returns or refuses at once."""
        return self._compiler.find(grammar) is not None or too_large(grammar) is not None

    def prepare(self, grammar: Grammar) -> Compiled:
        """Check and compile a client's grammar: up to some seconds, in any thread. It stays compiled
        for as long as the result is held. Raises RequestError naming what cannot be served."""
        if compiled := self._compiler.find(grammar):
            return compiled
        if refusal := too_large(grammar):
            raise refusal
        return self._compiler.compile(grammar, self._checker.check(grammar))

    def _text(self) -> str:
        text = self._tokenizer()
        if text is None:
            raise RequestError(
                "invalid_grammar",
                "grammars and JSON schemas cannot be served: this model has no tokenizer.json",
            )
        return text
