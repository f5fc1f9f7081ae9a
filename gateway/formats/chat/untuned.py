"""Which of a body's many optional fields a chat sets: most set few, and no other is looked for then."""

from collections.abc import Sequence
from operator import attrgetter
from typing import TYPE_CHECKING

from msgspec.structs import astuple

from gateway.formats.sampling import CHECKED_ALONE

if TYPE_CHECKING:
    from gateway.formats.chat.request import ChatBody

# What all chats may set without a parameter of sampling or of an engine.
_USUAL = (
    "model",
    "messages",
    "max_tokens",
    "max_completion_tokens",
    "user",
    "stream",
    "stream_options",
)
_usual = attrgetter(*_USUAL)
_SIMPLE = CHECKED_ALONE.union(_USUAL)


def is_untuned(body: "ChatBody") -> bool:
    """Whether it sets no parameter: as many fields are set as of the usual ones."""
    fields, usual = astuple(body), _usual(body)
    return len(fields) - fields.count(None) == len(usual) - usual.count(None)


def is_simple(given: Sequence[str]) -> bool:
    """Of the fields that are set, by name: whether all are usual ones, and parameters of sampling, each
    of which is checked and converted by itself."""
    return _SIMPLE.issuperset(given)
