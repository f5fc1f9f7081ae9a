"""Block keys of prompts, computed lazily and cached in strides.

A turn of a conversation begins like the turn before it. Its first strides are found in the cache by
one hash of their bytes, without hashing every block again.
"""

from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import chain

from engine.cache.prefix import PrefixHasher
from engine.protocol import EngineInfo

STRIDE = 16  # blocks per cache entry
_MAX_ENTRIES = 4096  # cache entries of about 2 KiB each

Scope = tuple[str, str, str, int]  # tenant, adapter, base and dtype, public blocks


class PrefixChains:
    def __init__(self) -> None:
        self._memo: OrderedDict[tuple[Scope, bytes, bytes], list[bytes]] = OrderedDict()
        self._names: dict[tuple[str, str, int], PrefixHasher] = {}

    def keys(
        self, info: EngineInfo, ids: Sequence[int], namespace: str, adapter: str | None
    ) -> Iterator[bytes]:
        """Keys of the full blocks in order, computed lazily. They are valid for every engine with the
        same base model, dtype, block size and public prefixes."""
        return chain.from_iterable(self._strides(info, ids, namespace, adapter))

    def _strides(
        self, info: EngineInfo, ids: Sequence[int], namespace: str, adapter: str | None
    ) -> Iterator[list[bytes]]:
        names = self._names_of(info)
        public = names.public_blocks(ids)
        size = info.block_size
        scope: Scope = (namespace, adapter or "", info.base_digest + info.dtype, public)
        keys: list[bytes] = []
        parent = b""
        full = len(ids) // size
        for first in range(0, full, STRIDE):
            last = min(first + STRIDE, full)
            memo_key = (scope, parent, array("I", ids[first * size : last * size]).tobytes())
            block_keys = self._memo.get(memo_key)
            if block_keys is None:
                names.extend(keys, ids[: last * size], namespace, adapter, public)
                block_keys = keys[first:]
                if last - first == STRIDE:
                    self._memo[memo_key] = block_keys
                    if len(self._memo) > _MAX_ENTRIES:
                        self._memo.popitem(last=False)
            else:
                keys += block_keys
            yield block_keys
            parent = block_keys[-1]

    def _names_of(self, info: EngineInfo) -> PrefixHasher:
        key = (info.base_digest, info.dtype, info.block_size)
        names = self._names.get(key)
        if names is None:
            names = self._names[key] = PrefixHasher(*key, info.public_prefixes)
        return names
