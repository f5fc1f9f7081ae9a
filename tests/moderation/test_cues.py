"""Cues that are looked for in a text's pieces: the same as if each were a text of its own."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moderation import cues
from moderation.categories import HEADS, SCORED
from moderation.cues import PossibleCues, openai_scores

HIGH = [0.9] * len(HEADS)
FRAGMENTS = (
    *(
        "kill",
        "killer ",
        "skill ",
        "my ",
        "I ",
        "child",
        "ren ",
        "15 years old ",
        "how to ",
        "hang",
    ),
    *("gun", "s ", "gore ", "a walk ", "suicid", "al ", "bloody", "\n", ".", "ΟΔΟΣ "),
)
words = st.sampled_from(FRAGMENTS)


@given(st.lists(words, max_size=30).map("".join), st.integers(0, 200), st.integers(0, 200))
def test_a_piece_has_the_cues_that_it_has_alone(text: str, one: int, other: int) -> None:
    start, end = sorted((one, other))
    possible = PossibleCues(text)
    for piece in (text[start:end], text[:end], text[start:], text):
        assert openai_scores(HIGH, piece, possible) == openai_scores(HIGH, piece)


def test_a_cue_that_the_text_lacks_is_not_possible() -> None:
    calm = PossibleCues("a walk by the river")
    scores = openai_scores(HIGH, "they kill", calm)
    assert (
        scores["harassment/threatening"]
        < openai_scores(HIGH, "they kill")["harassment/threatening"]
    )


def searched(text: str) -> dict[str, float]:
    """The scores with every cue searched for, without a look at stems."""
    found = {}
    for name in SCORED:
        cue = cues._CUES.get(name)
        held = cue is None or cue.search(text.lower()) is not None
        found[name] = HIGH[HEADS.index(name.partition("/")[0])] * (1 if held else 0.1)
    return found


@given(st.lists(words, max_size=30).map("".join))
def test_stems_change_no_score(text: str) -> None:
    assert openai_scores(HIGH, text) == pytest.approx(searched(text))


@pytest.mark.parametrize("name", sorted(cues._CUES))
def test_every_match_of_a_cue_has_one_of_its_stems(name: str) -> None:
    cue = cues._CUES[name]

    @settings(max_examples=150, deadline=None)
    @given(st.from_regex(re.compile(cue.pattern, cue.flags & re.DOTALL | re.ASCII)))
    def _has_one(text: str) -> None:
        if cue.search(text.lower()) is not None:
            assert cue in PossibleCues(text)
            assert openai_scores(HIGH, text)[name] == 0.9

    _has_one()


def _alternatives(pattern: str) -> list[str]:
    """The words of the outermost group of a cue."""
    inner, depth, found = (
        pattern.removeprefix(r"\b(?:").removesuffix(")").removesuffix(r")\b"),
        0,
        [""],
    )
    for character in inner:
        depth += {"(": 1, ")": -1}.get(character, 0)
        if character == "|" and depth == 0:
            found.append("")
        else:
            found[-1] += character
    return found


@pytest.mark.parametrize(
    "cue", [cues._THREAT, cues._MINORS, cues._GRAPHIC, cues._INSTRUCTIONS, cues._VIOLENT_MEANS]
)
def test_each_alternative_of_a_cue_is_possible(cue: re.Pattern[str]) -> None:
    """Each by itself: a random example of the whole seldom takes the rare ones."""
    alternatives = _alternatives(cue.pattern)
    assert len(alternatives) > 5
    for each in alternatives:

        @settings(max_examples=25, deadline=None)
        @given(st.from_regex(re.compile(each, re.ASCII), fullmatch=True))
        def _possible(text: str) -> None:
            if cue.search(text.lower()) is not None:
                assert cue in PossibleCues(text), text

        _possible()
