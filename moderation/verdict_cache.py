"""Findings of texts that were screened before: a turn of a conversation screens only what is new.

An entry is found by tenant, policy version and a keyed digest of the text: no text is kept, and a
tenant never learns what another has sent. The least recently used entries are dropped, so that all
take no more than `MOST_BYTES`.

The findings of a conversation's first texts together are an entry too. Where it is found, they cost
one hash over their bytes, and no step for each of them; and the hash is that of the whole text's
fingerprint, so that a long conversation is read once.
"""

import hashlib
import secrets
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from threading import Lock

from moderation.policy import Policy
from moderation.screener import Findings

MOST_BYTES = 24 << 20
_ENTRY_BYTES, _SPAN_BYTES = 1_700, 220  # of an entry, most of it scores, and of each span in it
_MOST_SPANS = 64  # findings with more spans are made again each time
_MOST_NEW = 4  # texts at the end of a conversation that may be new

Key = tuple[str, str, bytes]


class VerdictCache:
    """Safe for threads; its lock is held for one look-up at a time."""

    def __init__(self, most_bytes: int = MOST_BYTES, begun: "hashlib._Hash | None" = None) -> None:
        """`begun`: the keyed hash that reads conversations, of no text yet."""
        self._most_bytes = most_bytes
        self._bytes = 0
        self._secret = secrets.token_bytes(32)
        self._begun = begun or hashlib.sha256(secrets.token_bytes(64))
        self._entries: OrderedDict[Key, Findings] = OrderedDict()
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._entries)

    def of(self, tenant_id: str, policy: Policy) -> "TenantVerdicts":
        return TenantVerdicts(self, tenant_id, policy.version)

    def digests(self, texts: Sequence[str]) -> list[bytes]:
        secret, digest = self._secret, hashlib.blake2b
        return [
            digest(text.encode("utf-8", "surrogatepass"), digest_size=16, key=secret).digest()
            for text in texts
        ]

    def read_first(
        self, texts: Sequence[str], counts: Sequence[int]
    ) -> "tuple[list[bytes], hashlib._Hash]":
        """For each of these counts, which ascend, a digest of the first so many texts; and the hash
        that has read the texts up to the last count, with a NUL between each two.

        No other texts have the same digest: their number ends what is hashed, and where a text holds
        a NUL itself, their lengths stand before it.
        """
        state, begin, found = self._begun.copy(), 0, []
        splits = "\0" in "".join(texts)
        for end in counts:
            if begin and end > begin:
                state.update(b"\0")
            state.update("\0".join(texts[begin:end]).encode("utf-8", "surrogatepass"))
            begin, whole = end, state.copy()
            if splits:
                whole.update(array("Q", map(len, texts[:end])).tobytes())
            whole.update((2 * end + splits).to_bytes(8))
            found.append(whole.digest())
        return found, state

    def get_all(self, keys: Sequence[Key]) -> list[Findings | None]:
        entries = self._entries
        with self._lock:
            found = []
            for key in keys:
                if (each := entries.get(key)) is not None:
                    entries.move_to_end(key)
                found.append(each)
            return found

    def put(self, key: Key, findings: Findings) -> None:
        failed = any(name.endswith("_failed") for name in findings.flagged)
        if failed or findings.unscanned or len(findings.spans) > _MOST_SPANS:
            return
        kept = findings.compact()
        with self._lock:
            old = self._entries.pop(key, None)
            self._entries[key] = kept
            self._bytes += _bytes_of(kept) - (0 if old is None else _bytes_of(old))
            while self._bytes > self._most_bytes:
                self._bytes -= _bytes_of(self._entries.popitem(last=False)[1])


class TenantVerdicts:
    """The findings of one tenant under one policy version."""

    def __init__(self, cache: VerdictCache, tenant_id: str, policy_version: str) -> None:
        self._cache = cache
        self._tenant_id = tenant_id
        self._policy_version = policy_version
        self._asked: dict[str, Key] = {}  # their digests are not made again for `put`
        self._begun: dict[int, Key] = {}  # of the first texts together, by how many they are
        self._read: tuple[Sequence[str], hashlib._Hash | None] = (), None

    def get_all(self, texts: Sequence[str]) -> list[Findings | None]:
        keys = self._keys(texts)
        for number, text in enumerate(texts):
            self._asked[text] = keys[number]
        return self._cache.get_all(keys)

    def put(self, text: str, findings: Findings) -> None:
        self._cache.put(self._asked.get(text) or self._keys([text])[0], findings)

    def longest(self, texts: Sequence[str]) -> tuple[int, Findings | None]:
        """The longest beginning of the texts that was screened before: how many they are, and their
        findings together."""
        counts = range(max(0, len(texts) - _MOST_NEW), len(texts) + 1)
        digests, read = self._cache.read_first(texts, counts)
        self._read = texts, read
        tenant, version = self._tenant_id, self._policy_version
        self._begun = {
            count: (tenant, version, digest) for count, digest in zip(counts, digests, strict=True)
        }
        for count in reversed(counts):
            (found,) = self._cache.get_all((self._begun[count],))
            if found is not None:
                return count, found
        return 0, None

    def put_first(self, count: int, findings: Findings) -> None:
        """The findings of the first `count` texts that `longest` was asked for."""
        if count in self._begun:
            self._cache.put(self._begun[count], findings)

    def hashed(self, texts: Sequence[str]) -> "hashlib._Hash | None":
        """The cache's hash after these texts with a NUL between each two; None unless `longest` has
        read how they begin."""
        first, state = self._read
        count = len(first)
        if not count or state is None or list(texts[:count]) != list(first):
            return None
        if count < len(texts):
            state = state.copy()
            state.update(
                "".join([f"\0{text}" for text in texts[count:]]).encode("utf-8", "surrogatepass")
            )
        return state

    def _keys(self, texts: Sequence[str]) -> list[Key]:
        tenant, version = self._tenant_id, self._policy_version
        return [(tenant, version, digest) for digest in self._cache.digests(texts)]


def _bytes_of(findings: Findings) -> int:
    return _ENTRY_BYTES + _SPAN_BYTES * len(findings.spans)
