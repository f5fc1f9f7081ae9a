"""Only what is new is screened; and what was remembered decides exactly as what is screened anew."""

import threading
import tracemalloc
from collections.abc import Mapping, Sequence
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given
from numpy.typing import NDArray

from moderation.categories import HEADS, SCORED
from moderation.classifiers.ensemble import Ensemble
from moderation.classifiers.load import load_classifier
from moderation.policy import Policy, default_policy
from moderation.records import fingerprint, fingerprint_begun, fingerprint_ended
from moderation.screener import Findings, Screener
from moderation.verdict import Action, ScreenedText, Span
from moderation.verdict_cache import VerdictCache

POLICY = Policy.from_dict(
    {
        "input": {
            "deny": [{"text": "zebra", "action": "redact"}, {"text": "yak", "action": "annotate"}],
            "categories": {"violence": {"annotate": 0.4, "redact": 0.6, "block": 0.95}},
        }
    }
)


class Counting:
    """A classifier that counts the characters it scores."""

    version = "counting"

    def __init__(self) -> None:
        self.seen = 0

    def score(self, texts: Sequence[str]) -> NDArray[np.float32]:
        self.seen += sum(map(len, texts))
        row = [0.0] * len(HEADS)
        rows = []
        for text in texts:
            given = list(row)
            given[HEADS.index("violence")] = 0.7 if "fight" in text else 0.1
            rows.append(given)
        return np.array(rows, dtype=np.float32)


pieces = st.sampled_from(["a zebra", "the yak", "a fight", "hello there", "", "x" * 900])
conversations = st.lists(
    st.builds(ScreenedText, st.sampled_from(["user", "assistant", "tool"]), pieces), max_size=8
)


@given(st.lists(conversations, max_size=4))
def test_a_remembered_text_decides_as_a_new_one(turns: list[list[ScreenedText]]) -> None:
    screener, known = Screener(Counting()), VerdictCache(most_bytes=6_000).of("org_1", POLICY)
    for texts in turns:
        anew = screener.check_input(texts, POLICY)
        assert screener.prepare(texts, POLICY, known).run() == anew


longer = st.lists(
    st.builds(ScreenedText, st.sampled_from(["user", "assistant", "tool"]), pieces),
    min_size=7,
    max_size=14,
)


@given(longer, st.data())
def test_a_conversation_that_goes_on_decides_as_a_new_one(
    whole: list[ScreenedText], data: st.DataObject
) -> None:
    """However it was cut before, and whatever was changed at its end, or exchanged for the same
    characters in other texts."""
    screener, known = Screener(Counting()), VerdictCache().of("org_1", POLICY)
    for _ in range(4):
        texts = whole[: data.draw(st.integers(1, len(whole)))]
        if data.draw(st.booleans()):
            texts = [*texts[:-1], ScreenedText("user", data.draw(pieces))]
        if len(texts) > 1 and data.draw(st.booleans()):
            at = data.draw(st.integers(0, len(texts) - 2))
            first, second = texts[at], texts[at + 1]
            joined = ScreenedText(first.role, first.text + second.text)
            texts = [*texts[:at], joined, ScreenedText(second.role, ""), *texts[at + 2 :]]
        tools = data.draw(st.lists(pieces, max_size=3))
        texts = [*texts, *[ScreenedText("tools", each) for each in tools]]
        anew = screener.check_input(texts, POLICY)
        assert screener.prepare(texts, POLICY, known).run() == anew


def test_a_long_conversation_is_one_look_up() -> None:
    screener, cache = Screener(Counting()), VerdictCache()
    texts = [ScreenedText("user", f"{number} a fight") for number in range(40)]
    screener.prepare(texts, POLICY, cache.of("org_1", POLICY)).run()
    asked = cache.of("org_1", POLICY)
    again = screener.prepare([*texts, ScreenedText("user", "next")], POLICY, asked)
    assert (again.unseen, list(asked._asked)) == (4, ["next"])
    assert again.run().flagged == ("violence",)


def test_tools_stand_beside_a_conversation_that_goes_on() -> None:
    screener, cache = Screener(Counting()), VerdictCache()
    tools = [ScreenedText("tools", f"tool {number}") for number in range(9)]
    few, many = ([ScreenedText("user", f"{n} a fight") for n in range(size)] for size in (1, 20))
    for turns in (few, many):
        screener.prepare([*turns, *tools], POLICY, cache.of("org_1", POLICY)).run()
        asked = cache.of("org_1", POLICY)
        again = screener.prepare([*turns, ScreenedText("user", "next"), *tools], POLICY, asked)
        known = [] if turns is many else [each.text for each in turns]
        assert list(asked._asked) == [*known, "next", *[each.text for each in tools]]
        assert again.run().flagged == ("violence",)


def test_no_other_texts_have_the_digest_of_a_beginning() -> None:
    """The same bytes cut otherwise, or with the numbers that end what is hashed as text."""
    cache = VerdictCache()
    tail = (1).to_bytes(8, "little") + (1).to_bytes(8)
    lists = [["a", "b"], ["ab", ""], ["", "ab"], ["ab"], ["a", "b", ""], ["a" + tail.decode()]]
    lists += [[], [""], ["", ""], ["a\0b"], ["a\0b", ""], ["a", "\0b"], ["a\0", "b"], ["a", "b\0"]]
    found = [cache.read_first(each, [len(each)])[0][0] for each in lists]
    assert len(set(found)) == len(lists)
    whole = [str(number) for number in range(9)]
    each = cache.read_first(whole, range(10))[0]
    assert each == [cache.read_first(whole[:n], [n])[0][0] for n in range(10)]


@given(st.lists(st.sampled_from(["", "a", "\0", "b" * 300, "\ud800"]), min_size=7, max_size=12))
def test_a_conversation_is_read_once_for_its_fingerprint_too(texts: list[str]) -> None:
    """Whatever follows the turns, such as the tools' definitions."""
    secret = b"a secret"
    known = VerdictCache(begun=fingerprint_begun(secret)).of("org_1", POLICY)
    assert known.hashed(texts) is None
    known.longest(texts)
    for whole in (texts, [*texts, "tool", "", "\0"], [*texts, ""]):
        hashed = known.hashed(whole)
        assert hashed is not None
        assert fingerprint_ended(hashed, secret) == fingerprint("\0".join(whole), secret)
    assert known.hashed([*texts[:-1], "other"]) is None


def test_a_turn_screens_only_what_is_new() -> None:
    classifier = Counting()
    screener, cache = Screener(classifier), VerdictCache()
    texts: list[ScreenedText] = []
    for number in range(20):
        texts.append(ScreenedText("user", f"{number:04} " + "word " * 60))
        classifier.seen = 0
        work = screener.prepare(texts, POLICY, cache.of("org_1", POLICY))
        assert work.unseen == len(texts[-1].text)
        work.run()
        assert classifier.seen == len(texts[-1].text)


def test_a_tenant_and_a_policy_have_their_own_verdicts() -> None:
    screener, cache = Screener(Counting()), VerdictCache()
    texts = [ScreenedText("user", "a zebra")]
    screener.prepare(texts, POLICY, cache.of("org_1", POLICY)).run()
    other = default_policy()
    for known, unseen in (
        (cache.of("org_1", POLICY), 0),
        (cache.of("org_2", POLICY), 7),
        (cache.of("org_1", other), 7),
    ):
        assert screener.prepare(texts, POLICY, known).unseen == unseen
    assert screener.prepare(texts, other, cache.of("org_1", other)).run().action is Action.ALLOW


def test_the_memory_is_bounded_and_holds_no_text() -> None:
    screener, cache = Screener(Counting()), VerdictCache(most_bytes=17_000)
    known = cache.of("org_1", POLICY)
    for number in range(50):
        screener.prepare([ScreenedText("user", f"secret {number}")], POLICY, known).run()
    assert len(cache) == 10
    assert "secret" not in str(list(cache._entries.items()))
    assert screener.prepare([ScreenedText("user", "secret 49")], POLICY, known).unseen == 0
    assert screener.prepare([ScreenedText("user", "secret 0")], POLICY, known).unseen > 0


def test_a_failed_stage_is_not_remembered() -> None:
    class Broken(Counting):
        def score(self, texts: Sequence[str]) -> NDArray[np.float32]:
            raise RuntimeError

    known = VerdictCache().of("org_1", POLICY)
    texts = [ScreenedText("user", "hello")]
    assert Screener(Broken()).prepare(texts, POLICY, known).run().blocked
    assert Screener(Counting()).prepare(texts, POLICY, known).run().action is Action.ALLOW


def test_a_long_text_has_no_gap() -> None:
    """One short passage, wherever it stands in a text of many windows, is seen."""
    screener = Screener(Counting())
    for at in range(0, 400_000, 9_973):
        text = "word " * (at // 5) + "fight " + "word " * ((400_000 - at) // 5)
        verdict = screener.check_input([ScreenedText("user", text)], POLICY)
        assert verdict.action is Action.REDACT, at


def test_no_call_waits_for_another() -> None:
    """While one call is inside the classifier, another one on a second thread is answered."""
    classifier = load_classifier()
    assert isinstance(classifier, Ensemble)
    borrowed = classifier._borrowed()
    done: list[Any] = []
    other = threading.Thread(target=lambda: done.append(classifier.score(["Hello there"])))
    other.start()
    other.join(30)
    classifier._free.append(borrowed)
    assert done and done[0].shape == (1, len(HEADS))


def test_scorers_agree_and_are_reused() -> None:
    classifier = load_classifier()
    assert isinstance(classifier, Ensemble)
    text = "The quick brown fox sells a large number of unusual zithers. " * 3
    first = classifier.score([text])
    borrowed = classifier._borrowed()
    second = classifier.score([text])
    classifier._free.append(borrowed)
    assert np.array_equal(first, second)
    free = len(classifier._free)  # the classifier is shared: other threads may have added some
    assert free >= 2
    classifier.score([text])
    assert len(classifier._free) == free


@pytest.mark.parametrize("length", [100, 5_000, 80_000])
def test_work_is_done_in_small_steps(length: int) -> None:
    """No step scores more than a few windows, so that large texts can take turns."""
    classifier = Counting()
    work = Screener(classifier).prepare([ScreenedText("user", "word " * (length // 5))], POLICY)
    most = 0
    while True:
        before = classifier.seen
        more = work.step()
        most = max(most, classifier.seen - before)
        if not more:
            break
    assert classifier.seen >= length and most <= 16 * 400


def test_what_is_kept_takes_no_more_than_its_bytes_whatever_was_found() -> None:
    """Long texts have many windows, and some texts many findings."""
    most = 2 << 20
    cache = VerdictCache(most)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for number in range(4_000):
            rows: list[Mapping[str, float]] = [
                {name: number / (7 + row + at) for at, name in enumerate(SCORED)}
                for row in range(20)
            ]
            spans = [
                Span(0, at + 900, at + 990, "email", f"email:{number}:{at}", Action.REDACT)
                for at in range(number % 9)
            ]
            cache.put(("org_1", "v", number.to_bytes(16)), Findings(spans=spans, rows=rows))
        del rows, spans
        taken = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert 0.5 * most < taken < 1.1 * most, f"{taken:,} bytes for {len(cache)} entries"
