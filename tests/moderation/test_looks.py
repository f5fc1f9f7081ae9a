"""Between checkpoints text leaves only while a score made from scratch is below half of what acts."""

from collections.abc import Mapping

from hypothesis import given, settings
from hypothesis import strategies as st

from moderation.categories import SCORED
from moderation.channel import OUTPUT_WINDOW, checkpoints
from moderation.classifiers.load import load_classifier
from moderation.cues import openai_scores
from moderation.guard import StreamGuard
from moderation.normalise import lower
from moderation.policy import Policy
from moderation.scoring import scores_below
from moderation.screener import Screener
from tests.moderation.helpers import cut
from tests.moderation.test_normalise import read_by_character

SHIPPED = load_classifier()
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
    *("bl00d and gore ", "I want to die ", "hurt", "s.t.a.b ", "x" * 40, " b.c.d "),
]
texts = st.lists(st.sampled_from(PIECES), max_size=60).map("".join)


def scores_from_scratch(text: str) -> Mapping[str, float]:
    """The highest scores of both views of a folded text."""
    found = []
    for view in (text, read_by_character(text)):
        (row,) = SHIPPED.score([view]).tolist()
        found.append(openai_scores(row, view))
    return {name: max(each[name] for each in found) for name in SCORED}


@settings(max_examples=300, deadline=None)
@given(texts, st.dictionaries(st.sampled_from(SCORED), st.floats(0.01, 0.6), min_size=1))
def test_a_look_sees_what_the_scores_from_scratch_say(text: str, limits: dict[str, float]) -> None:
    text = text[-OUTPUT_WINDOW:]
    scores = scores_from_scratch(text)
    expected = all(scores[name] < limit for name, limit in limits.items())
    assert scores_below(SHIPPED, text, limits) is expected


@settings(max_examples=150, deadline=None)
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
            scores = scores_from_scratch(said[-OUTPUT_WINDOW:])
            assert all(scores[name] < limit for name, limit in limits.items())


@settings(max_examples=150, deadline=None)
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


@settings(max_examples=200, deadline=None)
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
