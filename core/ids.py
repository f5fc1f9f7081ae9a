"""Prefixed ids that sort by time: `req_01hx…`. 48 bits of milliseconds, 80 random bits, base 32.

The layout is ULID's; the alphabet is Crockford's in lower case, so ids are safe in URLs and paths.
"""

import os
import time

_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"
_LENGTH = 26

TENANT = "org"
PROJECT = "proj"
KEY = "key"
MEMBER = "mem"
REQUEST = "req"
PRICE = "price"
INVOICE = "inv"
TRANSACTION = "txn"
ADAPTER = "lora"


def new_id(prefix: str, millis: int | None = None) -> str:
    moment = time.time_ns() // 1_000_000 if millis is None else millis
    number = (moment << 80) | int.from_bytes(os.urandom(10), "big")
    digits = [_ALPHABET[(number >> shift) & 31] for shift in range(5 * (_LENGTH - 1), -1, -5)]
    return f"{prefix}_{''.join(digits)}"


def prefix_of(identifier: str) -> str:
    return identifier.rpartition("_")[0]
