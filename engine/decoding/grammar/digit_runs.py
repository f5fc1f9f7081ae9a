"""Ends numbers that a schema leaves open: a weak model would write digits for ever.

After `MOST_DIGITS` digits in a row a number gets no more of them, where its grammar allows anything else.
Neither a double nor an integer of 64 bits needs as many.
"""

import json
from collections.abc import Callable, Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

MOST_DIGITS = 24


class DigitRuns:
    def __init__(self, tokenizer: Callable[[], str], vocab: int) -> None:
        """`tokenizer`: reads the text of the model's tokenizer.json."""
        self._tokenizer = tokenizer
        self._vocab = vocab

    @cached_property
    def _texts(self) -> list[tuple[str, int]]:
        vocab = json.loads(self._tokenizer()).get("model", {}).get("vocab", {})
        listed = vocab.items() if isinstance(vocab, dict) else zip(*_columns(vocab), strict=True)
        return [(text, token) for text, token in listed if token < self._vocab]

    @cached_property
    def _digits(self) -> dict[int, int]:
        """How many digits a token adds, of those that are digits alone."""
        return {n: len(text) for text, n in self._texts if text.isascii() and text.isdecimal()}

    @cached_property
    def _going_on(self) -> NDArray[np.int32]:
        """The bits of the tokens that begin with a digit."""
        bits = np.zeros(-(-self._vocab // 32) * 32, np.uint8)
        bits[[n for text, n in self._texts if text[:1].isascii() and text[:1].isdecimal()]] = 1
        return np.packbits(bits, bitorder="little").view(np.int32)

    @cached_property
    def _letter(self) -> int | None:
        """A token that a string may have and a number may not."""
        return next((n for text, n in self._texts if text in ("a", "x", "t")), None)

    def is_long(self, history: Sequence[int]) -> bool:
        """Whether the text ends with as many digits as a number gets."""
        digits, count = self._digits, 0
        for token in reversed(history):
            added = digits.get(token, 0)
            count += added
            if not added or count >= MOST_DIGITS:
                break
        return count >= MOST_DIGITS

    def end(self, mask: NDArray[np.int32]) -> None:
        """Takes the tokens that go on with a number out of the mask of its next one."""
        letter = self._letter
        if letter is None or int(mask[letter // 32]) >> (letter % 32) & 1:
            return  # the digits of a string
        left = mask & ~self._going_on
        if left.any():
            mask[:] = left


def _columns(pieces: Sequence[Sequence[object]]) -> tuple[list[str], list[int]]:
    """Texts and ids of a Unigram vocabulary, whose pieces are in the order of their ids."""
    return [str(piece[0]) for piece in pieces], list(range(len(pieces)))
