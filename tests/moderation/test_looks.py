"""Between checkpoints text leaves only while a score made from scratch is below half of what acts."""

from collections.abc import Mapping

from hypothesis import given, settings
from hypothesis import strategies as st

from moderation.categories import SCORED
from moderation.channel import OUTPUT_WINDOW, checkpoints
from moderation.classifiers.base import Classifier
from moderation.classifiers.ensemble import Ensemble
from moderation.classifiers.features import TOKEN
from moderation.classifiers.load import SHIPPED as weights
from moderation.classifiers.load import load_classifier
from moderation.cues import openai_scores
from moderation.guard import StreamGuard
from moderation.looks import Looks
from moderation.normalise import lower
from moderation.policy import Policy, Screen, Thresholds
from moderation.screener import Screener
from tests.moderation.helpers import cut
from tests.moderation.test_normalise import read_by_character

SHIPPED = load_classifier()
NUMPY = Ensemble.load(weights, compiled=False)
PIECES = [
    *(
        "the cat sat on the mat. ",
        "a walk by the river, ",
        "word ",
        "What a day! ",
        "mp3 ",
        "\n",
        "a",
    ),
    *(
        "they will kill him, ",
        "k1ll them ",
        "k i l l ",
        "kiiill ",
        "how to make a bomb at home ",
        ".",
    ),
    *("bl00d and gore ", "I want to die ", "hurt", "s.t.a.b ", "x" * 9, " b.c.d ", "don't "),
]
texts = st.lists(st.sampled_from(PIECES), max_size=60).map("".join)


def whole_words(text: str) -> str:
    """From the first word on of which some is among the last characters that are scored."""
    for found in TOKEN.finditer(lower(text)):
        if found.end() > len(text) - OUTPUT_WINDOW:
            return text[found.start() :]
    return ""


def scores_from_scratch(text: str) -> Mapping[str, float]:
    """The highest scores of both views of the last words of a folded text."""
    found = []
    for view in (text, read_by_character(text)):
        (row,) = SHIPPED.score([whole_words(view)]).tolist()
        found.append(openai_scores(row, view[-OUTPUT_WINDOW:]))
    return {name: max(each[name] for each in found) for name in SCORED}


def looks_at(limits: Mapping[str, float], classifier: Classifier = SHIPPED) -> Looks:
    screen = Screen({name: Thresholds(block=2 * at) for name, at in limits.items()})
    return Looks(classifier, screen.clearly_harmless, screen.harmless_heads, OUTPUT_WINDOW)


@settings(max_examples=80, deadline=None)
@given(
    texts,
    st.lists(st.integers(0, 2_000), max_size=60),
    st.dictionaries(st.sampled_from(SCORED), st.floats(0.01, 0.6), min_size=1),
    st.data(),
)
def test_a_look_sees_what_the_scores_from_scratch_say(
    text: str, places: list[int], limits: dict[str, float], data: st.DataObject
) -> None:
    """Compiled or not, however the text comes, and whether each piece is looked at or not."""
    found, said = [looks_at(limits), looks_at(limits, NUMPY)], ""
    for piece in cut(text, places):
        said += piece
        if not data.draw(st.booleans()):
            for looks in found:
                looks.push(piece)
            continue
        scores = scores_from_scratch(said)
        if min(abs(scores[name] - limit) for name, limit in limits.items()) < 1e-4:
            return  # too close for arithmetic of another order
        expected = all(scores[name] < limit for name, limit in limits.items())
        assert [looks.harmless(piece) for looks in found] == [expected, expected]


@settings(max_examples=60, deadline=None)
@given(texts, st.lists(st.integers(0, 1_500), max_size=60), st.floats(0.1, 0.9))
def test_what_leaves_between_checkpoints_is_clearly_harmless(
    text: str, places: list[int], block: float
) -> None:
    screen = {"categories": {"violence": {"block": block}, "illicit": {"redact": 0.9}}}
    guard = StreamGuard(Policy.from_dict({"output": screen}), Screener(SHIPPED))
    limits = {"violence": 0.5 * block, "illicit": 0.45}
    said, left = "", 0
    for piece in cut(text, places):
        said += piece
        release = guard.feed(0, piece)
        if release.blocked or guard.cuts(0):
            return
        left += len(release.text)
        if release.text and left > max(checkpoints(said, 0, 0), default=0):
            scores = scores_from_scratch(said)
            assert all(scores[name] < limit + 1e-4 for name, limit in limits.items())


@settings(max_examples=60, deadline=None)
@given(texts, st.lists(st.integers(1, 9), min_size=1, max_size=40))
def test_what_needs_more_characters_releases_nothing_before(text: str, sizes: list[int]) -> None:
    """Fed piece by piece, or once as many characters are there as were asked for: the same text has
    left after each of those."""
    policy = Policy.from_dict({"output": {"categories": {"violence": {"block": 0.9}}}})
    alone, together = [StreamGuard(policy, Screener(SHIPPED)) for _ in range(2)]
    waiting, at, turn, left = "", 0, 0, [0, 0]
    while at < len(text):
        piece = text[at : at + sizes[turn % len(sizes)]]
        at, turn, waiting = at + len(piece), turn + 1, waiting + piece
        release = alone.feed(0, piece)
        left[0] += len(release.text)
        if len(waiting) >= together.needed(0):
            again = together.feed(0, waiting)
            left[1], waiting = left[1] + len(again.text), ""
            assert again.blocked is release.blocked
        assert left[0] == left[1] and not (waiting and release.blocked)
        if release.blocked:
            return


def test_the_checks_fail_where_anything_is_let_through() -> None:
    """The oracle tells harm from none, with the very words of these tests."""
    assert scores_from_scratch("they will kill him, " * 4)["violence"] > 0.5
    assert scores_from_scratch("the cat sat on the mat. ")["violence"] < 0.1
    assert lower("K1LL") != read_by_character("K1LL") == "kill"


@settings(max_examples=80, deadline=None)
@given(texts, st.lists(st.integers(0, 1_500), max_size=6), st.floats(0.05, 0.9), st.booleans())
def test_the_last_piece_is_released_alike_without_a_look(
    text: str, places: list[int], block: float, whole: bool
) -> None:
    screen = {
        "categories": {"violence": {"block": block}, "illicit": {"redact": 0.9}},
        "deny": [{"text": "hurt", "action": "redact"}],
    }
    policy = Policy.from_dict({"mode": "full" if whole else "window", "output": screen})
    pieces = [each for each in cut(text, places) if each]
    found = []
    for last in (False, True):
        guard = StreamGuard(policy, Screener(SHIPPED))
        said = [
            guard.feed(0, piece, last=last and number == len(pieces))
            for number, piece in enumerate(pieces, 1)
        ]
        said.append(guard.finish(0))
        sent, blocked = "".join([each.text for each in said]), said[-1].blocked
        found.append((sent, blocked, guard.cuts(0), guard.verdict()))
    assert found[0] == found[1]
