"""Passes an upstream's text to the client in the turn of the event loop in which it was read.

Text that nothing reads or changes (no stop strings, tools or log-probabilities, and no guard or none
that judges it yet) and that the held money covers needs no step of the delivery: its task sleeps on,
and one read of the upstream becomes one write. The text and the counts are those that the delivery's
own steps would make.
"""

from collections.abc import Callable, Sequence

from gateway.answers.choices import ChoiceOutput, Delta
from gateway.answers.coverage import Coverage
from gateway.answers.idle_timer import IdleTimer
from gateway.answers.surface import StreamWriter
from gateway.request.engine import Chunk, Mailbox, TextChunk
from gateway.request.exchange import Exchange

_LONGEST_TEXT = 1_000  # characters; what is longer is delivered by portions


class PassThrough:
    """Of one attempt of a stream that has begun."""

    def __init__(
        self,
        choices: Sequence[ChoiceOutput],
        exchange: Exchange,
        writer: StreamWriter,
        coverage: Coverage,
        idle: IdleTimer,
        note_delivered: Callable[[], None],
    ) -> None:
        """`note_delivered` is called before each write."""
        self._choices = choices
        self._deltas = [Delta(each.index, "") for each in choices]
        self._exchange = exchange
        self._writer = writer
        self._coverage = coverage
        self._idle = idle
        self._note_delivered = note_delivered

    def attach(self, generation: Mailbox) -> None:
        """Passes what `generation` gets from now on, if its text can pass at all."""
        if all(choice.unread for choice in self._choices):
            generation.pass_text = self.take
        elif len(self._choices) == 1 and self._choices[0].only_guarded:
            generation.pass_chunks = self.take_guarded

    def take_guarded(self, chunks: Sequence[Chunk]) -> int:
        """Feeds the only choice and writes what its guard releases. Returns how many characters it
        needs next; 0, and nothing done, where the delivery must do it."""
        (choice,) = self._choices
        texts = [chunk for chunk in chunks if isinstance(chunk, TextChunk) and chunk.plain]
        length = sum([len(chunk.text) for chunk in texts])
        if len(texts) < len(chunks) or length > min(choice.spare, _LONGEST_TEXT) or choice.over:
            return 0
        if any(chunk.choice for chunk in texts) or not self._exchange.writable:
            return 0
        if not self._coverage.add(sum([chunk.count for chunk in texts])):
            return 0
        choice.feed_run(texts)
        if delta := choice.take():
            self._note_delivered()
            self._exchange.write_now(self._writer.delta(delta))
            choice.sent()
            self._idle.restart()
        return choice.needed

    def take(self, number: int, text: str, tokens: int) -> bool:
        """Writes the choice's text. False, and nothing done, where the delivery must do it."""
        if len(text) > _LONGEST_TEXT or not 0 <= number < len(self._choices):
            return False
        choice, delta = self._choices[number], self._deltas[number]
        if choice.over or not self._exchange.writable or not self._coverage.add(tokens):
            return False
        self._note_delivered()
        choice.pass_text(text)
        delta.text = text
        self._exchange.write_now(self._writer.delta(delta))
        self._idle.restart()
        return True
