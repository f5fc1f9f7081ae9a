"""Folds a text into the view that rules and classifier read, with a map to the original offsets.

Every character folds independently (NFKC, accents and invisible characters dropped, look-alikes to
Latin), so the view does not depend on how a text is cut into chunks.
"""

import re
import unicodedata
from collections.abc import Sequence

from msgspec import Struct

from moderation.confusables import LOOKALIKES

PLAIN = "plain"
LOOSE = "loose"
# Letters and symbols that show as nothing or as a gap (Hangul fillers, the empty Braille cell) fold to
# this one. The plain view's rules read it as a space; the loose view leaves it out.
FILLER = "\u2800"

# One code point may expand to eighteen under NFKC; the limit keeps texts from growing that much.
_LONGEST_EXPANSION = 4
_UNTOUCHED = re.compile(r"[\t\n\r\x20-\x7e]*")
_INVISIBLE = frozenset({"Cf", "Cc", "Mn", "Me", "Co"})
_KEPT_CONTROLS = frozenset("\t\n\r")
_LINE_BREAKS = frozenset("\x0b\x0c\x85")
_FILLERS = frozenset("\u115f\u1160\u3164\uffa0\u2800\U0001d159")
_SPACES = frozenset({"Zs", "Zl", "Zp"})
_ACCENTED_SCRIPTS = ("LATIN", "GREEK", "CYRILLIC")


class View(Struct, frozen=True):
    """A folded text; its character i represents the original characters starts[i] to ends[i]."""

    text: str
    starts: Sequence[int]
    ends: Sequence[int]

    def original_span(self, start: int, end: int) -> tuple[int, int]:
        """Return the original span of view characters `start` to `end` (end exclusive)."""
        if start >= end:
            at = self.starts[start] if start < len(self.starts) else self.ends[-1]
            return at, at
        return self.starts[start], self.ends[end - 1]


class _FoldTable(dict[str, str]):
    def __missing__(self, character: str) -> str:
        folded = _fold_character(character)
        if len(self) < 65_536:
            self[character] = folded
        return folded


def _fold_character(character: str) -> str:
    category = unicodedata.category(character)
    if category == "Cs":
        return "\ufffd"
    if character in _KEPT_CONTROLS:
        return character
    if character in _LINE_BREAKS:
        return "\n"
    if character in _FILLERS:
        return FILLER
    if category in _INVISIBLE or _is_ignorable(character):
        return ""
    if category in _SPACES:
        return " "
    composed = unicodedata.normalize("NFKC", character)[:_LONGEST_EXPANSION]
    return "".join(_fold_composed(part) for part in composed)


def _is_ignorable(character: str) -> bool:
    """Whether an unassigned code point shows as nothing (Unicode's Default_Ignorable_Code_Point)."""
    point = ord(character)
    return point == 0x2065 or 0xFFF0 <= point <= 0xFFF8 or 0xE0000 <= point <= 0xE0FFF


def _fold_composed(character: str) -> str:
    if character.isascii():
        return character if character.isprintable() or character in _KEPT_CONTROLS else ""
    if unicodedata.category(character) in _INVISIBLE:
        return ""
    if character in LOOKALIKES:
        return LOOKALIKES[character]
    if unicodedata.name(character, "").startswith(_ACCENTED_SCRIPTS):
        base = unicodedata.normalize("NFKD", character)[0]
        return LOOKALIKES.get(base, base)
    return character


_TABLE = _FoldTable()


def _is_untouched(text: str) -> bool:
    """Plain ASCII, which costs one scan and no copy."""
    return text.isascii() and (text.isprintable() or _UNTOUCHED.fullmatch(text) is not None)


def folded_text(text: str) -> str:
    """The text of `fold` alone."""
    return text if _is_untouched(text) else "".join(map(_TABLE.__getitem__, text))


def fold(text: str) -> View:
    """Fold a whole text."""
    if _is_untouched(text):
        return View(text, range(len(text)), range(1, len(text) + 1))
    pieces, starts = [], []
    for offset, character in enumerate(text):
        folded = _TABLE[character]
        pieces.append(folded)
        starts += [offset] * len(folded)
    return View("".join(pieces), starts, [start + 1 for start in starts])


def spaced(text: str) -> str:
    """The folded text with spaces for fillers, of the same length."""
    return text.replace(FILLER, " ") if FILLER in text else text


def lower(text: str) -> str:
    """Lower-case without changing the length."""
    lowered = text.lower()
    if len(lowered) == len(text):
        return lowered
    return "".join(c.lower() if len(c.lower()) == 1 else c for c in text)


class FoldStream(Struct):
    """Folds a text that arrives in pieces; `view()` is the fold of all pieces so far.

    `drop` forgets the oldest view characters, so that a long stream needs bounded memory.
    """

    _text: str = ""
    _starts: range | list[int] = range(0)  # ranges while every character stands for itself
    _ends: range | list[int] = range(1, 1)
    _length: int = 0

    @classmethod
    def after(cls, length: int) -> "FoldStream":
        """One whose text comes after `length` characters pushed first: theirs are the negative
        offsets."""
        return cls(
            _starts=range(-length, -length), _ends=range(1 - length, 1 - length), _length=-length
        )

    def push(self, folded: View, length: int) -> None:
        """Append the next piece; `length` is the length of its original."""
        at, known = self._length, self._starts
        self._text += folded.text
        self._length += length
        if isinstance(known, range) and isinstance(folded.starts, range):
            self._starts = range(known.start, self._length)
            self._ends = range(known.start + 1, self._length + 1)
            return
        if isinstance(known, range) or isinstance(self._ends, range):
            self._starts, self._ends = known, ends = list(known), list(self._ends)
        else:
            ends = self._ends
        if isinstance(folded.starts, range):
            known.extend(range(at, at + length))
            ends.extend(range(at + 1, at + length + 1))
        else:
            known.extend([place + at for place in folded.starts])
            ends.extend([place + at for place in folded.ends])

    def drop(self, count: int) -> None:
        self._text = self._text[count:]
        self._starts = self._starts[count:]
        self._ends = self._ends[count:]

    def view(self) -> View:
        return View(self._text, self._starts, self._ends)
