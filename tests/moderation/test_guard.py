"""The guard: text leaves early, channels and choices are judged apart, memory is bounded."""

from moderation.guard import StreamGuard
from moderation.policy import Mode, Policy, default_policy
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


def test_with_the_classifier_whole_words_leave_while_the_text_is_clearly_harmless() -> None:
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
