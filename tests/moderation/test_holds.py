"""Where an entity may still grow: the same as a search for its head over the whole reach. And where
it is, in a text of ASCII, which is searched as bytes, and in others."""

import re

import hypothesis.strategies as st
from hypothesis import example, given

from moderation.entities import RECOGNISERS, _matcher
from moderation.verdict import Action

MATCHERS = [_matcher(each, Action.REDACT) for each in RECOGNISERS]
pieces = st.text(max_size=6) | st.sampled_from(
    [
        *("word ", "Call +49 (30) 1234-", "DE89 3704 ", "AB1", "A", "ab12", "sk-proj-", "eyJ"),
        *("-", "--", "-----BEGIN", "-----BEGIN RSA PRIVATE KEY-----", "\nMIIEow==\n", "B"),
        *(" ", "\n", "\u00a0", "\u2003", "\x1c", ",", '"', "(", "x" * 300, "1 " * 200),
    ]
)


@given(st.lists(pieces, max_size=9).map("".join), st.integers(0, 400))
@example("", 0)
@example("sk-", 5)
def test_a_hold_is_where_the_search_finds_a_head(text: str, start: int) -> None:
    for matcher in MATCHERS:
        assert matcher.head is not None
        first = max(start, len(text) - matcher.longest)
        found = re.compile(matcher.head.pattern).search(text, first)
        expected = len(text) if found is None else found.start()
        assert matcher.hold(text, start) == expected, matcher.name


digits = st.lists(
    st.sampled_from(["4111 1111 1111 1111", "DE89370400440532013000", "a@b.example", "x", " "])
    | st.text("0123456789 .-@abcXYZ", max_size=12),
    max_size=9,
)


@given(digits.map("".join))
@example("a" * 500 + "sk-proj-" + "aB3dE6gH9" * 60)
def test_a_text_of_ascii_has_the_spans_of_any_other(text: str) -> None:
    for matcher in MATCHERS:
        assert matcher.find(f"{text} ") == matcher.find(f"{text} \u00e9"), matcher.name
