"""The interface of span rules: hits in a view, and the index from which hits are not final.

A hit is final once no continuation of the text can change it; `hold` returns the first index from
which that is not so. The streaming guard holds all text from there on.
"""

from typing import Protocol

from msgspec import Struct

from moderation.verdict import Action

# Most hits of one rule in one text. After that the rest counts as one hit, so that a text full of
# hits costs no more than any other.
MAX_HITS = 2_000


class Hit(Struct, frozen=True):
    """View characters `start` to `end` match `rule`; the original must have at least `least`
    characters."""

    start: int
    end: int
    category: str
    rule: str
    action: Action
    least: int = 0


class Matcher(Protocol):
    """A deny list, a set of recognisers or a tenant's pattern."""

    @property
    def strictest_action(self) -> Action:
        """The strictest action of this matcher's hits."""
        ...

    def find(self, text: str, start: int = 0) -> list[Hit]:
        """Return the hits that begin at `start` or later, as if the text were complete."""
        ...

    def hold(self, text: str, start: int = 0) -> int:
        """Return the first index at or after `start` where a hit may still begin or grow."""
        ...
