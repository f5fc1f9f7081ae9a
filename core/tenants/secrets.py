"""The format of an API key: `th_`, 32 random characters and a checksum of 6.

A typo fails the checksum and is rejected without a query. Only the SHA-256 is stored: the key has 190
random bits, so a slow hash would not add security.
"""

import hashlib
import secrets
import zlib

PREFIX = "th_"
_ALPHABET = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_BODY = 32
_CHECK = 6
LENGTH = len(PREFIX) + _BODY + _CHECK


def generate() -> str:
    body = "".join(secrets.choice(_ALPHABET) for _ in range(_BODY))
    return PREFIX + body + _checksum(body)


def well_formed(secret: str) -> bool:
    if len(secret) != LENGTH or not secret.startswith(PREFIX) or not secret.isascii():
        return False
    body = secret[len(PREFIX) : -_CHECK]
    return secrets.compare_digest(_checksum(body), secret[-_CHECK:])


def digest(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


def _checksum(body: str) -> str:
    number = zlib.crc32(body.encode())
    digits = []
    for _ in range(_CHECK):
        number, index = divmod(number, len(_ALPHABET))
        digits.append(_ALPHABET[index])
    return "".join(reversed(digits))
