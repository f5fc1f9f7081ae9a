"""Messages of a role and a text alone, which those of most chats are.

What reads them finds their roles and texts made already, and needs no step of Python for each.
"""

from collections.abc import Sequence
from operator import itemgetter
from typing import Any

_FIELDS = {("role", "content")}  # in the order in which they are sent on
ROLES = frozenset(("system", "developer", "user", "assistant", "tool"))
_fields_of: Any = tuple
_role_of, _text_of = itemgetter("role"), itemgetter("content")


class PlainMessages(list[dict[str, Any]]):
    """Never changed: what changes a message makes another list."""

    __slots__ = ("roles", "texts")

    roles: tuple[str, ...]
    texts: tuple[str, ...]


def plain_messages(messages: Sequence[dict[str, Any]]) -> PlainMessages | None:
    """The same messages; None where one has another field, or a content that is not a text."""
    if set(map(_fields_of, messages)) != _FIELDS:
        return None
    roles, texts = tuple(map(_role_of, messages)), tuple(map(_text_of, messages))
    if not ROLES.issuperset(roles) or set(map(type, texts)) != {str}:
        return None
    plain = PlainMessages(messages)
    plain.roles, plain.texts = roles, texts
    return plain
