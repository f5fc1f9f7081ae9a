"""Prefixed ids that sort by time: `req_01hx…`. 48 bits of milliseconds, 80 random bits, base 32.

The layout is ULID's with Crockford's alphabet in lower case, so ids are safe in URLs and paths.
"""

import hashlib
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from functools import lru_cache

_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"
_PAIRS = [first + second for first in _ALPHABET for second in _ALPHABET]
_RANDOM_CHARS = 16  # random characters, after 10 of the timestamp
_CHAR_OF_BYTE = bytes(ord(_ALPHABET[byte & 31]) for byte in range(256))

TENANT = "org"
PROJECT = "proj"
KEY = "key"
MEMBER = "mem"
REQUEST = "req"
PRICE = "price"
INVOICE = "inv"
TRANSACTION = "txn"
ADAPTER = "lora"


def _system_millis() -> int:
    return time.time_ns() // 1_000_000


# Sources of time and randomness. A simulation replaces them to be reproducible.
_millis: Callable[[], int] = _system_millis
_random_bytes: Callable[[int], bytes] = os.urandom


@contextmanager
def use_sources(millis: Callable[[], int], entropy: Callable[[int], bytes]) -> Iterator[None]:
    """Within the context, draw this process's ids from the given time and randomness."""
    global _millis, _random_bytes
    previous = _millis, _random_bytes
    _millis, _random_bytes = millis, entropy
    try:
        yield
    finally:
        _millis, _random_bytes = previous


def new_id(prefix: str, millis: int | None = None) -> str:
    moment = _millis() if millis is None else millis
    random_part = _random_bytes(_RANDOM_CHARS).translate(_CHAR_OF_BYTE).decode("ascii")
    return f"{prefix}_{_encode_millis(moment)}{random_part}"


def derived_id(prefix: str, *cause: str, at: datetime | None = None) -> str:
    """The id of what `cause` brings about: the same one whenever it is made, also by a database that
    was restored from a backup and does it again. Without a time it sorts before all others."""
    digest = hashlib.sha256("\0".join((prefix, *cause)).encode()).digest()
    random_part = digest[:_RANDOM_CHARS].translate(_CHAR_OF_BYTE).decode("ascii")
    return f"{prefix}_{_encode_millis(int(at.timestamp() * 1000) if at else 0)}{random_part}"


def moment_of(name: str) -> int:
    """Milliseconds since 1970 at which an id was made. Raises ValueError if it is not an id."""
    digits = name.partition("_")[2][:10]
    if len(digits) != 10 or any(digit not in _ALPHABET for digit in digits):
        raise ValueError(f"{name!r} is not an id with a time")
    millis = 0
    for digit in digits:
        millis = millis * 32 + _ALPHABET.index(digit)
    return millis


def floor_id(prefix: str, at: datetime) -> str:
    """The lowest id of a timestamp; every later id sorts after it."""
    return f"{prefix}_{_encode_millis(int(at.timestamp() * 1000))}{_ALPHABET[0] * _RANDOM_CHARS}"


def _encode_millis(moment: int) -> str:
    return _encode_seconds(moment >> 10) + _PAIRS[moment & 1023]


@lru_cache(maxsize=64)
def _encode_seconds(moment: int) -> str:
    """Of units of 1,024 milliseconds, in which a busy process makes many ids."""
    return "".join([_PAIRS[(moment >> shift) & 1023] for shift in (30, 20, 10, 0)])
