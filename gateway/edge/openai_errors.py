"""Errors in OpenAI's format."""

from typing import Any

from core.errors import TollhouseError


def error_object(error: TollhouseError) -> dict[str, Any]:
    return {
        "error": {
            "message": str(error),
            "type": error.type,
            "param": error.param,
            "code": error.code,
        }
    }
