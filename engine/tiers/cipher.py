"""Blocks encrypted by AES-256-GCM, with a key for each tenant that is derived from the operator's.
Imported only where a key is configured."""

import os

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

_NONCE = 12
_KEY = 32
_MAX_CIPHERS = 1000  # kept, one a tenant


class Cipher:
    """Encrypts with a key that is derived for each tenant from the operator's."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._ciphers: dict[str, AESGCM] = {}

    def seal(self, owner: str, name: str, data: bytes) -> bytes:
        nonce = os.urandom(_NONCE)
        return nonce + self._cipher(owner).encrypt(nonce, data, name.encode())

    def open(self, owner: str, name: str, stored: bytes) -> bytes | None:
        try:
            return self._cipher(owner).decrypt(stored[:_NONCE], stored[_NONCE:], name.encode())
        except (InvalidTag, ValueError):  # ValueError: shorter than a nonce and a tag
            return None

    def _cipher(self, owner: str) -> AESGCM:
        found = self._ciphers.get(owner)
        if found is None:
            if len(self._ciphers) >= _MAX_CIPHERS:
                self._ciphers.clear()
            info = b"tollhouse kv tier " + owner.encode()
            found = AESGCM(HKDF(SHA256(), _KEY, None, info).derive(self._secret))
            self._ciphers[owner] = found
        return found
