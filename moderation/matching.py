"""Hits of span rules: deny lists, entity recognisers and tenant patterns.

Each rule has `find(text, start)`, its hits as if the text were complete, and `hold(text, start)`,
the first index where a hit may still begin or grow. The streaming guard holds all text from there
on.
"""

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
