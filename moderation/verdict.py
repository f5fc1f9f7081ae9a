"""The result of moderation: an action, the scores behind it, and the spans in the text."""

from collections.abc import Mapping
from enum import IntEnum

from msgspec import Struct, field


class Action(IntEnum):
    """What to do with a text. A larger value is stricter, so `max` gives the strictest."""

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


# Names of this module: a member's look-up in its class costs ten times as much, and a request asks often.
ALLOW, ANNOTATE, REDACT, BLOCK = Action.ALLOW, Action.ANNOTATE, Action.REDACT, Action.BLOCK
_WORDS = tuple(action.name.lower() for action in Action)


class ScreenedText(Struct, frozen=True):
    """One text of a request with its role (system, user, assistant, tool, tools)."""

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
    """`action` is what to do; `would` is the policy's action, also when it is in shadow.

    `texts` are the texts with redactions applied, in the given order. `unscanned` names the stages
    that failed open. `view` is the view whose score or match decided.
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
        return self.action is BLOCK

    @property
    def headline(self) -> str:
        """Return the most important category, or an empty string when none is flagged."""
        return max(self.flagged, key=lambda name: self.scores.get(name, 1.0), default="")
