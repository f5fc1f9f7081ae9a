"""What the room answers: an action, the scores behind it, and where in the text it was found."""

from collections.abc import Mapping
from enum import IntEnum

from msgspec import Struct, field


class Action(IntEnum):
    """What to do with a text; the larger is the stricter, so the strictest is `max`."""

    ALLOW = 0
    ANNOTATE = 1
    REDACT = 2
    BLOCK = 3

    @property
    def word(self) -> str:
        return _WORDS[self]

    @classmethod
    def parse(cls, word: str) -> "Action":
        return cls[word.upper()]


_WORDS = tuple(action.name.lower() for action in Action)


class ScreenedText(Struct, frozen=True):
    """One text of a request with the role that spoke it (system, user, assistant, tool)."""

    role: str
    text: str


class Span(Struct, frozen=True):
    """Characters `start` to `end` of the original text `index` that `rule` found."""

    index: int
    start: int
    end: int
    category: str
    rule: str
    action: Action


class Verdict(Struct, frozen=True):
    """`action` is what to do; `would` is what the policy says when it is only in shadow.

    `texts` are the texts with redactions applied, in the order they came in. `unscanned` names
    the stages that failed and were let pass. `view` is the view whose score or match decided.
    """

    action: Action
    would: Action
    policy_version: str
    scores: Mapping[str, float] = field(default_factory=dict)
    flagged: tuple[str, ...] = ()
    view: str = "plain"
    spans: tuple[Span, ...] = ()
    texts: tuple[str, ...] = ()
    unscanned: tuple[str, ...] = ()
    shadow: bool = False

    @property
    def blocked(self) -> bool:
        return self.action is Action.BLOCK

    @property
    def headline(self) -> str:
        """Return the category that weighs most, or an empty string when none was flagged."""
        return max(self.flagged, key=lambda name: self.scores.get(name, 1.0), default="")
