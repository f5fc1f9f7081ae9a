"""The loose view: leetspeak undone, stretched letters squeezed, s-p-e-l-l-e-d words joined and
fillers left out.

It is made from the folded view and only adds to it, because "5" is a digit far more often than it
is an "s".
"""

import re
from collections.abc import Sequence
from copy import deepcopy
from typing import Final

from msgspec import Struct

from moderation.classifiers.compiled import LooseText as CompiledLooseText
from moderation.classifiers.compiled import is_compiled
from moderation.normalise import FILLER, View, lower

LEET: Final = {
    "0": "o",
    "1": "i",
    "3": "e",
    "4": "a",
    "5": "s",
    "7": "t",
    "8": "b",
    "@": "a",
    "$": "s",
    "!": "i",
    "|": "l",
    "+": "t",
    "€": "e",
    "£": "l",
    "¢": "c",
}
_LEET_SIGN = re.compile(f"[{re.escape(''.join(LEET))}]")
# A letter repeated three times is stretched; twice is normal spelling.
_STRETCHED: Final = 3
_SAME = re.compile(r"(?is)(.)\1*")
_SIGN = r"[013457@8$!|+€£¢]"
# Only next to these is a sign read as a letter: not in "so!" or "mp3".
_READ_AS_LETTER = re.compile(rf"{_SIGN}[A-Za-z]|[A-Za-z]{_SIGN}(?:{_SIGN}|\*)")
# At least three single letters with the same sign between them: "k.i.l.l", "k i l l".
_SEPARATORS: Final = " .-_*~/"
_LETTER = r"[A-Za-z013457@8$!|+€£¢]"
_SINGLE_BEFORE = r"(?<=[A-Za-z].)(?<![A-Za-z0-9][A-Za-z].)"
_SPELLED = re.compile(rf"([.\-_*~/]){_SINGLE_BEFORE}{_LETTER}\1{_LETTER}(?![A-Za-z0-9])")
_SPELLED_APART = re.compile(rf" {_SINGLE_BEFORE}{_LETTER} {_LETTER}(?![A-Za-z0-9])")
_MIN_SPELLED: Final = 3
# Plain searches for each are several times as fast as one pattern with a back-reference.
_TRIPLES: Final = tuple(letter * _STRETCHED for letter in "abcdefghijklmnopqrstuvwxyz")
_SPACES = re.compile(r"(\s+)")
# Caches of words that do not change, and of what others become: most words are examined once.
_UNCHANGED: set[str] = set()
_CHANGED: dict[str, str] = {}
_MAX_CACHED: Final = 30_000
_MAX_CACHED_LENGTH: Final = 24


def loosen_text(text: str) -> str:
    """Return the loose view of a folded text; the same object when only letter case changes."""
    if not may_change(text):
        return text
    if _SPELLED.search(text) is not None or _SPELLED_APART.search(text) is not None:
        loose = read_loosely(text)
    else:  # nothing else is read over white space
        loose = "".join(map(_loosen_run, _SPACES.split(text)))
    return text if loose == lower(text) else loose


def read_loosely(text: str) -> str:
    """The loose view of a folded text, read as a whole."""
    read = LooseText()
    return read.add(text) + read.rest()


def _loosen_run(run: str) -> str:
    """The loose view of a run of characters without white space, or of white space."""
    if run in _UNCHANGED:
        return lower(run)
    known = _CHANGED.get(run)
    if known is None:
        known = read_loosely(run) if _run_may_change(run) else lower(run)
        if len(run) <= _MAX_CACHED_LENGTH:
            if len(_CHANGED) >= _MAX_CACHED:
                _CHANGED.clear()
            _CHANGED[run] = known
    return known


class LooseStream(Struct):
    """Makes the loose view of a folded text that arrives in pieces. The last run of characters is
    held until the next character decides its reading."""

    _out: list[str] = []
    _starts: list[int] = []
    _ends: list[int] = []
    _waiting: tuple[str, int, int] | None = None
    _previous: str = ""
    _previous_was_leet: bool = False
    _run: list[tuple[str, int, int]] = []
    _spell: list[tuple[str, int, int]] = []  # letter, sign, letter...
    _joining: bool = False  # letters of the same word are already final
    _in_word: bool = False  # the last final character is a letter or a digit

    @classmethod
    def of(cls, view: View) -> View:
        """Return the loose view of a whole folded text, cheaply when nothing changes."""
        if not may_change(view.text):
            return View(lower(view.text), view.starts, view.ends)
        stream = cls()
        stream.push(view.text, view.starts, view.ends)
        stream.finish()
        return stream.view()

    def push(self, text: str, starts: Sequence[int], ends: Sequence[int]) -> None:
        place = 0
        while place < len(text):
            character = text[place]
            if character == FILLER:
                place += 1
                continue
            if self._spells((character, starts[place], ends[place])):
                place += 1
                continue
            self._take((character, starts[place], ends[place]))
            place = self._skip_run(text, starts, ends, place) + 1

    def _take(self, found: tuple[str, int, int]) -> None:
        if self._waiting is not None:
            self._append_final(self._waiting, found[0])
        self._waiting = found
        self._in_word = found[0].isalnum()

    def _spells(self, found: tuple[str, int, int]) -> bool:
        """Whether a character is held, because it may be part of a spelled word."""
        character, spell = found[0], self._spell
        letter = _is_letter(character) or bool(spell and character in LEET)
        if not spell:
            if not letter or self._in_word:
                return False
            spell.append(found)
            return True
        if len(spell) % 2:  # a letter was last
            if character in _SEPARATORS and (len(spell) < 2 or character == spell[1][0]):
                spell.append(found)
                return True
            self._flush_spelled(word_goes_on=character.isalnum())
            return False
        if not letter:
            self._flush_spelled(word_goes_on=False)
            return False
        spell.append(found)
        if self._joining or len(spell) >= 2 * _MIN_SPELLED + 1:
            # Known to be spelled: only its last letters are held, so that memory stays bounded.
            self._joining = True
            self._take(spell[0])
            del spell[:2]
        return True

    def _flush_spelled(self, *, word_goes_on: bool) -> None:
        """Finish the held characters: joined if they are a spelled word, otherwise unchanged."""
        spell, self._spell = self._spell, []
        # In "k i l l them" neither the t nor the space before it is part of the spelled word.
        tail = 2 if word_goes_on and len(spell) > 1 else 1 - len(spell) % 2
        letters = spell[: len(spell) - tail]
        if self._joining or len(letters) >= 2 * _MIN_SPELLED - 1:
            letters = letters[::2]
        for each in (*letters, *spell[len(spell) - tail :]):
            self._take(each)
        self._joining = False

    def _skip_run(self, text: str, starts: Sequence[int], ends: Sequence[int], place: int) -> int:
        """Skip to the last character of a long run of one letter: only its two ends matter."""
        run = self._run
        if len(run) < _STRETCHED or lower(text[place]) != run[0][0]:
            return place
        last = _SAME.match(text, place).end() - 1  # type: ignore[union-attr]
        if last - place < 2:
            return place
        run[-1] = (run[0][0], starts[last - 1], ends[last - 1])
        self._waiting = (text[last], starts[last], ends[last])
        return last

    def finish(self) -> None:
        self._flush_spelled(word_goes_on=False)
        if self._waiting is not None:
            self._append_final(self._waiting, " ")
            self._waiting = None
        self._close_run()

    def _append_final(self, waiting: tuple[str, int, int], following: str) -> None:
        character, start, end = waiting
        letter = LEET.get(character)
        if letter is not None and self._reads_as_letter(following):
            self._previous_was_leet = True
            character = letter
        else:
            self._previous_was_leet = False
        self._previous = character
        self._append(lower(character), start, end)

    def _reads_as_letter(self, following: str) -> bool:
        if _is_letter(following) or self._previous_was_leet:
            return True
        return _is_letter(self._previous) and (following in LEET or following == "*")

    def _append(self, character: str, start: int, end: int) -> None:
        if self._run and (self._run[0][0] != character or not _is_letter(character)):
            self._close_run()
        self._run.append((character, start, end))
        if len(self._run) > _STRETCHED:
            del self._run[1]

    def _close_run(self) -> None:
        if len(self._run) >= _STRETCHED:
            self._run = [(self._run[0][0], self._run[0][1], self._run[-1][2])]
        for character, start, end in self._run:
            self._out.append(character)
            self._starts.append(start)
            self._ends.append(end)
        self._run = []

    @property
    def open_from(self) -> int | None:
        """The original offset from which the view is not final yet, or None."""
        if self._run:
            return self._run[0][1]
        if self._waiting is not None:
            return self._waiting[1]
        return self._spell[0][1] if self._spell else None

    def take(self) -> str:
        """The text of the view so far, which is forgotten."""
        taken = "".join(self._out)
        self.drop(len(self._out))
        return taken

    def drop(self, count: int) -> None:
        """Forget the oldest characters."""
        count = max(0, count)
        del self._out[:count], self._starts[:count], self._ends[:count]

    def view(self) -> View:
        return View("".join(self._out), self._starts, self._ends)


class PlainLooseText:
    """The loose view without offsets of a folded text that arrives in pieces."""

    def __init__(self) -> None:
        self._stream = LooseStream()
        self._length = 0

    def add(self, text: str) -> str:
        """Continue the text; the characters of its view that are final now."""
        places = range(self._length, self._length + len(text) + 1)
        self._length += len(text)
        self._stream.push(text, places[:-1], places[1:])
        return self._stream.take()

    def rest(self) -> str:
        """The other characters of its view, as if the text ended here."""
        ended = deepcopy(self._stream)
        ended.finish()
        return ended.take()


LooseText = CompiledLooseText if is_compiled() else PlainLooseText


def _is_letter(character: str) -> bool:
    return character.isascii() and character.isalpha()


def may_change(text: str) -> bool:
    """Whether the loose view may differ in more than letter case: a cheap check, which only long words
    and spelled ones pass in vain."""
    runs = text.split()
    if not _UNCHANGED.issuperset(runs):
        new = set(runs) - _UNCHANGED
        if _run_may_change("\n".join(new)) and any(map(_changes, new)):
            return True
        if len(_UNCHANGED) + len(new) > _MAX_CACHED:
            _UNCHANGED.clear()
        _UNCHANGED.update([run for run in new if len(run) <= _MAX_CACHED_LENGTH][:_MAX_CACHED])
    return _SPELLED_APART.search(text) is not None


def _changes(run: str) -> bool:
    if not _run_may_change(run):
        return False
    if len(run) > _MAX_CACHED_LENGTH or _SPELLED.search(run) is not None:
        return True  # what is spelled depends on the word before it
    return _loosen_run(run) != lower(run)


def _run_may_change(text: str) -> bool:
    """The same check without words spelled with spaces."""
    lowered = text.lower()
    if (
        FILLER in text
        or any(map(lowered.__contains__, _TRIPLES))
        or _SPELLED.search(text) is not None
    ):
        return True
    return _LEET_SIGN.search(text) is not None and _READ_AS_LETTER.search(text) is not None
