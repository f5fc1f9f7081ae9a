"""Keys of KV blocks: a hash chain that starts from tenant, adapter, base model and dtype.

Two blocks have the same key only if their tenant, weights, dtype and all tokens up to their end
are the same; only the blocks of an operator's public prefix are shared between tenants.
"""

import hashlib
from array import array
from collections.abc import Sequence

PUBLIC = "\x00public"  # owner of shared blocks; never a tenant, whose name cannot start with NUL


def chain_root(kind: str, *parts: str) -> bytes:
    """The root of a chain. Parts are length-prefixed, so that different lists cannot collide."""
    digest = hashlib.sha256()
    for part in ("tollhouse-kv-1", kind, *parts):
        data = part.encode()
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.digest()


def next_key(parent: bytes, tokens: Sequence[int]) -> bytes:
    """The key of the block that holds `tokens` (a whole block of ids) after `parent`."""
    return hashlib.sha256(parent + array("q", tokens).tobytes()).digest()


class PrefixHasher:
    """Computes the keys of a token sequence's full blocks, and which of them are public."""

    def __init__(
        self,
        base_digest: str,
        kv_dtype: str,
        block_size: int,
        public_prefixes: Sequence[Sequence[int]] = (),
    ) -> None:
        self._base = base_digest
        self._dtype = kv_dtype
        self._size = block_size
        # Longest first, so that the first match is the longest; only whole blocks are shared.
        whole = [tuple(p[: len(p) // block_size * block_size]) for p in public_prefixes]
        self._public = sorted((p for p in whole if p), key=len, reverse=True)

    def public_blocks(self, prompt: Sequence[int]) -> int:
        """How many leading blocks of the prompt belong to a public prefix."""
        for prefix in self._public:
            if len(prompt) >= len(prefix) and tuple(prompt[: len(prefix)]) == prefix:
                return len(prefix) // self._size
        return 0

    def root(self, namespace: str, adapter: str | None) -> bytes:
        return chain_root("tenant", namespace, adapter or "", self._base, self._dtype)

    def extend(
        self,
        keys: list[bytes],
        tokens: Sequence[int],
        namespace: str,
        adapter: str | None,
        public_blocks: int,
        count: int | None = None,
    ) -> None:
        """Append the missing ones of the first `count` (None: all) keys of the full blocks of
        `tokens` to `keys`."""
        size = self._size
        full = len(tokens) // size
        for index in range(len(keys), full if count is None else min(count, full)):
            if index < public_blocks:
                public_root = chain_root("public", adapter or "", self._base, self._dtype)
                parent = keys[-1] if keys else public_root
            elif index == public_blocks:
                parent = self.root(namespace, adapter) + (keys[-1] if keys else b"")
            else:
                parent = keys[-1]
            keys.append(next_key(parent, tokens[index * size : (index + 1) * size]))
