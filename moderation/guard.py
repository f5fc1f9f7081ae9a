"""Guards answers: text is released only when it is judged and cannot be the start of a match.

Verdicts are made only at checkpoints, whose offsets depend only on the text (a space at least a
stride after the last one). So the verdict is that of the whole text, however it is cut into
chunks. Text may be released between checkpoints, which never changes the verdict.
"""

from collections.abc import Callable, Hashable, Sequence

from msgspec import Struct
from msgspec.structs import replace

from moderation.channel import Channel, Release
from moderation.normalise import fold
from moderation.policy import ASYNC, OFF, Policy
from moderation.rules import find_spans, redact
from moderation.screener import Findings, Screener
from moderation.verdict import ANNOTATE, BLOCK, Verdict

CONTENT = "content"
MOST_BEFORE = 1_024  # characters of the continued text that rules read
_MOST_REMEMBERED = 4_096  # texts whose result `clean` keeps


class Holds(Struct, frozen=True):
    """How often text began to wait, for the classifier's verdict or for the end of what a rule may
    match, and the most characters that waited."""

    by_score: int
    by_rule: int
    longest: int


class StreamGuard:
    """Guards the answer of one request. A choice may have several channels (content, tool
    arguments and so on). Not thread-safe.
    """

    def __init__(
        self, policy: Policy, screener: Screener, before: Callable[[int], str] | None = None
    ) -> None:
        """`before` gives the text that the content of a choice continues, such as a prefill."""
        self._policy = policy
        self._before = before
        self._screener = screener
        self._channels: dict[tuple[int, Hashable], Channel] = {}
        self._blocked: set[int] = set()
        self._findings = Findings()
        self._told: Verdict | None = None  # of the findings so far
        self._cleaned: dict[str, str | None] = {}

    def feed(
        self, choice: int, text: str, channel: Hashable = CONTENT, *, last: bool = False
    ) -> Release:
        """Add a delta, exactly as the engine produced it, and return the text to release now. `last`:
        `finish` follows at once, so nothing is released before the verdict that it makes."""
        if choice in self._blocked:
            return Release("", blocked=True)
        if self._policy.mode is OFF or not text:
            return Release(text)
        found = self._channels.get((choice, channel)) or self._channel(choice, channel)
        return self._answer(choice, found.feed(text, last=last))

    def finish(self, choice: int, channel: Hashable = CONTENT) -> Release:
        """End one channel of a choice: judge the held text and return the rest."""
        if choice in self._blocked:
            return Release("", blocked=True)
        found = self._channels.get((choice, channel))
        return Release("") if found is None else self._answer(choice, found.end())

    def held(self, choice: int, channel: Hashable = CONTENT) -> int:
        """Return how many characters of a channel wait for a verdict."""
        found = self._channels.get((choice, channel))
        return 0 if found is None else found.held

    def needed(self, choice: int, channel: Hashable = CONTENT) -> int:
        """Return how many characters must follow before any more of a channel can be released or
        blocked, at least 1: fewer may be fed later, together with them."""
        found = self._channels.get((choice, channel))
        return 1 if found is None else found.needed

    def spare(self, choice: int, channel: Hashable = CONTENT) -> int:
        """Return how many characters can be fed to a channel before a verdict that may block."""
        found = self._channels.get((choice, channel))
        return 0 if found is None else found.spare

    def cuts(self, choice: int, channel: Hashable = CONTENT) -> Sequence[tuple[int, int]]:
        """Return the text that was removed up to the last release: start and end, in order."""
        found = self._channels.get((choice, channel))
        return () if found is None else found.cuts

    def clean(self, text: str, *, record: bool = False) -> str | None:
        """Apply the rules to a text on its own, such as a tool call's argument: the text with its
        redactions, or None where it is blocked. `record` adds what was found to the verdict."""
        if self._policy.shadow or self._policy.mode in (OFF, ASYNC):
            return text
        if text in self._cleaned:
            return self._cleaned[text]
        spans, view = find_spans(self._policy.output, fold(text))
        if record:
            self._findings.add_spans(spans, view)
            self._told = None
        blocked = any(span.action is BLOCK for span in spans)
        cleaned = None if blocked else redact(text, spans)
        if not record and len(self._cleaned) < _MOST_REMEMBERED:
            self._cleaned[text] = cleaned
        return cleaned

    def channels(self, choice: int) -> list[Hashable]:
        """Return the channels that a choice has used, in order of first use."""
        return [name for owner, name in self._channels if owner == choice]

    def holds(self) -> Holds:
        """Return what waited so far, over all choices and channels."""
        channels = self._channels.values()
        return Holds(
            sum([each.holds_by_score for each in channels]),
            sum([each.holds_by_rule for each in channels]),
            max([each.longest_held for each in channels], default=0),
        )

    def verdict(self) -> Verdict:
        """Return the verdict so far over all choices and channels."""
        if self._told is None:
            told = self._findings.verdict(self._policy)
            if self._policy.mode is ASYNC:
                # Released text cannot be recalled: in this mode the strictest action is annotate.
                told = replace(told, action=min(told.action, ANNOTATE))
            self._told = told
        return self._told

    def _channel(self, choice: int, name: Hashable) -> Channel:
        key = (choice, name)
        if key not in self._channels:
            index = len(self._channels)
            self._channels[key] = Channel(
                self._policy,
                self._screener,
                self._findings,
                index,
                self._text_before(choice)[-MOST_BEFORE:] if name == CONTENT else "",
            )
        return self._channels[key]

    def _text_before(self, choice: int) -> str:
        return "" if self._before is None else self._before(choice)

    def _answer(self, choice: int, release: Release) -> Release:
        self._told = None
        if release.blocked:
            self._blocked.add(choice)
        return release
