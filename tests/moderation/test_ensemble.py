"""The quick arithmetic of the shipped classifier against the plain formula of its two halves."""

import zlib
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from random import Random
from threading import Barrier

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from moderation.classifiers.ensemble import Ensemble
from moderation.classifiers.features import (
    BUCKETS,
    GRAM_BUCKETS,
    MOST_CACHED,
    Lexicon,
    WordNumbers,
    in_word_grams,
    words_of,
)
from moderation.classifiers.load import SHIPPED
from moderation.classifiers.word_contributions import unpack
from moderation.policy import default_policy
from moderation.screener import Screener
from moderation.verdict import ScreenedText

Rows = NDArray[np.float64]
ENSEMBLE = Ensemble.load(SHIPPED)
with np.load(SHIPPED, allow_pickle=False) as _archive:
    STORED = {name: _archive[name] for name in _archive.files}
VOCABULARY = bytes(STORED["vocabulary"]).decode().split("\n")
PLACES = {word: place for place, word in enumerate(VOCABULARY)}
TEXTS = [
    "",
    " \n",
    "a",
    "🙂",
    "kill kill kill the process, kill it",
    "I don't know what xqzzty is, 1234 of them or 日本語 either",
    "the keeper of the old bridge took one coin from every traveller who came that way",
    "aaaa 'tis o'clock's 'x' 9's " * 8,
]


def table(name: str) -> Rows:
    return unpack(STORED, name).astype(np.float64)


def number(text: str) -> int:
    return zlib.crc32(text.encode())


def linear(text: str) -> Rows:
    words, weights = words_of(text), table("linear")
    if not words:
        return table("linear_bias")
    hashes = [number(word) % BUCKETS for word in words]
    pairs = {(a * 1_000_003 + b) % BUCKETS for a, b in pairwise(hashes)} | set(hashes)
    grams = [number(gram) % BUCKETS for word in set(words) for gram in in_word_grams(word)]
    found: Rows = table("linear_bias")
    found += weights[list(pairs)].sum(0) / len(pairs) ** 0.5
    found += weights[BUCKETS:][grams].sum(0) / len(grams) ** 0.5
    return found


def vector(word: str, vectors: Rows, grams: Rows) -> Rows:
    if word in PLACES:
        row: Rows = vectors[PLACES[word]]
        return row
    rows = [number(gram) % GRAM_BUCKETS for gram in in_word_grams(word)[:24]]
    mean: Rows = grams[rows].mean(0)
    return mean


def convolution(text: str) -> Rows:
    vectors, grams = table("vectors"), table("grams")
    nothing = np.zeros(vectors.shape[1])
    words = [vector(word, vectors, grams) for word in words_of(text)] or [nothing]
    features = []
    for width in (1, 2, 3):
        padded = [nothing] * (width - 1) + words + [nothing] * (width - 1)
        phrases = [np.concatenate(padded[i : i + width]) for i in range(len(words) + width - 1)]
        kernel = table(f"phrase{width}")  # by word of the phrase, side by side
        filters = np.concatenate(np.split(kernel, width, axis=1))
        seen = np.maximum(np.stack(phrases) @ filters + table(f"phrase{width}_bias"), 0)
        features += [seen.max(0), 3 * seen.sum(0) / (len(words) + 4)]
    pooled = np.concatenate(features)
    hidden = np.maximum(pooled @ table("hidden") + table("hidden_bias"), 0)
    found: Rows = hidden @ table("out") + table("out_bias")
    found += pooled @ table("direct") + table("direct_bias")
    return found


@pytest.mark.parametrize("text", TEXTS)
def test_both_halves_are_those_of_the_plain_formula(text: str) -> None:
    first, second = ENSEMBLE.halves([text])
    assert np.allclose(first[0], linear(text), atol=1e-5)
    assert np.allclose(second[0], convolution(text), atol=1e-4)


def test_a_full_cache_of_words_changes_no_score() -> None:
    ensemble, texts = Ensemble.load(SHIPPED), [each for each in TEXTS if each.strip()]
    before = ensemble.score(texts)
    for start in range(0, MOST_CACHED + 2_000, 2_000):
        ensemble.score([" ".join(f"zq{letters(place)}" for place in range(start, start + 2_000))])
    assert np.array_equal(ensemble.score(texts), before)


words = st.sampled_from(
    [
        "kill ",
        "the ",
        "don't ",
        "o'clock's",
        "x'y'z ",
        "12345",
        "日本語",
        "🙂",
        "ΟΔΟΣ ",
        "_a_",
        "\n",
        " ",
        ".",
    ]
)


@settings(max_examples=60)
@given(
    st.lists(words, max_size=60).map("".join),
    st.lists(st.tuples(st.integers(0, 300), st.integers(0, 300)), min_size=1, max_size=40),
)
def test_pieces_of_a_text_score_as_texts_of_their_own(
    text: str, places: list[tuple[int, int]]
) -> None:
    cuts = sorted({(min(a, b) % (len(text) + 1), max(a, b)) for a, b in places})
    cuts = [(start, max(start, min(end, len(text)))) for start, end in cuts]
    together = ENSEMBLE.score_cuts(text, cuts)
    assert together == ENSEMBLE.score([text[start:end] for start, end in cuts]).tolist()


def test_a_second_view_that_says_the_same_decides_nothing() -> None:
    screener, policy = Screener(ENSEMBLE), default_policy()
    text = "secret plan-d-e-nchildren of the old mill"
    assert screener.check_input([ScreenedText("user", text)], policy).view == "plain"


def letters(value: int) -> str:
    return "".join(chr(ord("a") + int(digit)) for digit in str(value))


def test_texts_scored_at_the_same_time_have_the_scores_of_each_alone() -> None:
    """More calls at once than the tables have ranges for; new and known words, with evictions."""
    chance = Random(20261123)
    texts = []
    for at in range(240):
        own = [f"zq{letters(at * 150 + place)}" for place in range(150)]
        texts.append(" ".join(chance.sample([*own, *VOCABULARY[:3_000]], 500)))
    alone = [Ensemble.load(SHIPPED).score([text]).tolist() for text in texts[::40]]
    ensemble, begun = Ensemble.load(SHIPPED), Barrier(12)

    def _score(first: int) -> list[list[list[float]]]:
        begun.wait(10)
        return [ensemble.score([text]).tolist() for text in texts[first::12]]

    with ThreadPoolExecutor(12) as pool:
        found = list(pool.map(_score, range(12)))
    together = [found[at % 12][at // 12] for at in range(len(texts))]
    assert together == Ensemble.load(SHIPPED).score(texts)[:, None].tolist()
    assert together[::40] == alone


def test_no_text_takes_the_words_of_another_call() -> None:
    lexicon = Lexicon(WordNumbers((), (3, 3)))
    assert lexicon.numbers(["a", "b", "c"]) == [0, 1, 2]
    with pytest.raises(IndexError, match="do not fit"):
        lexicon.numbers(["d", "e", "f", "g"])
