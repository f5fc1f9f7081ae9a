"""Reads the files that commands are given."""

import sys
from pathlib import Path

from core.errors import BadRequest


def text_of(name: str) -> str:
    """The text of a file; `-` is stdin."""
    try:
        return sys.stdin.read() if name == "-" else Path(name).read_text()
    except (OSError, ValueError) as error:
        raise BadRequest(f"{name} cannot be read: {error}.") from None
