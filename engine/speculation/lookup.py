"""Guesses by prompt look-up: repeated text is expected to continue as it did before.

A cursor follows the earlier text as long as it predicts each new id. Every prediction is compared with
the actual id, submitted as a guess or not, so the acceptance rate is known before a guess costs anything.
"""

from bisect import bisect_right

_LINKS = 4  # earlier places that are compared when a match begins
_COMPARED = 16  # ids compared at each
_EXPECTED = 8  # ids by which an expected beginning counts as matched
_FALL_BACK = 4  # after a match of so many ids the cursor skips a wrong one
_BOUNDS = 4, 8, 16  # of the lengths of a match, by which the shares are kept
_PRIORS = 0.2, 0.5, 0.8, 0.9
_WEIGHT, _KEPT = 3.0, 0.9  # of the priors in predictions; of the earlier ones at each new one


class PromptLookup:
    """Of one sequence. Reads its history, and never more than `most` ids of it in a call."""

    def __init__(self, first: int, prompt_len: int, expected: int | None = None) -> None:
        """first: the earliest position that may be found. expected: the position whose text the output
        is expected to begin with."""
        self._expected = expected
        self._prompt_len = prompt_len
        self._read = first  # positions up to here are indexed
        self._first = first
        self._latest: dict[int, int] = {}  # a pair of ids -> the position after it
        self._earlier: dict[int, int] = {}  # a position -> the one before it with the same pair
        self._cursor = 0  # the position whose id is predicted to come next; 0: none
        self._matched = 0  # ids before the cursor that equal the last ones
        self._right = [_WEIGHT * prior for prior in _PRIORS]
        self._tried = [_WEIGHT] * len(_PRIORS)

    def read(self, history: list[int], most: int) -> int:
        """Follow up to `most` new ids of the history. Returns how many there were."""
        begin, end = self._read, min(len(history), self._read + most)
        for position in range(begin, end):
            if position == self._prompt_len:
                self._expect()
            token = history[position]
            if self._cursor:
                self._compare(history, token, position)
            if position > self._first:
                self._enter(history, token, position)
        self._read = end
        if end == self._prompt_len:
            self._expect()
        return end - begin

    def _expect(self) -> None:
        if self._expected is not None:
            self._cursor, self._matched = self._expected, _EXPECTED
            self._expected = None

    def guesses(
        self, history: list[int], unknown: int, most: int, least: float
    ) -> tuple[list[int], list[float]]:
        """The ids expected after the history and `unknown` more, and the probability that each, and
        all before it, are right: those of a probability of at least `least`. Nothing while the history
        is not read to its end."""
        if not self._cursor or self._read < len(history):
            return [], []
        ids: list[int] = []
        chances: list[float] = []
        likely, period = 1.0, len(history) - self._cursor
        for n in range(unknown + most):
            likely *= self._share(self._matched + n)
            if likely < least:
                break
            ids.append(history[self._cursor + n] if n < period else ids[n - period])
            chances.append(likely)
        return ids[unknown:], chances[unknown:]

    def _share(self, matched: int) -> float:
        which = _class(matched)
        return self._right[which] / self._tried[which]

    def _compare(self, history: list[int], token: int, position: int) -> None:
        right = history[self._cursor] == token
        if position >= self._prompt_len:
            which = _class(self._matched)
            self._right[which] = _KEPT * self._right[which] + right
            self._tried[which] = _KEPT * self._tried[which] + 1
        self._cursor += 1
        if right:
            self._matched += 1
        elif self._matched >= _FALL_BACK:
            self._matched = 1  # perhaps one id was replaced
        else:
            self._cursor = self._matched = 0

    def _enter(self, history: list[int], token: int, position: int) -> None:
        pair = history[position - 1] << 32 | token
        found = self._latest.get(pair)
        if found is not None:
            self._earlier[position + 1] = found
            if self._matched < 2:
                self._begin(history, position + 1, found)
        self._latest[pair] = position + 1

    def _begin(self, history: list[int], end: int, found: int) -> None:
        """Start at the earlier place whose preceding ids agree with the last ones for longest."""
        place: int | None = found
        for _ in range(_LINKS):
            if place is None:
                return
            length = 2
            most = min(_COMPARED, place - self._first)
            while length < most and history[place - 1 - length] == history[end - 1 - length]:
                length += 1
            if length > self._matched:
                self._cursor, self._matched = place, length
            place = self._earlier.get(place)


def _class(matched: int) -> int:
    return bisect_right(_BOUNDS, matched)
