"""The last characters of a text that grows, scored after each token.

A window is made of whole words: those of which some character is among the last `reach`. The compiled
window adds what a token adds and takes away what leaves; the plain one scores its words from scratch.
"""

from collections.abc import Callable, Sequence
from threading import Lock
from typing import Protocol

from moderation.classifiers.base import Classifier
from moderation.classifiers.compiled import Kernel, Window
from moderation.classifiers.features import TOKEN
from moderation.classifiers.word_contributions import WordContributions
from moderation.normalise import lower

Row = list[float]
LOOSE, ABOVE = 1, 2


class RunningWindow(Protocol):
    """`quick`: a look costs about a microsecond, so it can be made at each token."""

    quick: bool
    text: str  # the last characters, at least those of the window

    def add(self, text: str) -> None:
        """Continue the folded text."""

    def read(self, text: str) -> int:
        """Continue it, and look: LOOSE where the loose view of a run that `text` is part of may differ
        in more than letter case, and ABOVE where some score is not below its limit."""

    def look(self, tail: str = "") -> Row | None:
        """The scores of the heads, of the text continued by `tail`, which is not kept; None where
        each is below its limit."""


class PlainWindow:
    """Of any classifier."""

    quick = False

    def __init__(self, classifier: Classifier, reach: int, limits: Sequence[float]) -> None:
        self.text = ""
        self._classifier = classifier
        self._reach = reach
        self._limits = limits

    def add(self, text: str) -> None:
        self.text += text
        if len(self.text) > 2 * self._reach:
            self.text = self._words_of(self.text)

    def read(self, text: str) -> int:
        self.add(text)
        return LOOSE if self.look() is None else LOOSE + ABOVE

    def look(self, tail: str = "") -> Row | None:
        (row,) = self._classifier.score([self._words_of(self.text + tail)]).tolist()
        below = all(score < limit for score, limit in zip(row, self._limits, strict=True))
        return None if below else row

    def _words_of(self, text: str) -> str:
        """The end of a text from the first word on of which some is within reach."""
        begin = len(text) - self._reach
        for found in TOKEN.finditer(lower(text)):
            if found.end() > begin:
                return text[found.start() :]
        return ""


class WindowWords:
    """The lexicon of the compiled windows of a process. Threads use it in turn."""

    def __init__(self, words: WordContributions, kernel: Kernel) -> None:
        self.lock = Lock()
        self.words = words
        self._kernel = kernel
        self._scratch = words.take_number()

    def window(self, reach: int, limits: tuple[float, ...]) -> "Window":
        words = self.words
        known = words.known, words.vocabulary, words.number
        return Window(self._kernel, *known, self._scratch, reach, limits)


class CompiledWindow:
    """A word that is longer than `reach` may be read from within."""

    quick = True

    def __init__(self, words: WindowWords, reach: int, limits: tuple[float, ...]) -> None:
        self.text = ""
        self._words = words
        self._reach = reach
        self._limits = limits
        self._reused = -1
        self._window: Window | None = None
        self._loose = False  # whether the loose view of what the window began with may be another

    def add(self, text: str) -> None:
        self._keep(text)
        with self._words.lock:
            if (window := self._taken()) is None:
                self._begun()
                return
            try:
                window.add(text)
                self._window = window
            except IndexError:  # no room for its new words
                self._begun()

    def read(self, text: str) -> int:
        self._keep(text)
        with self._words.lock:
            if (window := self._taken()) is not None:
                try:
                    found = window.read(text)
                    self._window = window
                    return found
                except IndexError:
                    pass
            return self._begun().read("") + (LOOSE if self._loose else 0)

    def _keep(self, text: str) -> None:
        kept = self.text + text
        self.text = kept if len(kept) < 4 * self._reach else kept[-2 * self._reach :]

    def _taken(self) -> "Window | None":
        """The window, if its words still have their numbers: to be put back once it has read text."""
        window, self._window = self._window, None
        return window if self._reused == self._words.words.reused else None

    def look(self, tail: str = "") -> Row | None:
        with self._words.lock:
            if self._reused == self._words.words.reused and self._window is not None:
                try:
                    return self._window.look(tail)
                except IndexError:
                    pass
            return self._begun().look(tail)

    def _begun(self) -> "Window":
        """A window of the text so far."""
        self._words.words.make_room(8 * self._reach)
        window = self._words.window(self._reach, self._limits)
        self._loose = window.add(self.text)
        self._window, self._reused = window, self._words.words.reused
        return window


def running_window(classifier: Classifier, reach: int, limits: Sequence[float]) -> RunningWindow:
    """Of the last `reach` characters. A classifier with a quick one has `running_window(reach, limits)`;
    `limits` has one for each head."""
    own: Callable[[int, Sequence[float]], RunningWindow | None] | None = getattr(
        classifier, "running_window", None
    )
    made = own(reach, limits) if own is not None else None
    return made or PlainWindow(classifier, reach, limits)
