"""Caches the token ids of repeated chat prefixes: system prompt, tools, earlier turns.

A chat's text is split before control tokens. A tokenizer extracts control tokens before any other
step, so the text on either side never merges, and the ids of the pieces are the ids of the whole.
Tokens for which that does not hold (they strip white space on their left, are matched in normalised
text, or overlap another token) are not split points.

Pieces are cached per tenant, so that timing reveals nothing about another tenant's prompts.
"""

import re
import sys
import threading
from collections import OrderedDict
from collections.abc import Sequence
from sys import getsizeof

from msgspec import Struct
from msgspec.structs import replace
from tokenizers import Tokenizer

from gateway.catalog.codec.encoding import TextEncoder, TooManyTokens
from gateway.catalog.codec.split_tokens import split_pattern
from gateway.catalog.codec.word_cache import WordCache

# The beginnings of long prompts with their token ids, each as one entry: a conversation's next turn
# takes up all turns before it by one look-up, and not piece by piece.
#
# A beginning ends where another piece may begin (`prefix_tokens`). Kept are the last such place of a
# prompt, which the next turn repeats, and where the pieces end that were known before, which prompts
# with another last message share.
#
# An entry is found by its length and last characters, and then compared as a whole: the hash of a long
# text costs fifty times as much. Of several with the same, the newest is kept.


LEAST = 4_096  # characters; shorter beginnings are found piece by piece
TAIL = 4_096  # characters at a text's end in which a known beginning may end
_BEGINNING_BYTES = 300  # dictionary overhead, without text and ids


_END = 64  # characters by which an entry is found
_BeginningKey = tuple[str, int, str]


class Beginning(Struct, frozen=True):
    length: int  # characters
    ids: list[int]  # of a prompt that begins so, and never changed
    count: int  # of these, its own
    shared: bool  # by prompts that go on differently
    text: str = ""


NOTHING = Beginning(0, [], 0, shared=False)


class Beginnings:
    """Of the prompts of all tenants, each its own. The least recently used are dropped. The caller
    holds a lock."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._entries: OrderedDict[_BeginningKey, Beginning] = OrderedDict()
        self.bytes = 0

    def longest(self, tenant_id: str, text: str, places: Sequence[int]) -> Beginning:
        """The longest kept beginning that ends at one of the places, which ascend."""
        for place in reversed(places):
            key = _key(tenant_id, text, place)
            found = self._entries.get(key)
            if found is not None and text.startswith(found.text):
                self._entries.move_to_end(key)
                return found
        return NOTHING

    def has(self, tenant_id: str, text: str, length: int, *, shared: bool) -> bool:
        """Whether the text's first characters are kept, and as `shared` if that is asked."""
        found = self._entries.get(_key(tenant_id, text, length))
        return found is not None and found.shared >= shared and text.startswith(found.text)

    def keep(
        self, tenant_id: str, beginning: str, ids: list[int], count: int, *, shared: bool
    ) -> None:
        """Its ids are the first `count` of `ids`, a list that is kept as it is."""
        key = _key(tenant_id, beginning, len(beginning))
        known = self._entries.get(key)
        if known is not None and known.text == beginning:
            if shared and not known.shared:
                self._entries[key] = replace(known, shared=True)
            return
        if known is not None:
            self._drop(key)
        self._entries[key] = Beginning(len(beginning), ids, count, shared, beginning)
        self.bytes += _beginning_size(beginning, ids)
        while self.bytes > self._max_bytes:
            self._drop(next(iter(self._entries)))

    def drop(self, tenant_id: str, text: str, length: int) -> None:
        """The text's first characters, if they are kept."""
        key = _key(tenant_id, text, length)
        found = self._entries.get(key)
        if found is not None and text.startswith(found.text):
            self._drop(key)

    def _drop(self, key: _BeginningKey) -> None:
        found = self._entries.pop(key)
        self.bytes -= _beginning_size(found.text, found.ids)


def _key(tenant_id: str, text: str, length: int) -> _BeginningKey:
    return tenant_id, length, text[max(0, length - _END) : length]


def _beginning_size(text: str, ids: list[int]) -> int:
    return getsizeof(text) + getsizeof(ids) + _BEGINNING_BYTES


# Characters; for a shorter piece a lookup costs as much as encoding it.
_MIN_PIECE = 512
MIN_TEXT = 2 * _MIN_PIECE
_MAX_BYTES = 32 * 2**20
_ENTRY_BYTES = 300  # dictionary overhead, without text and ids

_Key = tuple[str, str]
# One object a number: the ids of a cached piece are references, which a prompt takes up by the
# thousand in microseconds. As new objects they take ten times as long, and four times the memory.
_NUMBERS: list[int] = []


def _shared_ids(ids: Sequence[int], vocabulary: int) -> list[int]:
    if len(_NUMBERS) < vocabulary:
        _NUMBERS.extend(range(len(_NUMBERS), vocabulary))
    try:
        return list(map(_NUMBERS.__getitem__, ids))
    except IndexError:  # a token outside the vocabulary
        return list(ids)


class PrefixTokenCache:
    """An LRU cache of at most `max_bytes` for one tokenizer."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        max_bytes: int = _MAX_BYTES,
        min_piece: int = _MIN_PIECE,
        encoder: TextEncoder | None = None,
        words: WordCache | None = None,
    ) -> None:
        self._encoder = encoder or TextEncoder(tokenizer)
        self._words = words
        self._max_bytes = max_bytes // 2
        self._beginnings = Beginnings(max_bytes // 2)
        self._min_piece = min_piece
        self._cuts = _cuts(tokenizer)
        self._vocabulary = tokenizer.get_vocab_size(with_added_tokens=True)
        self._entries: OrderedDict[_Key, list[int]] = OrderedDict()
        self._lock = threading.Lock()
        self._bytes = 0

    @property
    def bytes(self) -> int:
        return self._bytes + self._beginnings.bytes

    def pieces(self, tenant_id: str, text: str) -> "Pieces":
        """The text in pieces, with the cached ids. Encodes nothing."""
        places, begun = self._places(text), NOTHING
        if places:
            with self._lock:
                begun = self._beginnings.longest(tenant_id, text, places)
        cut = self._cut(text, begun.length, places[-1] if places else 0)
        found: list[list[int] | None] = []
        with self._lock:
            for piece in cut[:-1]:
                key = (tenant_id, piece)
                ids = self._entries.get(key)
                if ids is not None:
                    self._entries.move_to_end(key)
                found.append(ids)
        return Pieces(self, tenant_id, text, begun, cut, [*found, None], keeps=bool(places))

    def encode(self, text: str, at_most: int | None = None) -> list[int]:
        ids = self._words.encode(text) if self._words is not None else None
        return self._encoder.encode(text, at_most=at_most) if ids is None else ids

    def shared(self, ids: list[int]) -> list[int]:
        """The same ids, as `store` keeps them."""
        return _shared_ids(ids, self._vocabulary)

    def store(self, tenant_id: str, new: list[tuple[str, list[int]]]) -> None:
        with self._lock:
            for piece, ids in new:
                if (tenant_id, piece) not in self._entries:
                    self._entries[tenant_id, piece] = ids
                    self._bytes += _size(piece, ids)
            while self._bytes > self._max_bytes:
                (_, piece), ids = self._entries.popitem(last=False)
                self._bytes -= _size(piece, ids)

    def keep(
        self, tenant_id: str, text: str, whole: list[int], end: tuple[int, int], *, shared: bool
    ) -> None:
        """The text up to `end` (characters, ids)."""
        length, count = end
        with self._lock:
            if not self._beginnings.has(tenant_id, text, length, shared=shared):
                self._beginnings.keep(tenant_id, text[:length], whole, count, shared=shared)

    def drop(self, tenant_id: str, text: str, length: int) -> None:
        """Of a conversation that went on, for which a longer one is kept."""
        with self._lock:
            self._beginnings.drop(tenant_id, text, length)

    def _places(self, text: str) -> list[int]:
        """Where a piece may begin, near the end of a long text."""
        if self._cuts is None or len(text) < LEAST:
            return []
        begin = max(self._min_piece, len(text) - TAIL)
        return [found.start() for found in self._cuts.finditer(text, begin)]

    def _cut(self, text: str, begun: int = 0, last: int = 0) -> list[str]:
        """From `begun` on, and once more at `last`. Every piece but the first begins with a control
        token, so a tokenizer that treats the start of a text differently does so only once. The end of
        a piece never depends on later text."""
        if self._cuts is None:
            return [text]
        cut, find, least = [], self._cuts.search, self._min_piece
        while (found := find(text, begun + least)) is not None:
            cut.append(text[begun : found.start()])
            begun = found.start()
        if begun < last:
            cut.append(text[begun:last])
            begun = last
        return [*cut, text[begun:]]


class Pieces:
    """One text in pieces. The last one is not cached: it ends at the new turn and will not repeat."""

    def __init__(
        self,
        prefix_tokens: PrefixTokenCache,
        tenant_id: str,
        text: str,
        begun: Beginning,
        cut: list[str],
        known: list[list[int] | None],
        *,
        keeps: bool,
    ) -> None:
        """`begun` is known as a whole; `cut` are the pieces behind it. `keeps`: whether the text is so
        long that its beginning is worth an entry."""
        self._cache = prefix_tokens
        self._tenant_id = tenant_id
        self._text = text
        self._begun = begun
        self._cut = cut
        self._known = known
        self._keeps = keeps

    @property
    def new_characters(self) -> int:
        """Number of characters that `ids` has to encode."""
        pairs = zip(self._cut, self._known, strict=True)
        return sum([len(piece) for piece, ids in pairs if ids is None])

    def ids(self, at_most: int | None = None) -> list[int]:
        """Raises TooManyTokens, before all is encoded, where there are more than `at_most`. Not to be
        changed: the beginnings of other prompts are read from it."""
        whole = self._begun.ids[: self._begun.count]
        new: list[tuple[str, list[int]]] = []
        shared = 0, 0  # what was known of the text from its beginning on: characters, ids
        at = self._begun.length
        for piece, known in zip(self._cut, self._known, strict=True):
            if known is not None:
                whole += known
                at += len(piece)
                if not new:
                    shared = at, len(whole)
                continue
            left = None if at_most is None else at_most - len(whole)
            try:
                ids = self._cache.encode(piece, left)
            except TooManyTokens as error:
                raise TooManyTokens(len(whole) + error.tokens) from None
            ids = self._cache.shared(ids)
            whole += ids
            at += len(piece)
            new.append((piece, ids))
        if len(new) > 1:
            self._cache.store(self._tenant_id, new[:-1])
        if self._keeps:
            self._keep(whole, len(whole) - len(new[-1][1]), shared)
        return whole

    def _keep(self, whole: list[int], count: int, shared: tuple[int, int]) -> None:
        """The beginning with the first `count` ids, which end before the last piece; and what was
        found piece by piece, of which another text has the same."""
        cache, tenant, text, begun = self._cache, self._tenant_id, self._text, self._begun
        if shared[0] >= LEAST:
            cache.keep(tenant, text, whole, shared, shared=True)
        length = len(text) - len(self._cut[-1])
        if length > begun.length:
            cache.keep(tenant, text, whole, (length, count), shared=False)
            if begun.length and not begun.shared:
                cache.drop(tenant, text, begun.length)


def _size(piece: str, ids: list[int]) -> int:
    return sys.getsizeof(piece) + sys.getsizeof(ids) + _ENTRY_BYTES


def _cuts(tokenizer: Tokenizer) -> re.Pattern[str] | None:
    added = list(tokenizer.get_added_tokens_decoder().values())
    if any(token.single_word for token in added):  # these depend on their neighbours
        return None
    texts = [token.content for token in added if token.content]
    candidates = [
        token.content
        for token in added
        if token.content and token.special and not (token.normalized or token.lstrip)
    ]
    return split_pattern(candidates, texts)
