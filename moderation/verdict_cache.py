"""Findings of texts that were screened before, so that a conversation is not screened anew each turn.

An entry is found by tenant, policy version and a keyed digest of the text: no text is kept, and a
tenant never learns what another has sent. The least recently used entries are dropped.
"""

import hashlib
import secrets
from collections import OrderedDict
from collections.abc import Sequence
from threading import Lock

from moderation.policy import Policy
from moderation.screener import Findings

# An entry takes about 2 kB, most of it scores.
MOST_ENTRIES = 16_384
_MOST_SPANS = 64  # findings with more spans are made again each time

Key = tuple[str, str, bytes]


class VerdictCache:
    """Safe for threads; its lock is held for one look-up at a time."""

    def __init__(self, most: int = MOST_ENTRIES) -> None:
        self._most = most
        self._secret = secrets.token_bytes(32)
        self._entries: OrderedDict[Key, Findings] = OrderedDict()
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._entries)

    def of(self, tenant_id: str, policy: Policy) -> "TenantVerdicts":
        return TenantVerdicts(self, tenant_id, policy.version)

    def digests(self, texts: Sequence[str]) -> list[bytes]:
        secret, digest = self._secret, hashlib.blake2b
        raw = [text.encode("utf-8", "surrogatepass") for text in texts]
        return [digest(each, digest_size=16, key=secret).digest() for each in raw]

    def get_all(self, keys: Sequence[Key]) -> list[Findings | None]:
        entries = self._entries
        with self._lock:
            found = [entries.get(key) for key in keys]
            for key, each in zip(keys, found, strict=True):
                if each is not None:
                    entries.move_to_end(key)
            return found

    def put(self, key: Key, findings: Findings) -> None:
        failed = any(name.endswith("_failed") for name in findings.flagged)
        if failed or findings.unscanned or len(findings.spans) > _MOST_SPANS:
            return
        with self._lock:
            self._entries[key] = findings
            self._entries.move_to_end(key)
            if len(self._entries) > self._most:
                self._entries.popitem(last=False)


class TenantVerdicts:
    """The findings of one tenant under one policy version."""

    def __init__(self, cache: VerdictCache, tenant_id: str, policy_version: str) -> None:
        self._cache = cache
        self._tenant_id = tenant_id
        self._policy_version = policy_version
        self._asked: dict[str, Key] = {}  # their digests are not made again for `put`

    def get_all(self, texts: Sequence[str]) -> list[Findings | None]:
        keys = self._keys(texts)
        self._asked.update(zip(texts, keys, strict=True))
        return self._cache.get_all(keys)

    def put(self, text: str, findings: Findings) -> None:
        self._cache.put(self._asked.get(text) or self._keys([text])[0], findings)

    def _keys(self, texts: Sequence[str]) -> list[Key]:
        tenant, version = self._tenant_id, self._policy_version
        return [(tenant, version, digest) for digest in self._cache.digests(texts)]
