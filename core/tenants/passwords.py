"""Passwords of members: argon2id. Hashes with outdated parameters are renewed at sign-in.

A hash takes long on purpose, so none is computed inside a write transaction: RuntimeError there.
"""

import base64
import hmac
from collections.abc import Sequence
from functools import lru_cache
from typing import NewType

from argon2 import PasswordHasher, extract_parameters
from argon2.exceptions import InvalidHashError
from argon2.low_level import hash_secret

from core.database import check_no_transaction
from core.errors import BadRequest

PasswordHash = NewType("PasswordHash", str)
MIN_LENGTH, MAX_LENGTH = 10, 1024


@lru_cache(1)
def _hasher() -> PasswordHasher:
    return PasswordHasher()


@lru_cache(1)
def _dummy_hash() -> str:
    return _hasher().hash("nobody has this password")


def hash_password(password: str, sibling: str | None = None) -> PasswordHash:
    """`sibling` is the hash of another membership of the same address, whose salt is used: then one
    computation checks a password against all of them, however many there are."""
    check(password)
    check_no_transaction("a password is hashed")
    salt = None if sibling is None else _salt_of(sibling)
    return PasswordHash(_hasher().hash(password, salt=salt))


def check(password: str) -> None:
    if not MIN_LENGTH <= len(password) <= MAX_LENGTH:
        raise BadRequest(
            f"The password has {len(password)} characters.",
            next_step=f"Use {MIN_LENGTH} to {MAX_LENGTH} characters.",
            param="password",
        )


def matching(stored: Sequence[str | None], password: str) -> list[bool]:
    """Whether the password is that of each hash. Hashes with one salt take one computation, and so does
    an empty list: an unknown address takes as long as that of a member."""
    check_no_transaction("a password is checked")
    hashes = [each or "" for each in stored]
    computed = {
        salted: _compute(salted, password)
        for salted in {_salted(each) for each in hashes if each} or {_salted(_dummy_hash())}
    }
    return [
        bool(each) and hmac.compare_digest(computed[_salted(each)].encode(), each.encode())
        for each in hashes
    ]


def _salted(stored: str) -> str:
    """All of a hash but its digest: parameters and salt."""
    return stored.rpartition("$")[0]


def _salt_of(stored: str) -> bytes:
    salt = _salted(stored).rpartition("$")[2]
    return base64.b64decode(salt + "=" * (-len(salt) % 4))


def _compute(salted: str, password: str) -> str:
    """The hash of the password with these parameters and this salt; empty if they are none."""
    example = f"{salted}${_dummy_hash().rpartition('$')[2]}"
    try:
        used = extract_parameters(example)
    except InvalidHashError:
        return ""
    return hash_secret(
        password[:MAX_LENGTH].encode(),
        _salt_of(example),
        time_cost=used.time_cost,
        memory_cost=used.memory_cost,
        parallelism=used.parallelism,
        hash_len=used.hash_len,
        type=used.type,
        version=used.version,
    ).decode()


def needs_rehash(stored: str) -> bool:
    return _hasher().check_needs_rehash(stored)
