"""Errors in OpenAI's shape."""

from typing import Any

from core.errors import InsufficientQuota, RateLimited, TollhouseError
from gateway.exchange import Headers


def error_object(error: TollhouseError) -> dict[str, Any]:
    return {
        "error": {
            "message": str(error),
            "type": error.type,
            "param": error.param,
            "code": error.code,
        }
    }


def retry_headers(error: TollhouseError) -> Headers:
    """Whether and when the same request may come again."""
    if isinstance(error, InsufficientQuota) or error.code == "deadline_exceeded":
        return [(b"x-should-retry", b"false")]
    if error.retry_after_s is None:
        return []
    millis = max(1, round(error.retry_after_s * 1000 + 0.5))
    headers = [
        (b"retry-after", str(-(-millis // 1000)).encode()),
        (b"retry-after-ms", str(millis).encode()),
    ]
    if isinstance(error, RateLimited):
        headers.append((b"x-should-retry", b"true"))
    return headers
