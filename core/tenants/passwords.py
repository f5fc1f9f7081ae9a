"""Passwords of members: argon2id. Hashes with outdated parameters are renewed at sign-in."""

from functools import lru_cache

from argon2 import PasswordHasher
from argon2.exceptions import InvalidHashError, VerificationError

from core.errors import BadRequest

MIN_LENGTH, MAX_LENGTH = 10, 1024


@lru_cache(1)
def _hasher() -> PasswordHasher:
    return PasswordHasher()


@lru_cache(1)
def _dummy_hash() -> str:
    return _hasher().hash("nobody has this password")


def hash_password(password: str) -> str:
    if not MIN_LENGTH <= len(password) <= MAX_LENGTH:
        raise BadRequest(
            f"The password has {len(password)} characters.",
            next_step=f"Use {MIN_LENGTH} to {MAX_LENGTH} characters.",
            param="password",
        )
    return _hasher().hash(password)


def matches(stored: str | None, password: str) -> bool:
    """Takes the same time for an unknown member (`stored` is None) as for a known one."""
    try:
        return (
            _hasher().verify(stored or _dummy_hash(), password[:MAX_LENGTH]) and stored is not None
        )
    except (VerificationError, InvalidHashError):
        return False


def needs_rehash(stored: str) -> bool:
    return _hasher().check_needs_rehash(stored)
