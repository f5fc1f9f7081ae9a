"""Invariant: the same verdict however a text is cut, and no flagged character leaves."""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from moderation.classifiers.load import load_classifier
from moderation.policy import Policy
from moderation.screener import Screener
from moderation.verdict import Action, ScreenedText
from tests.moderation.helpers import WordClassifier, cut, stream

FRAGMENTS = [
    "the cat sat on the mat. ",
    "forbidden",
    "forbidden fruit",
    "f0rbidden ",
    "forrrrbidden ",
    "fоrbidden ",  # a Cyrillic o
    "for\u200bbid\u0301den ",
    "f o r b i d d e n ",
    "f.o.r.b.i.d.d.e.n",
    "f-0-r-b-i-d",
    "-d-e-n",
    "secret plan",
    "secret\n\tplan ",
    "secret ",
    " plan",
    "sec\u3164ret\u2800plan",
    "secret\u3164",
    " " * 40,
    "secret planet ",
    "bob@example.com ",
    "bob@example",
    ".org",
    "4111 1111 1111 1111 ",
    "4111 1111 ",
    "536-90-4399 ",
    "+1 415 555 0132, ",
    "GB82 WEST 1234 5698 7654 32 ",
    "project-x-12345",
    "project-",
    "poison ",
    "ok\n",
    "é\u0301\u0302 ",
    "🙂 ",
    " ",
    "a",
    "7",
    ".",
]
texts = st.lists(st.sampled_from(FRAGMENTS), max_size=40).map("".join)
cuts = st.lists(st.integers(0, 2_000), max_size=60)


def policy(action: str, **more: object) -> Policy:
    screen = {
        "deny": [
            {"text": "forbidden", "action": action},
            {"text": "secret plan", "action": action},
        ],
        "allow": ["forbidden fruit"],
        "entities": dict.fromkeys(("email", "card", "us_ssn", "phone", "iban"), action),
        "patterns": [
            {"name": "p", "pattern": r"project-[a-z]-\d{3,9}", "action": action, "longest": 24}
        ],
        "categories": {"violence": {"annotate": 0.5, "block": 0.9}},
    }
    return Policy.from_dict({"output": screen, **more})


REDACTING = policy("redact")
BLOCKING = policy("block")
NOTING = policy("annotate")
RULES = Screener()
SCREENER = Screener(WordClassifier(violence="poison"))


SHIPPED = Screener(load_classifier())
SCORED = Policy.from_dict(
    {"output": {"categories": {"violence": {"annotate": 0.2, "redact": 0.6, "block": 0.97}}}}
)


def facts(
    policy: Policy, chunks: list[str], screener: Screener = SCREENER, before: str = ""
) -> tuple[object, ...]:
    left, verdict, blocked = stream(policy, chunks, screener, before)
    return (
        left if not blocked else "",
        blocked,
        verdict.action,
        verdict.would,
        verdict.flagged,
        verdict.spans,
        verdict.scores,
    )


@settings(max_examples=100)
@given(texts, cuts, st.sampled_from([REDACTING, BLOCKING, NOTING]))
def test_any_chunking_gives_the_verdict_of_the_whole_text(
    text: str, places: list[int], policy: Policy
) -> None:
    assert facts(policy, cut(text, places)) == facts(policy, [text])


long_texts = st.lists(
    st.sampled_from([*FRAGMENTS, "and then they will kill him, ", "a walk by the river, "]),
    min_size=30,
    max_size=120,
).map("".join)


@settings(max_examples=60)
@given(long_texts, cuts)
def test_the_shipped_classifier_scores_any_chunking_alike(text: str, places: list[int]) -> None:
    assert facts(SCORED, cut(text, places), SHIPPED) == facts(SCORED, [text], SHIPPED)


@settings(max_examples=60)
@given(texts)
def test_one_character_at_a_time_is_no_different(text: str) -> None:
    for policy in (REDACTING, BLOCKING):
        assert facts(policy, list(text)) == facts(policy, [text])


def bare(text: str) -> str:
    """The text without the marks of redactions."""
    for word in ("DENY_LIST", "EMAIL", "CARD", "US_SSN", "PHONE", "IBAN", "PATTERN"):
        text = text.replace(f"[{word}]", "")
    return text


@settings(max_examples=100)
@given(texts, cuts)
def test_no_flagged_character_leaves(text: str, places: list[int]) -> None:
    left, verdict, blocked = stream(REDACTING, cut(text, places), SCREENER)
    spans = [span for span in verdict.spans if span.action is Action.REDACT]
    kept = "".join(
        character
        for place, character in enumerate(text)
        if not any(span.start <= place < span.end for span in spans)
    )
    assert bare(left) == kept if not blocked else kept.startswith(bare(left))


@settings(max_examples=100)
@given(texts, texts, cuts, st.sampled_from([REDACTING, BLOCKING]))
def test_a_continued_text_is_judged_with_what_it_continues(
    before: str, text: str, places: list[int], policy: Policy
) -> None:
    """Rules alone: the classifier reads the new text only."""
    left, _, blocked = stream(policy, cut(text, places), RULES, before)
    assert facts(policy, cut(text, places), RULES, before) == facts(policy, [text], RULES, before)
    whole = Screener().check_input(
        [ScreenedText("user", before + text)], replace(policy, input=policy.output)
    )
    flagged = {
        place - len(before)
        for span in whole.spans
        if span.action >= Action.REDACT
        for place in range(max(span.start, len(before)), span.end)
    }
    if policy is BLOCKING:
        assert blocked == bool(flagged)
        assert text.startswith(left) and len(left) <= min(flagged, default=len(text))
    else:
        kept = "".join(c for place, c in enumerate(text) if place not in flagged)
        assert bare(left) == kept


@settings(max_examples=100)
@given(texts, cuts)
def test_a_block_stops_before_the_first_flagged_character(text: str, places: list[int]) -> None:
    left, verdict, blocked = stream(BLOCKING, cut(text, places), SCREENER)
    starts = [span.start for span in verdict.spans if span.action is Action.BLOCK]
    assert text.startswith(left)
    if starts:
        assert blocked and len(left) <= min(starts)
    if not blocked:
        assert left == text


@settings(max_examples=60)
@given(texts, cuts)
def test_full_mode_lets_nothing_leave_before_the_end(text: str, places: list[int]) -> None:
    full = policy("block", mode="full")
    left, verdict, blocked = stream(full, cut(text, places), SCREENER)
    assert left == ("" if blocked else text)
    assert verdict.action == stream(BLOCKING, [text], SCREENER)[1].action


@settings(max_examples=60)
@given(texts, cuts)
def test_async_mode_delivers_everything_and_only_notes(text: str, places: list[int]) -> None:
    noting = policy("block", mode="async")
    left, verdict, blocked = stream(noting, cut(text, places), SCREENER)
    assert (left, blocked) == (text, False)
    assert verdict.action <= Action.ANNOTATE
