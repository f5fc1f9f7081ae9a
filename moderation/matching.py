"""What every span rule offers: hits in a view, and from where a hit may still be coming.

A hit is final once no longer text can change it; `hold` names the first character from which
that is not yet so. The streaming guard keeps everything from there back.
"""

from typing import Protocol

from msgspec import Struct

from moderation.verdict import Action

# Of one rule in one text. From the next one on the whole rest counts as one hit: a text made of
# nothing but hits must not cost more than any other.
MOST_HITS = 2_000


class Hit(Struct, frozen=True):
    """View characters `start` to `end` matched `rule`; the original must span `least`."""

    start: int
    end: int
    category: str
    rule: str
    action: Action
    least: int = 0


class Matcher(Protocol):
    """A deny list, a set of recognisers or a tenant's pattern."""

    @property
    def acts(self) -> Action:
        """The strictest action that a hit of this matcher can have."""
        ...

    def find(self, text: str, start: int = 0) -> list[Hit]:
        """Return the hits that begin at `start` or later, as if the text ended here."""
        ...

    def hold(self, text: str, start: int = 0) -> int:
        """Return the first index at or after `start` where a hit may still begin or grow."""
        ...
