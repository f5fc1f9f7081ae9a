"""Looks at a text that grows: whether the classifier finds it clearly harmless.

Both views of the last characters are scored after each token, in whole words. A look is no verdict: it
only says that text can leave before one.
"""

from collections.abc import Mapping, Sequence

from moderation.classifiers.base import Classifier
from moderation.classifiers.windows import ABOVE, LOOSE, Row, RunningWindow, running_window
from moderation.cues import openai_scores
from moderation.loose import LooseText
from moderation.normalise import folded_text

_SQUEEZED = 64  # characters by which the loose view of a window may be shorter


class Looks:
    """Of one channel. `quick`: a look costs so little that it can be made at each token."""

    def __init__(
        self,
        classifier: Classifier,
        limits: Mapping[str, float],
        of_heads: Sequence[float],
        reach: int,
    ) -> None:
        """`limits`: of the categories that redact or block, the scores below which a text is clearly
        harmless; `of_heads`: by head, the lowest of those; `reach`: the characters that are scored."""
        self._classifier = classifier
        self._limits = limits
        self._of_heads = of_heads
        self._reach = reach
        self._plain = self._window()
        self.quick = self._plain.quick
        self._differs = 0  # characters for which the loose view may still differ
        self._loose: RunningWindow | None = None  # while it may, with what it reads:
        self._view = LooseText()
        self._new = ""

    def _window(self) -> RunningWindow:
        return running_window(self._classifier, self._reach, self._of_heads)

    def push(self, text: str) -> None:
        """Continue the text without a look."""
        self._new += text

    def harmless(self, text: str) -> bool:
        """Continue the text; whether each of its scores is below its limit. Raises what the
        classifier raises."""
        new = folded_text(self._new + text if self._new else text)
        self._new = ""
        found = self._plain.read(new)
        if found & LOOSE:
            self._differs = len(new) + self._reach + _SQUEEZED
        loosely = self._differs <= 0 or self._is_harmless_loosely(new)
        return loosely and (found < ABOVE or self._are_below(self._plain.look(), self._plain.text))

    def _are_below(self, row: Row | None, text: str) -> bool:
        if row is None:
            return True
        scores = openai_scores(row, text[-self._reach :])
        return all(scores[name] < limit for name, limit in self._limits.items())

    def _is_harmless_loosely(self, new: str) -> bool:
        if self._loose is None:
            self._loose, self._view = self._window(), LooseText()
            self._loose.add(self._view.add(self._plain.text[-2 * self._reach :]))
        else:
            self._loose.add(self._view.add(new))
        rest = self._view.rest()
        below = self._are_below(self._loose.look(rest), self._loose.text + rest)
        self._differs -= len(new)
        if self._differs <= 0:
            self._loose = None
        return below
