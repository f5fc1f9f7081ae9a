"""Pieces of one choice's text that arrived together, and become one chunk of a request's mailbox."""

from gateway.engines.answer_shapes import PlainEvent
from gateway.engines.upstream_usage import UsageCounter
from gateway.request.engine import Mailbox

_LONGEST = 256  # characters of a chunk; about what held money is extended by


class JoinedTexts:
    closed = False  # the answer has ended: what is left of it is not taken
    _choice = 0
    _size = 0  # characters
    _counted = 0  # pieces that the counter has

    def __init__(self, mailbox: Mailbox, usage: UsageCounter, *, joins: bool) -> None:
        """Without `joins` each piece is a chunk."""
        self._mailbox = mailbox
        self._usage = usage
        self._joins = joins
        self._pieces: list[str] = []

    def take(self, event: PlainEvent) -> bool:
        """False for an event that is anything else than a piece of text."""
        text = event.text
        if not text:
            return False
        self.take_text(event.choices[0].index or 0, text)
        if event.usage:  # which is of the text so far
            self._count()
            self._usage.report(event.usage, final=False)
        return True

    def take_text(self, index: int, text: str) -> None:
        """A piece of the text of the choice with this index."""
        if not (self._joins and index == self._choice and self._size < _LONGEST):
            self.put()
            self._choice = index
        self._pieces.append(text)
        self._size += len(text)

    def take_first(self, events: list[PlainEvent]) -> int:
        """How many events at the beginning `take` took."""
        for number, event in enumerate(events):
            choices = event.choices
            if len(choices) == 1 and not event.error:
                choice = choices[0]
                delta = choice.delta
                text = delta.content
                if (
                    text
                    and self._joins
                    and self._size < _LONGEST
                    and (choice.index or 0) == self._choice
                    and choice.finish_reason is None
                    and choice.logprobs is None
                    and not (delta.tool_calls or delta.reasoning_content or delta.reasoning)
                    and not delta.refusal
                    and not event.usage
                ):  # as `take`, without its steps: most events are so
                    self._pieces.append(text)
                    self._size += len(text)
                    continue
            if self.closed or not self.take(event):
                return number
        return len(events)

    def put_if_needed(self) -> None:
        if self._size >= self._mailbox.needed:
            self.put()

    def put(self) -> None:
        if not self._pieces:
            return
        self._count()
        text, self._pieces, self._size, self._counted = "".join(self._pieces), [], 0, 0
        if (beyond := self._usage.beyond_cap()) > 0:
            beyond = min(beyond, len(text))
            self._usage.drop(beyond)
            text = text[: len(text) - beyond]
        if text:
            self._mailbox.put_text(self._choice, text, self._usage.grown())

    def _count(self) -> None:
        pieces = self._pieces[self._counted :]
        self._usage.add(self._choice, "text", "".join(pieces), pieces=len(pieces))
        self._counted = len(self._pieces)
