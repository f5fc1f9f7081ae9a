"""Whether a chat sets none of a body's many optional fields, as most: none is looked for then."""

from operator import attrgetter
from typing import TYPE_CHECKING

from msgspec.structs import astuple

if TYPE_CHECKING:
    from gateway.inference.chat.request import ChatBody

# What they set; all other fields of a body are None.
_USUAL = ("model", "messages", "max_tokens", "max_completion_tokens", "user", "stream")
_usual = attrgetter(*_USUAL, "stream_options")


def is_untuned(body: "ChatBody") -> bool:
    fields, usual = astuple(body), _usual(body)
    return len(fields) - fields.count(None) == len(usual) - usual.count(None)
