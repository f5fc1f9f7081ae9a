"""Split points of a tokenizer: the same as a comparison of every pair finds, in linear time."""

import re
import sys
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models

from gateway.catalog.codec.split_tokens import split_pattern
from gateway.catalog.codec.tokenizing import TextCodec

tokens = st.lists(st.text("<|ab", min_size=1, max_size=6), min_size=1, max_size=8, unique=True)


def free(candidates: list[str], added: list[str]) -> set[str]:
    """Those whose start no match of a token spans, by trying every place of every pair."""

    def _spans(other: str, token: str) -> bool:
        starts = range(0 if other != token else 1, len(other))
        return any(
            token.startswith(other[at:]) or other.startswith(token, at)
            for at in starts
            if at or other.startswith(token)
        )

    return {each for each in candidates if not any(_spans(other, each) for other in added)}


@settings(max_examples=300)
@given(added=tokens, text=st.text("<|ab", max_size=40), data=st.data())
def test_split_points_are_those_of_every_pair(
    added: list[str], text: str, data: st.DataObject
) -> None:
    candidates = data.draw(st.lists(st.sampled_from(added), unique=True))
    found, expected = split_pattern(candidates, added), free(candidates, added)
    assert {each for each in added if found is not None and found.fullmatch(each)} == expected
    places = {m.start() for each in expected for m in re.finditer(f"(?={re.escape(each)})", text)}
    assert {m.start() for m in found.finditer(text)} == places if found else not places


@pytest.mark.parametrize("count", [300, 2000])
def test_thousands_of_control_tokens_load_in_linear_time(count: int) -> None:
    """Counted in steps of the interpreter, which do not depend on the machine."""
    made = Tokenizer(models.BPE({chr(97 + n): n for n in range(26)}, []))
    made.add_special_tokens([AddedToken(f"<|reserved_{n}|>", special=True) for n in range(count)])
    steps = _steps_of(lambda: TextCodec(made, None, ()))
    assert steps < 4_000 * count


def _steps_of(work: Callable[[], object]) -> int:
    steps = 0

    def _count(frame: object, event: str, argument: object) -> object:
        nonlocal steps
        steps += 1
        return _count

    sys.settrace(_count)  # type: ignore[arg-type]
    try:
        work()
    finally:
        sys.settrace(None)
    return steps
