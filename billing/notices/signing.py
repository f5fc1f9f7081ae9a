"""Webhook signatures by the Standard Webhooks specification (standardwebhooks.com).

`webhook-signature` is `v1,` followed by the base64 of an HMAC-SHA256 over `id.timestamp.body`.
"""

import base64
import hmac
import secrets
from datetime import datetime

from core.sealed_columns import check_opened

_PREFIX = "whsec_"
_BYTES = 24


def new_secret() -> str:
    return _PREFIX + base64.b64encode(secrets.token_bytes(_BYTES)).decode()


def headers(secret: str, message_id: str, at: datetime, body: bytes) -> dict[str, str]:
    """Signature headers. `at` is the time of sending, which receivers check against replays.
    Unavailable for a secret that could not be decrypted."""
    moment = str(int(at.timestamp()))
    check_opened(secret, "The secret that signs the message")
    key = base64.b64decode(secret.removeprefix(_PREFIX))
    digest = hmac.digest(key, f"{message_id}.{moment}.".encode() + body, "sha256")
    return {
        "webhook-id": message_id,
        "webhook-timestamp": moment,
        "webhook-signature": f"v1,{base64.b64encode(digest).decode()}",
    }
