"""The end user whom a request names, and the key by which rows of theirs are found.

OpenAI's `user` and `safety_identifier` and Anthropic's `metadata.user_id` are one concept. A stored
row has the end user's key and not the name: an HMAC under a key of the tenant, which begins with the
generation of the operator's token. NULL is a row of before keys were written; "" names nobody. A request
with both `user` and `safety_identifier` has two names, and its rows are found by either.
"""

from collections.abc import Mapping
from typing import Any

from sqlalchemy import ColumnElement, or_

from core.sealing import Sealer

MESSAGES = "/v1/messages"  # where Anthropic's format is spoken
NOBODY = ""


def end_users_of(route: str, body: Mapping[str, Any]) -> tuple[str, ...]:
    """The names in a request's decoded body, as every surface reads them. The first, by which usage
    is counted, is `user` where there is one."""
    if route == MESSAGES:
        metadata = body.get("metadata")
        names = [metadata.get("user_id") if isinstance(metadata, Mapping) else None]
    else:
        names = [body.get("user"), body.get("safety_identifier")]
    return tuple(dict.fromkeys(name for name in names if isinstance(name, str) and name))


def key_of(sealer: Sealer, tenant_id: str, end_user: str | None) -> str:
    return sealer.name_key(tenant_id, end_user) if end_user else NOBODY


def keys_of(sealer: Sealer, tenant_id: str, end_users: tuple[str, ...]) -> dict[str, str | None]:
    """The columns of a row that a request with these names leaves."""
    first, second, *_ = *end_users, None, None
    return {
        "end_user_key": key_of(sealer, tenant_id, first),
        "safety_key": key_of(sealer, tenant_id, second) if second else None,
    }


def is_of(table: Any, key: str) -> ColumnElement[bool]:
    """Whether a row of the table, which has both columns, is the end user's."""
    return or_(table.end_user_key == key, table.safety_key == key)
