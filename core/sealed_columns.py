"""Columns whose text is sealed at rest: what must be sent again, so that a hash is not enough.

The key is derived from the operator's token, and is the process's (`seal_columns`): SQLAlchemy shares
what it compiles between the databases of a process, so that a column does not know whose it is. Rows of
before, and those of a process without a key, are as they were given; `is_sealed` finds what could not be
opened.
"""

import base64
import os
from typing import Any

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from sqlalchemy import Dialect, Text, TypeDecorator

from core.errors import Unavailable

SEALED = "sealed:1:"  # what a sealed text begins with
_NONCE_BYTES = 12
_INFO = b"tollhouse sealed columns"


class ColumnKeys:
    """Seals with the first token's key, and opens with that of any."""

    def __init__(self, *tokens: str) -> None:
        self._ciphers = [
            AESGCM(HKDF(SHA256(), 32, None, _INFO).derive(token.encode())) for token in tokens
        ]

    def seal(self, column: str, text: str) -> str:
        """`column` is bound to the text, so that it cannot take another column's place."""
        nonce = os.urandom(_NONCE_BYTES)
        sealed = self._ciphers[0].encrypt(nonce, text.encode(), column.encode())
        return SEALED + base64.b64encode(nonce + sealed).decode()

    def open(self, column: str, stored: str) -> str:
        """A text that no key opens, or that is not sealed, is returned as it is."""
        if not is_sealed(stored):
            return stored
        texts = (_decrypt(cipher, column, stored) for cipher in self._ciphers)
        return next((text for text in texts if text is not None), stored)

    def is_of_newest(self, column: str, stored: str) -> bool:
        """Whether the first key sealed it."""
        return is_sealed(stored) and _decrypt(self._ciphers[0], column, stored) is not None


def _decrypt(cipher: AESGCM, column: str, stored: str) -> str | None:
    try:
        raw = base64.b64decode(stored.removeprefix(SEALED))
        return cipher.decrypt(raw[:_NONCE_BYTES], raw[_NONCE_BYTES:], column.encode()).decode()
    except (InvalidTag, ValueError):  # of another key, or no sealed text
        return None


class SealedText(TypeDecorator[str]):
    """A text that is sealed where the process has keys."""

    impl = Text
    cache_ok = True

    def __init__(self, column: str = "") -> None:
        """`column`: the table's and the column's name."""
        super().__init__()
        self.column = column

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        keys = keys_in_force()
        return value if value is None or keys is None else keys.seal(self.column, value)

    def process_result_value(self, value: Any, dialect: Dialect) -> str | None:
        keys = keys_in_force()
        return value if value is None or keys is None else keys.open(self.column, value)


def is_sealed(text: str) -> bool:
    return text.startswith(SEALED)


def check_opened(text: str, what: str) -> str:
    """The text. Unavailable if it could not be opened."""
    if is_sealed(text):
        raise Unavailable(
            f"{what} cannot be decrypted: it was stored under another operator token.",
            next_step="Restore TOLLHOUSE_ADMIN_TOKEN, give the old one as "
            "TOLLHOUSE_PREVIOUS_ADMIN_TOKEN, or make a new endpoint.",
            code="not_decryptable",
        )
    return text


_in_force: ColumnKeys | None = None


def seal_columns(keys: ColumnKeys | None) -> None:
    """From now on, the columns are sealed at rest in this process."""
    global _in_force
    _in_force = keys


def keys_in_force() -> ColumnKeys | None:
    return _in_force
