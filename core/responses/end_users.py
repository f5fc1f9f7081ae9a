"""The end user whom a request names, and the key by which rows of theirs are found.

OpenAI's `user` and `safety_identifier` and Anthropic's `metadata.user_id` are one concept. A stored
row has the end user's key and not the name: an HMAC under a key of the tenant, which begins with the
generation of the operator's token. NULL is a row of before keys were written; "" names nobody.
"""

from collections.abc import Mapping
from typing import Any

from core.sealing import Sealer

MESSAGES = "/v1/messages"  # where Anthropic's format is spoken
NOBODY = ""


def end_user_of(route: str, body: Mapping[str, Any]) -> str | None:
    """The name in a request's decoded body, as every surface reads it. `user` comes before
    `safety_identifier`."""
    if route == MESSAGES:
        metadata = body.get("metadata")
        name = metadata.get("user_id") if isinstance(metadata, Mapping) else None
    else:
        name = body.get("user") or body.get("safety_identifier")
    return name if isinstance(name, str) and name else None


def key_of(sealer: Sealer, tenant_id: str, end_user: str | None) -> str:
    return sealer.name_key(tenant_id, end_user) if end_user else NOBODY
