"""The guard: text leaves early, channels and choices are judged apart, memory is bounded."""

import itertools
import re
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moderation.classifiers.compiled import is_compiled
from moderation.classifiers.load import load_classifier
from moderation.errors import BadPolicy
from moderation.guard import Holds, StreamGuard
from moderation.policy import LONGEST_HOLD, SHORTEST_HOLD, Mode, Policy, default_policy
from moderation.screener import Screener
from moderation.verdict import Action
from tests.moderation.helpers import BrokenClassifier, WordClassifier, stream

DENY = Policy.from_dict({"output": {"deny": ["forbidden"], "categories": {}, "entities": {}}})
SCREENER = Screener(WordClassifier(violence="poison"))
STRICT = Policy.from_dict({"output": {"categories": {"violence": {"block": 0.9}}}})


def test_a_harmless_first_piece_leaves_at_once() -> None:
    guard = StreamGuard(default_policy(), SCREENER)
    assert guard.feed(0, "Hello").text == "Hello"


def test_a_harmful_first_piece_does_not_leave() -> None:
    guard = StreamGuard(STRICT, SCREENER)
    assert guard.feed(0, "Take poison").text == ""
    assert guard.finish(0).blocked


def test_what_no_rule_can_still_match_leaves_piece_by_piece() -> None:
    """By rules alone: what may be the beginning of a match is held, and each piece lets text leave."""
    guard = StreamGuard(DENY, Screener())
    pieces = [*(f" word{number}" for number in range(40)), " for", " ever", " and", " a day"]
    behind = 0
    for piece in pieces:
        left = guard.feed(0, piece).text
        behind += len(piece) - len(left)
        assert left and behind <= len("forbidden")


def test_slow_looks_let_text_leave_while_it_is_clearly_harmless() -> None:
    pieces = [f" word{number}" for number in range(120)]
    guard = StreamGuard(STRICT, SCREENER)
    left = [guard.feed(0, piece).text for piece in pieces]
    assert sum(map(bool, left)) > len(pieces) / 3
    assert guard.held(0) <= 32  # half a stride
    whole, verdict, blocked = stream(STRICT, ["".join(pieces)], SCREENER)
    assert whole == "".join(left) + guard.finish(0).text
    assert (guard.verdict().scores, blocked) == (verdict.scores, False)


def test_nothing_leaves_between_checkpoints_from_the_first_harmful_word_on() -> None:
    guard, said, left = StreamGuard(STRICT, SCREENER), "", ""
    for piece in [*["and "] * 40, "poison ", *["too "] * 40]:
        said += piece
        release = guard.feed(0, piece)
        left += release.text
        if release.blocked:
            break
    assert release.blocked
    assert said.startswith(left) and "poison" not in left
    assert guard.verdict().action is Action.BLOCK


def test_a_redaction_by_score_hides_what_has_not_left() -> None:
    policy = Policy.from_dict({"output": {"categories": {"violence": {"redact": 0.9}}}})
    left, _, blocked = stream(policy, [*["and "] * 12, "poison ", *["too "] * 40], SCREENER)
    assert not blocked
    assert "poison" not in left and left.startswith("and ") and "[REDACTED]" in left


def test_a_look_that_fails_is_left_to_the_checkpoint() -> None:
    guard = StreamGuard(STRICT, Screener(BrokenClassifier()))
    assert guard.feed(0, "Hello").text == ""
    assert guard.finish(0).blocked


def test_a_term_over_two_pieces_is_caught() -> None:
    left, verdict, blocked = stream(DENY, ["this is forb", "idden ", "fruit"])
    assert (left, blocked, verdict.action) == ("this is ", True, Action.BLOCK)


def test_tool_arguments_are_guarded_too() -> None:
    guard = StreamGuard(DENY, Screener())
    assert guard.feed(0, "all is well. ").text.startswith("all is well")
    assert not guard.feed(0, '{"q": "forb', ("tool", 0)).blocked
    guard.feed(0, 'idden"}', ("tool", 0))
    assert guard.finish(0, ("tool", 0)).blocked
    assert guard.feed(0, "more").blocked, "a choice that is blocked stays blocked on every channel"
    assert guard.channels(0) == ["content", ("tool", 0)]


def test_choices_are_judged_apart() -> None:
    guard = StreamGuard(DENY, Screener())
    guard.feed(0, "forbidden ")
    assert guard.finish(0).blocked
    assert guard.channels(1) == []
    guard.feed(1, "fine ")
    assert not guard.finish(1).blocked


def test_after_a_block_nothing_more_leaves() -> None:
    guard = StreamGuard(STRICT, SCREENER)
    released = [guard.feed(0, "poison and more words of it ") for _ in range(20)]
    assert released[-1].blocked
    assert "".join(each.text for each in released) == ""


def test_a_redaction_stands_in_the_place_of_what_it_hides() -> None:
    policy = Policy.from_dict({"output": {"categories": {}, "entities": {"email": "redact"}}})
    left, verdict, _ = stream(policy, ["write to bob@", "example", ".com today"])
    assert left == "write to [EMAIL] today"
    assert [(span.start, span.end) for span in verdict.spans] == [(9, 24)]


def test_an_off_policy_passes_everything() -> None:
    policy = Policy(name="off", roles=frozenset(), mode=Mode.OFF)
    left, verdict, blocked = stream(policy, ["anything ", "at all"])
    assert (left, verdict.action, blocked) == ("anything at all", Action.ALLOW, False)


def test_a_broken_classifier_closes_the_stream_or_leaves_it_unscanned() -> None:
    chunks = ["word " * 30]
    _, closed, blocked = stream(STRICT, chunks, Screener(BrokenClassifier()))
    assert (blocked, closed.flagged) == (True, ("classifier_failed",))
    document = {"output": {"categories": {"violence": {"block": 0.9}}}}
    opened = Policy.from_dict({**document, "on_error": {"classifier": "open"}})
    left, verdict, blocked = stream(opened, chunks, Screener(BrokenClassifier()))
    assert (left, blocked, verdict.unscanned) == (chunks[0], False, ("classifier",))


def test_a_whole_answer_is_judged_as_its_stream_is() -> None:
    text = "some calm words first, and then a forbidden one"
    _, whole, _ = stream(DENY, [text])
    _, streamed, _ = stream(DENY, list(text))
    assert (whole.action, whole.flagged, whole.spans) == (
        streamed.action,
        streamed.flagged,
        streamed.spans,
    )


def test_a_long_stream_keeps_little() -> None:
    guard = StreamGuard(DENY, Screener(WordClassifier()))
    released = 0
    for _ in range(4_000):
        released += len(guard.feed(0, "twenty calm letters ").text)
    assert released + guard.held(0) == 80_000
    channel = guard._channels[0, "content"]
    assert len(channel._fold.view().text) < 8_000
    assert len(channel._loose.view().text) < 8_000


EVERYDAY = Path(__file__).parents[2] / "moderation/classifiers/synthetic/everyday.txt"


def everyday_pieces() -> list[str]:
    """Sentences that no weight was trained on, as tokens of a few letters."""
    lines = [line for line in EVERYDAY.read_text("utf-8").splitlines() if line[:1] not in ("", "#")]
    return re.findall(r"\s?\w{1,5}|\s?[^\w\s]|\s", " ".join(lines))


def test_everyday_text_leaves_with_its_token() -> None:
    pieces = everyday_pieces()
    guard = StreamGuard(default_policy(), Screener(load_classifier()))
    left = [bool(guard.feed(0, piece).text) for piece in pieces]
    assert len(pieces) > 1_000 and left[0]
    assert not is_compiled() or sum(left) >= 0.95 * len(pieces)
    holds = guard.holds()
    assert holds.by_rule == 0 and holds.longest <= LONGEST_HOLD
    assert holds.by_score == sum(
        1 for before, now in pairwise([True, *left]) if before and not now
    ), "a hold begins with the first piece that does not leave"


@given(st.lists(st.integers(1, 12), min_size=1), st.integers(SHORTEST_HOLD, LONGEST_HOLD))
def test_a_policy_bounds_how_long_text_waits(sizes: list[int], longest: int) -> None:
    """Where every look finds harm, and no verdict does."""
    document = {"longest_hold": longest, "output": {"categories": {"violence": {"block": 1.0}}}}
    policy = Policy.from_dict(document)
    assert Policy.from_dict(policy.to_dict()) == policy
    guard, waits, text = StreamGuard(policy, SCREENER), 0, "poison" * 100 + " " + "and poison " * 60
    for size in itertools.cycle(sizes):
        piece, text = text[:size], text[size:]
        if not piece:
            break
        waits += len(piece) - len(guard.feed(0, piece).text)
        assert waits == guard.held(0) <= longest
    assert guard.holds().by_score and guard.holds().longest <= longest


def test_a_policy_without_a_bound_keeps_its_version() -> None:
    assert "longest_hold" not in default_policy().to_dict()
    for wrong in (31, 257, "64", True):
        with pytest.raises(BadPolicy, match="longest_hold: expected a whole number from 32 to 256"):
            Policy.from_dict({"longest_hold": wrong})


def test_holds_of_rules_are_counted_apart() -> None:
    document = {"output": {"categories": {}, "entities": {"email": "redact"}}}
    guard = StreamGuard(Policy.from_dict(document), Screener())
    for piece in ("mail ", "bob", "@exam", "ple ", "and ", "joe", "@ "):
        guard.feed(0, piece)
    assert guard.holds() == Holds(by_score=0, by_rule=2, longest=len("bob@exam"))
