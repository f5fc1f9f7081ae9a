"""The compiled window and loose view against the plain ones, which read their text from scratch."""

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moderation.categories import HEADS
from moderation.classifiers import ensemble, windows
from moderation.classifiers.base import Classifier
from moderation.classifiers.ensemble import Ensemble
from moderation.classifiers.features import MOST_CACHED
from moderation.classifiers.load import SHIPPED
from moderation.classifiers.windows import (
    ABOVE,
    LOOSE,
    CompiledWindow,
    PlainWindow,
    running_window,
)
from moderation.loose import PlainLooseText, loosen_text
from moderation.normalise import lower
from tests.compiled import built_extension
from tests.moderation.helpers import WordClassifier, cut
from tests.moderation.test_kernel import SOURCE

FRAGMENTS = [
    *("the cat ", "kill", " him", "bomb", ". ", "don't", "'", "x'y", "'s", "rock'n'roll", "''"),
    *(
        "12",
        "a1b2",
        "3rd ",
        "HOW do I ",
        "\n",
        "\t ",
        "é",
        "ß",
        "漢字かな",
        "🙂",
        "\u2800",
        "_",
        "-",
    ),
    *(
        "aaa",
        "b" * 30,
        "q",
        "z ",
        "€",
        "k1ll",
        "f.o.o.d",
        "i j k ",
        "Ω",
        "4 8 ",
        "*",
        "!",
        "unseenword",
    ),
]
texts = st.lists(st.sampled_from(FRAGMENTS), max_size=120).map("".join)
places = st.lists(st.integers(0, 3_000), max_size=80)
ALL = (-1.0,) * len(HEADS)  # limits that every score is above


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return built_extension(SOURCE, tmp_path_factory.mktemp("windows"))


@pytest.fixture(scope="module")
def classifier(kernel: Any) -> Iterator[Ensemble]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ensemble, "Kernel", kernel.Kernel)
        patch.setattr(windows, "Window", kernel.Window)
        yield Ensemble.load(SHIPPED, compiled=True)


def compiled_window(classifier: Ensemble, reach: int, limits: tuple[float, ...]) -> CompiledWindow:
    made = running_window(classifier, reach, limits)
    assert isinstance(made, CompiledWindow)
    return made


def far(one: list[float] | None, other: list[float] | None) -> float:
    assert one is not None and other is not None
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


@settings(max_examples=60, deadline=None)
@given(texts, places, st.sampled_from(FRAGMENTS), st.sampled_from([40, 400]))
def test_a_window_that_grows_scores_as_one_from_scratch(
    classifier: Ensemble, text: str, cuts: list[int], tail: str, reach: int
) -> None:
    compiled, plain = compiled_window(classifier, reach, ALL), PlainWindow(classifier, reach, ALL)
    for piece in cut(text, cuts):
        compiled.read(piece)
        plain.add(piece)
        assert far(compiled.look(), plain.look()) < 1e-5
        assert far(compiled.look(tail), plain.look(tail)) < 1e-5
        assert far(compiled.look(), plain.look()) < 1e-5


@settings(max_examples=50, deadline=None)
@given(texts, places, st.data())
def test_words_that_lose_their_numbers_are_read_again(
    classifier: Ensemble, text: str, cuts: list[int], data: st.DataObject
) -> None:
    compiled, plain = compiled_window(classifier, 100, ALL), PlainWindow(classifier, 100, ALL)
    words = classifier._window_words
    assert words is not None
    for piece in cut(text, cuts):
        if data.draw(st.booleans()):
            words.words.make_room(MOST_CACHED)
            other = compiled_window(classifier, 100, ALL)  # which takes the numbers
            other.add("some qwxyz zyxwq words brzt")
        compiled.add(piece)
        plain.add(piece)
        assert far(compiled.look(), plain.look()) < 1e-5


def test_a_lexicon_that_is_full_makes_room(classifier: Ensemble) -> None:
    compiled, plain = compiled_window(classifier, 400, ALL), PlainWindow(classifier, 400, ALL)
    words = classifier._window_words
    assert words is not None
    before = words.words.reused
    for number in range(14_000):
        spelled = f"w{''.join(chr(97 + int(digit)) for digit in str(number))} "
        compiled.read(spelled)
        plain.add(spelled)
    assert words.words.reused > before
    assert far(compiled.look(), plain.look()) < 1e-5


@settings(max_examples=60, deadline=None)
@given(texts, st.floats(0.0, 1.0), st.integers(0, len(HEADS) - 1))
def test_limits_are_those_of_the_heads(
    classifier: Ensemble, text: str, limit: float, head: int
) -> None:
    limits = tuple(limit if at == head else 2.0 for at in range(len(HEADS)))
    row = compiled_window(classifier, 400, ALL)
    row.add(text)
    scores = row.look()
    assert scores is not None
    window = compiled_window(classifier, 400, limits)
    assert bool(window.read(text) & ABOVE) is (scores[head] >= limit)
    assert (window.look() is None) is (scores[head] < limit)


@settings(max_examples=80, deadline=None)
@given(texts, places)
def test_what_is_not_told_as_loose_has_the_same_loose_view(
    classifier: Ensemble, text: str, cuts: list[int]
) -> None:
    window = compiled_window(classifier, 400, ALL)
    told = [window.read(piece) & LOOSE for piece in cut(text, cuts)]
    assert any(told) or lower(loosen_text(text)) == lower(text)


def test_ordinary_text_is_not_told_as_loose(classifier: Ensemble) -> None:
    window = compiled_window(classifier, 400, ALL)
    text = (
        "What a day! No. 3 of 12: it costs $150, 48/2 = 24 (e.g. 5 + 3) and so on... --- I am a man"
    )
    assert not any(window.read(f" {word}") & LOOSE for word in text.split(" "))
    assert window.read(" k1ll") & LOOSE


@settings(max_examples=100)
@given(texts, places)
def test_the_loose_view_is_the_same_however_a_text_is_cut(
    kernel: Any, text: str, cuts: list[int]
) -> None:
    compiled, plain, read = kernel.LooseText(), PlainLooseText(), ""
    for piece in cut(text, cuts):
        added = compiled.add(piece)
        assert added == plain.add(piece)
        assert compiled.rest() == plain.rest()
        read += added
    whole = PlainLooseText()
    assert read + compiled.rest() == whole.add(text) + whole.rest()


def test_a_classifier_without_one_has_the_plain_window() -> None:
    classifier: Classifier = WordClassifier(violence="poison")
    window = running_window(classifier, 30, (0.5,) * len(HEADS))
    assert not window.quick
    assert window.read("a poison ") == LOOSE + ABOVE
    assert window.read("and then a long walk by the river ") == LOOSE


@pytest.mark.parametrize("given", [b"bytes", 3, None])
def test_what_is_no_text_is_refused(kernel: Any, classifier: Ensemble, given: Any) -> None:
    words = classifier._window_words
    assert words is not None
    window = words.window(400, ALL)
    for call in (window.add, window.read, window.look, kernel.LooseText().add):
        with pytest.raises(TypeError):
            call(given)


@pytest.mark.parametrize(("reach", "limits"), [(0, ALL), (400, ALL[1:]), (400, (*ALL, 1.0))])
def test_a_window_that_does_not_fit_is_refused(
    classifier: Ensemble, reach: int, limits: tuple[float, ...]
) -> None:
    assert classifier._window_words is not None
    with pytest.raises(ValueError, match="does not fit"):
        classifier._window_words.window(reach, limits)
