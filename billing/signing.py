"""Signatures of webhooks, as standardwebhooks.com says, so that a receiver checks them with the library
that it has: `webhook-signature` is `v1,` and the base64 of an HMAC-SHA256 over `id.timestamp.body`.
"""

import base64
import hmac
import secrets
from datetime import datetime

_PREFIX = "whsec_"
_BYTES = 24


def new_secret() -> str:
    return _PREFIX + base64.b64encode(secrets.token_bytes(_BYTES)).decode()


def headers(secret: str, message_id: str, at: datetime, body: bytes) -> dict[str, str]:
    """What a receiver checks the body by; `at` is when it is sent, against replays."""
    moment = str(int(at.timestamp()))
    key = base64.b64decode(secret.removeprefix(_PREFIX))
    digest = hmac.digest(key, f"{message_id}.{moment}.".encode() + body, "sha256")
    return {
        "webhook-id": message_id,
        "webhook-timestamp": moment,
        "webhook-signature": f"v1,{base64.b64encode(digest).decode()}",
    }
