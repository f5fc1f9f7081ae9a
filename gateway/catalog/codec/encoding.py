"""Encodes texts of any length without holding the interpreter's lock, and bounds what they can be.

`Tokenizer.encode` holds the lock until it returns, seconds for a few megabytes, so that a thread does
not help. `encode_batch_fast` releases it. Long texts are encoded slice by slice, which bounds the
memory of the tokenizer's result (hundreds of bytes per token) and stops at `at_most` tokens.
"""

import re
from collections.abc import Iterator
from string import ascii_letters, digits

from tokenizers import Tokenizer

from gateway.catalog.codec.word_cache import ends_words_before_marks, keeps_bytes
from gateway.catalog.panics import not_encodable

_SLICE = 32_768  # characters
# A composed character has at least a quarter of the bytes of what it is composed of.
_LARGEST_SHRINKING = 4
_WORD_CHARACTERS = frozenset(ascii_letters + digits)
# Before one of these a word of letters or digits ends, in prose, JSON, tables and base64.
_MARKS = ' \n,.:;"=+/'


class TooManyTokens(Exception):
    """A text has more tokens than allowed. `tokens` is a lower bound of their number."""

    def __init__(self, tokens: int) -> None:
        super().__init__(tokens)
        self.tokens = tokens


class TextEncoder:
    """Of one tokenizer; safe in threads."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        added = [token.content for token in tokenizer.get_added_tokens_decoder().values()]
        in_added = set("".join(added))  # a cut must not fall into an added token
        marks = "".join(each for each in _MARKS if each not in in_added)
        sliceable = bool(marks) and ends_words_before_marks(tokenizer)
        self._marks = re.compile(f"[{re.escape(marks)}]") if sliceable else None
        self._longest = _longest_token(tokenizer, added) if keeps_bytes(tokenizer) else None
        self._shrinking = 1 if tokenizer.normalizer is None else _LARGEST_SHRINKING

    def encode(self, text: str, *, special: bool = False, at_most: int | None = None) -> list[int]:
        """Raises TooManyTokens where the text has more than `at_most`, unread where its bytes cannot
        be so few tokens."""
        if at_most is not None and (least := self.least_tokens(text)) > at_most:
            raise TooManyTokens(least)
        if self._marks is None or len(text) <= 2 * _SLICE:
            return self._encode(text, at_most, special=special)
        ids, (before, after) = [], self._special_ids() if special else ([], [])
        ids += before
        for piece in slices(text, _SLICE, self._marks):
            ids += self._encode(piece, None, special=False)
            if at_most is not None and len(ids) + len(after) > at_most:
                raise TooManyTokens(len(ids) + len(after))
        return ids + after

    def encode_truncated(self, text: str, at_most: int) -> list[int]:
        """The first tokens of a text, with the special tokens before and after it."""
        before, after = self._special_ids()
        most = max(0, at_most - len(before) - len(after))
        ids: list[int] = []
        whole = [text] if self._marks is None else slices(text, _SLICE, self._marks)
        for piece in whole:
            ids += self._encode(piece, None, special=False)
            if len(ids) >= most:
                break
        return (before + ids[:most] + after)[:at_most]

    def least_tokens(self, text: str) -> int:
        """A lower bound of the number of tokens: no token stands for more bytes than the longest."""
        if self._longest is None:
            return 0
        if text.isascii():  # one byte per character, which no normal form changes
            return len(text) // self._longest
        return len(text) // (self._longest * self._shrinking)

    def _encode(self, text: str, at_most: int | None, *, special: bool) -> list[int]:
        try:
            (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=special)
        except BaseException as error:
            raise not_encodable(error) from None
        if at_most is not None and len(encoding) > at_most:
            raise TooManyTokens(len(encoding))
        return list(encoding.ids)

    def _special_ids(self) -> tuple[list[int], list[int]]:
        """The special tokens that the tokenizer puts before and after a text."""
        plain = self._encode("a", None, special=False)
        whole = self._encode("a", None, special=True)
        start = next(i for i in range(len(whole)) if whole[i : i + len(plain)] == plain)
        return whole[:start], whole[start + len(plain) :]


def slices(text: str, size: int, marks: re.Pattern[str]) -> Iterator[str]:
    """The text in slices of about `size` characters that end with a word before a mark. A text
    without such a place stays whole."""
    start = 0
    while len(text) - start > 2 * size:
        end = _word_end(text, start + size, size, marks)
        yield text[start:end]
        start = end
    if start < len(text):
        yield text[start:]


def _word_end(text: str, start: int, size: int, marks: re.Pattern[str]) -> int:
    """The next place between a letter or digit and a mark; otherwise the end of the text. One call of
    the pattern reads at most `size` characters, since it holds the interpreter's lock."""
    for begin in range(start, len(text), size):
        for found in marks.finditer(text, begin, begin + size):
            if text[found.start() - 1] in _WORD_CHARACTERS:
                return found.start()
    return len(text)


def _longest_token(tokenizer: Tokenizer, added: list[str]) -> int:
    """In bytes. A byte-level vocabulary has one character per byte."""
    vocabulary = tokenizer.get_vocab(with_added_tokens=False)
    return max(max(map(len, vocabulary)), *(len(each.encode()) for each in ("", *added)))
