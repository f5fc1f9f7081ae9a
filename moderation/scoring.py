"""Runs the classifier over windows of both views of a text, and keeps the highest scores."""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from moderation.categories import SCORED
from moderation.classifiers.base import Classifier, scores_of_cuts
from moderation.cues import PossibleCues, openai_scores
from moderation.loose import loosen_text, may_change
from moderation.normalise import LOOSE, PLAIN

# The model is trained on short texts; in a longer window the rest hides a short passage.
WINDOW = 400
STRIDE = 340
_GROUP = 16  # windows that are scored in one call


class Scored(Struct, frozen=True):
    """Scores of a text; `start` and `end` are the folded window with the highest score."""

    scores: Mapping[str, float]
    view: str = PLAIN
    start: int = 0
    end: int = 0


def windows(length: int) -> list[tuple[int, int]]:
    """Cut a text of `length` characters into windows that overlap by a fifth."""
    if length <= WINDOW:
        return [(0, length)]
    return [
        (start, min(start + WINDOW, length)) for start in range(0, length - WINDOW + STRIDE, STRIDE)
    ]


def score_windows(classifier: Classifier, text: str) -> list[Scored]:
    """Score every window of a folded text; each Scored has the higher scores of its two views."""
    return [scored for group in scored_groups(classifier, text) for scored in group]


def scored_groups(classifier: Classifier, text: str) -> Iterator[list[Scored]]:
    """The same in groups of nearby windows, so that a caller can pause between them."""
    if len(text) <= WINDOW:
        yield [score_one(classifier, text)]
        return
    cuts = windows(len(text))
    for first in range(0, len(cuts), _GROUP):
        group = cuts[first : first + _GROUP]
        begin = group[0][0]
        near = [(start - begin, end - begin) for start, end in group]
        yield [
            replace(each, start=each.start + begin, end=each.end + begin) if begin else each
            for each in score_cuts(classifier, text[begin : group[-1][1]], near)
        ]


def score_cuts(classifier: Classifier, text: str, cuts: Sequence[tuple[int, int]]) -> list[Scored]:
    """Score the given windows of a folded text in one call of the classifier."""
    rows = scores_of_cuts(classifier, text, cuts)
    possible = PossibleCues(text) if len(cuts) > 1 else None
    if not may_change(text):
        return [
            Scored(openai_scores(row, text[start:end], possible), PLAIN, start, end)
            for row, (start, end) in zip(rows, cuts, strict=True)
        ]
    plain = [text[start:end] for start, end in cuts]
    loose = [loosen_text(piece) for piece in plain]
    changed = [i for i, piece in enumerate(loose) if piece is not plain[i]]
    if changed:
        rows += classifier.score([loose[i] for i in changed]).tolist()
    found = []
    for i, (start, end) in enumerate(cuts):
        scores, view = openai_scores(rows[i], plain[i], possible), PLAIN
        if i in changed:
            second = openai_scores(rows[len(plain) + changed.index(i)], loose[i])
            if max(second.values()) > max(scores.values()):
                view = LOOSE
            scores = {name: max(scores[name], second[name]) for name in SCORED}
        found.append(Scored(scores, view, start, end))
    return found


class Successive:
    """Scores of successive windows of a folded text; the first call scores all of them."""

    def __init__(self, classifier: Classifier, text: str, cuts: Sequence[tuple[int, int]]) -> None:
        self._classifier = classifier
        self._text = text
        self._cuts = cuts
        self._made: deque[Scored] = deque()

    def next(self) -> Scored:
        """The scores of the next window. Raises the classifier's error; the next call then scores
        the rest again."""
        if not self._made:
            cuts, self._cuts = self._cuts, self._cuts[1:]
            self._made.extend(score_cuts(self._classifier, self._text, cuts))
        return self._made.popleft()


def score_one(classifier: Classifier, text: str) -> Scored:
    """Score one window of a folded text in both views."""
    return score_cuts(classifier, text, [(0, len(text))])[0]


def highest(scored: Sequence[Scored]) -> Scored:
    """Combine windows: the highest of each score, and the view of the highest."""
    if not scored:
        return Scored(dict.fromkeys(SCORED, 0.0))
    top = max(scored, key=lambda each: max(each.scores.values()))
    scores = {name: max(each.scores[name] for each in scored) for name in SCORED}
    return Scored(scores, top.view, top.start, top.end)
