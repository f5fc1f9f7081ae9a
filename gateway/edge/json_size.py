"""Bounds the number of values in a large JSON body before it is decoded.

A decoder holds the interpreter's lock while it builds its objects: a few megabytes of empty arrays are
millions of objects, and pause everything else for seconds. Text costs nothing.
"""

import re

from core.errors import BadRequest

MAX_CONTAINERS = 100_000  # objects and arrays
MAX_VALUES = 500_000
_CHECKED_FROM = 65_536  # bytes; smaller bodies hold fewer values
_COMMA = ord(",")
# A whole string, or one character of the structure.
_TOKEN = re.compile(rb'"(?:[^"\\]++|\\.)*+"|[{\[,]', re.DOTALL)


def check_json_size(raw: bytes) -> None:
    """Blocking for large bodies. Raises BadRequest."""
    if len(raw) < _CHECKED_FROM or not _exceeds(_structure(raw)):
        return
    # Prose and code have commas and brackets too: count outside of strings.
    if _exceeds(_structure_outside_strings(raw)):
        raise BadRequest(
            f"The body has more than {MAX_VALUES} values or {MAX_CONTAINERS} objects and arrays.",
            next_step="Send fewer, or split the request.",
            code="invalid_json",
        )


def _exceeds(counts: tuple[int, int]) -> bool:
    return counts[0] > MAX_CONTAINERS or counts[1] > MAX_VALUES


def _structure(raw: bytes) -> tuple[int, int]:
    """(objects and arrays, separators)"""
    return raw.count(b"{") + raw.count(b"["), raw.count(b",")


def _structure_outside_strings(raw: bytes) -> tuple[int, int]:
    """As far as the bounds. A loop in Python, so that other threads run meanwhile."""
    containers = separators = 0
    for token in _TOKEN.finditer(raw):
        first = raw[token.start()]
        containers += first in b"{["
        separators += first == _COMMA
        if _exceeds((containers, separators)):
            break
    return containers, separators
