"""Cues that are looked for in a text's pieces: the same as if each were a text of its own."""

from hypothesis import given
from hypothesis import strategies as st

from moderation.categories import HEADS
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
