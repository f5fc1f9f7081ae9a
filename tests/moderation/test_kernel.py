"""The compiled products of the classifier against numpy's and against the plain formula."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moderation.classifiers import ensemble
from moderation.classifiers.ensemble import Ensemble, blend_any_harm
from moderation.classifiers.load import SHIPPED
from moderation.classifiers.word_contributions import unpack
from tests.compiled import built_extension
from tests.moderation.test_ensemble import STORED, TEXTS, convolution, linear

SOURCE = Path(ensemble.__file__).with_name("kernel.c")
FRAGMENTS = [*TEXTS, "kill", " bomb", ".", "how do I", "\n", "x'y", "9", "é", "ß"]


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return built_extension(SOURCE, tmp_path_factory.mktemp("kernel")).Kernel


@pytest.fixture(scope="module")
def both(kernel: Any) -> Iterator[tuple[Ensemble, Ensemble]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ensemble, "Kernel", kernel)
        yield Ensemble.load(SHIPPED, compiled=True), Ensemble.load(SHIPPED, compiled=False)


def plain(text: str) -> list[float]:
    """Probabilities by the plain formula, in float64."""
    slopes, offsets = (unpack(STORED, name).astype(np.float64) for name in ("slopes", "offsets"))
    share = float(unpack(STORED, "share")[0])
    logits = slopes * (share * linear(text) + (1 - share) * convolution(text)) + offsets
    return blend_any_harm((1 / (1 + np.exp(-logits))).tolist())


@pytest.mark.parametrize("text", TEXTS)
def test_it_computes_the_plain_formula(both: tuple[Ensemble, Ensemble], text: str) -> None:
    assert np.allclose(both[0].score([text])[0], plain(text), atol=1e-5)


@settings(max_examples=60)
@given(texts=st.lists(st.lists(st.sampled_from(FRAGMENTS)).map(" ".join), min_size=1, max_size=4))
def test_it_scores_as_numpy_does(both: tuple[Ensemble, Ensemble], texts: list[str]) -> None:
    compiled, numpy = both
    assert np.abs(compiled.score(texts) - numpy.score(texts)).max() <= 1e-6


@settings(max_examples=60)
@given(words=st.lists(st.sampled_from(FRAGMENTS)))
def test_its_probabilities_are_those_of_its_logits(
    both: tuple[Ensemble, Ensemble], words: list[str]
) -> None:
    """To the last bit: equal texts have equal scores with the extension and without it."""
    scorer = both[0]._free[0]
    assert scorer._kernel is not None
    numbers = scorer._words.read(" ".join(words))
    assert scorer._kernel.scores(numbers) == ensemble._probabilities(scorer._kernel.logits(numbers))


@settings(max_examples=60)
@given(st.data())
def test_pieces_score_as_texts_of_their_own(
    both: tuple[Ensemble, Ensemble], data: st.DataObject
) -> None:
    text = " ".join(data.draw(st.lists(st.sampled_from(FRAGMENTS), min_size=1)))
    place = st.integers(0, len(text))
    cuts = sorted(tuple(sorted(pair)) for pair in data.draw(st.lists(st.tuples(place, place))))
    if not cuts:
        return
    pieces = [text[start:end] for start, end in cuts]
    assert both[0].score_cuts(text, cuts) == both[0].score(pieces).tolist()


def test_threads_score_long_texts_at_the_same_time(both: tuple[Ensemble, Ensemble]) -> None:
    texts = [f"{each} kill the process and build a house of {each} bricks " * 80 for each in "abcd"]
    alone = [both[0].score([text]).tolist() for text in texts]
    with ThreadPoolExecutor(4) as threads:
        for _ in range(10):
            found = list(threads.map(lambda text: both[0].score([text]).tolist(), texts))
            assert found == alone


@pytest.mark.parametrize(
    "numbers", [(1, 2), [-1], [10**9], ["word"], [1.5], [2**70], None], ids=repr
)
def test_numbers_of_no_word_are_refused(both: tuple[Ensemble, Ensemble], numbers: Any) -> None:
    scorer = both[0]._free[0]
    assert scorer._kernel is not None
    with pytest.raises((TypeError, ValueError, OverflowError)):
        scorer._kernel.logits(numbers)
    with pytest.raises((TypeError, ValueError, OverflowError)):
        scorer._kernel.scores(numbers)


def test_an_ensemble_without_heads_has_no_scores(kernel: Any) -> None:
    with pytest.raises(ValueError, match="no heads"):
        kernel(tuple(arrays()), 8, (2, 3, 4)).scores([0])


def arrays() -> list[Any]:
    """The smallest that fit: eight buckets, two words, three filters, one feature, one head."""
    of_words = [np.zeros((10, 1), np.float32), np.zeros(2, np.int32), np.ones(2, np.int32)]
    filters = [np.zeros((5, 3), np.float32) for _ in range(3)]
    layer = [np.zeros((7, 1), np.float32), np.zeros(1, np.float32)]
    layer += [np.zeros((2, 1), np.float32), np.zeros(1, np.float32)]
    of_grams = [np.zeros((8, 1), np.float32), np.zeros((4, 2), np.float32)]
    of_grams += [np.zeros((1, 2), np.float32)]
    of_grams += [np.zeros((2, width), np.float32) for width in (1, 2, 3)]
    of_grams += [np.zeros(width, np.float32) for width in (1, 2, 3)]
    return [*of_words, *filters, *layer, *of_grams]


def test_the_smallest_arrays_fit(kernel: Any) -> None:
    assert kernel(tuple(arrays()), 8, (2, 3, 4)).logits([0, 1, 1]) == [0.0]


@pytest.mark.parametrize("at", [at for at in range(19) if at not in (11, 12)])
def test_an_array_of_another_type_or_size_is_refused(kernel: Any, at: int) -> None:
    """It would be read beyond its end."""
    for change in (lambda a: a[:-1], lambda a: a.astype(np.float64), lambda a: a[None]):
        given = arrays()
        given[at] = np.ascontiguousarray(change(given[at]))
        with pytest.raises((TypeError, ValueError)):
            kernel(tuple(given), 8, (2, 3, 4))


@pytest.mark.parametrize(
    ("buckets", "padding"), [(9, (2, 3, 4)), (16, (2, 3, 4)), (8, (2, 3, 5)), (8, (-1, 3, 4))]
)
def test_padding_and_buckets_outside_the_arrays_are_refused(
    kernel: Any, buckets: int, padding: tuple[int, int, int]
) -> None:
    with pytest.raises(ValueError, match="do not fit"):
        kernel(tuple(arrays()), buckets, padding)


def test_too_few_arrays_are_refused(kernel: Any) -> None:
    with pytest.raises(ValueError, match="19 arrays"):
        kernel(tuple(arrays()[:-1]), 8, (2, 3, 4))


@pytest.mark.parametrize(
    "given", [(-1, b"x", 0), (2, b"x", 0), (0, b"x", 8), (0, b"", 0), (0, "é", -1)], ids=repr
)
def test_a_word_outside_the_arrays_is_refused(kernel: Any, given: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        kernel(tuple(arrays()), 8, (2, 3, 4)).add_word(*given)


@settings(max_examples=100)
@given(st.lists(st.text("abcxyz'0189-.", min_size=1, max_size=40), min_size=1, max_size=12))
def test_new_words_score_as_numpy_does(both: tuple[Ensemble, Ensemble], words: list[str]) -> None:
    """Words that no vocabulary has, also longer ones than are read whole."""
    compiled, numpy = both
    text = " ".join(words)
    assert np.abs(compiled.score([text]) - numpy.score([text])).max() <= 1e-6
