"""Encryption of customers' texts at rest: AES-256-GCM, with a key for each tenant."""

import hmac
import os

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from core.errors import NotFound

_NONCE_BYTES = 12
_GENERATION_CHARS = 8
_NAME_CHARS = 56


class Sealer:
    """Derives the keys from the operator's token: with another token, old texts are unreadable."""

    def __init__(self, operator_token: str) -> None:
        self._secret = operator_token.encode()

    def seal(self, tenant_id: str, name: str, text: bytes) -> bytes:
        """`name` is bound to the text: a sealed text cannot take another's place."""
        nonce = os.urandom(_NONCE_BYTES)
        return nonce + self._cipher(tenant_id).encrypt(nonce, text, name.encode())

    def open(self, tenant_id: str, name: str, sealed: bytes) -> bytes:
        nonce, text = sealed[:_NONCE_BYTES], sealed[_NONCE_BYTES:]
        try:
            return self._cipher(tenant_id).decrypt(nonce, text, name.encode())
        except InvalidTag:
            raise NotFound(
                f"{name} cannot be decrypted: it was stored under another operator token.",
                next_step="Ask the operator to restore TOLLHOUSE_ADMIN_TOKEN, or delete it.",
                code="not_decryptable",
            ) from None

    def name_key(self, tenant_id: str, name: str) -> str:
        """64 hexadecimal digits by which rows of a name are found without storing the name; those of
        one tenant and one operator token begin with their `generation`."""
        digest = hmac.digest(self._name_secret(tenant_id), name.encode(), "sha256").hex()
        return self.generation(tenant_id) + digest[:_NAME_CHARS]

    def generation(self, tenant_id: str) -> str:
        """8 hexadecimal digits that change with the operator's token."""
        digest = hmac.digest(self._name_secret(tenant_id), b"\0generation", "sha256")
        return digest.hex()[:_GENERATION_CHARS]

    def _name_secret(self, tenant_id: str) -> bytes:
        info = b"tollhouse end users " + tenant_id.encode()
        return HKDF(SHA256(), 32, None, info).derive(self._secret)

    def _cipher(self, tenant_id: str) -> AESGCM:
        info = b"tollhouse stored responses " + tenant_id.encode()
        return AESGCM(HKDF(SHA256(), 32, None, info).derive(self._secret))
