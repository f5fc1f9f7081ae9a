"""Passwords of members: argon2id. Hashes with outdated parameters are renewed at sign-in."""

from functools import lru_cache

from argon2 import PasswordHasher
from argon2.exceptions import InvalidHashError, VerificationError

from core.errors import BadRequest

LEAST, MOST = 10, 1024


@lru_cache(1)
def _hasher() -> PasswordHasher:
    return PasswordHasher()


@lru_cache(1)
def _nobodys() -> str:
    return _hasher().hash("nobody has this password")


def hashed(password: str) -> str:
    if not LEAST <= len(password) <= MOST:
        raise BadRequest(
            f"The password has {len(password)} characters.",
            next_step=f"Use {LEAST} to {MOST} characters.",
            param="password",
        )
    return _hasher().hash(password)


def matches(stored: str | None, password: str) -> bool:
    """Takes the same time for an unknown member (`stored` is None) as for a known one."""
    try:
        return _hasher().verify(stored or _nobodys(), password[:MOST]) and stored is not None
    except (VerificationError, InvalidHashError):
        return False


def outdated(stored: str) -> bool:
    return _hasher().check_needs_rehash(stored)
