"""A text that a reader reads as before has the verdict that it had before it was disguised."""

from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.screening.prompt_texts import continued_text, screened_texts, with_redactions
from moderation.guard import StreamGuard
from moderation.policy import Policy
from moderation.screener import Screener
from moderation.verdict import Action, ScreenedText
from tests.gateway.screening.evasions import (
    CONTINUED,
    FILLERS,
    GAPS,
    LINES,
    LINES_OF_TEXT,
    NOTHING,
    PARTS,
    RULES,
    disguises,
)

SCREENER = Screener()
CASES = [(kind, name) for kind in RULES for name in disguises(kind)]


def policy(kind: str) -> Policy:
    rule = RULES[kind][0]
    return Policy.from_dict({"input": rule, "output": rule})


def blocks_input(kind: str, text: str) -> bool:
    return SCREENER.check_input([ScreenedText("user", text)], policy(kind)).blocked


def delivered(kind: str, chunks: list[str]) -> tuple[str, bool]:
    guard = StreamGuard(policy(kind), SCREENER)
    left = ""
    for chunk in chunks:
        release = guard.feed(0, chunk)
        left += release.text
        if release.blocked:
            return left, True
    release = guard.finish(0)
    return left + release.text, release.blocked


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_a_disguised_text_is_blocked_in_prompts_and_answers(kind: str, name: str) -> None:
    text = disguises(kind)[name]
    for sentence in (text, f"Say {text}, please.", f"\n{text}\n"):
        assert blocks_input(kind, sentence)
        for chunks in ([sentence], list(sentence)):
            left, blocked = delivered(kind, chunks)
            assert blocked and left == sentence[: sentence.index(text)][: len(left)]


@pytest.mark.parametrize("kind", RULES)
def test_a_page_between_two_words_is_no_gap(kind: str) -> None:
    text = RULES[kind][1].replace(" ", "\n" * 40)
    assert blocks_input(kind, text) is (" " not in RULES[kind][1])


def split(text: str, at: int) -> list[str]:
    return [text[:at], text[at:]]


@pytest.mark.parametrize("surface", PARTS)
@pytest.mark.parametrize("kind", RULES)
def test_parts_are_screened_alone_and_joined_as_servers_join_them(surface: str, kind: str) -> None:
    text, build = RULES[kind][1], PARTS[surface]
    cuts = [["Tell me about", text], [text, "is what I want"]]
    if surface not in LINES_OF_TEXT:
        cuts.append(split(text, 3))
    if " " in text and kind in ("phrase", "pattern"):
        cuts.append(text.split(" ", 1))  # only a line break joins them again
    for parts in cuts:
        assert SCREENER.check_input(screened_texts(build(parts)), policy(kind)).blocked, parts


def redacting(kind: str) -> Policy:
    rule: dict[str, Any] = dict(RULES[kind][0])
    if "entities" in rule:
        rule["entities"] = dict.fromkeys(rule["entities"], "redact")
    if "patterns" in rule:
        rule["patterns"] = [{**each, "action": "redact"} for each in rule["patterns"]]
    if "deny" in rule:
        rule["deny"] = [{"text": each, "action": "redact"} for each in rule["deny"]]
    return Policy.from_dict({"input": rule})


@pytest.mark.parametrize("surface", PARTS)
@pytest.mark.parametrize("kind", RULES)
def test_no_part_of_what_is_redacted_is_sent_on(surface: str, kind: str) -> None:
    text = RULES[kind][1]
    cuts = [["Pay from", text, "today"]]
    if surface not in LINES_OF_TEXT:
        cuts.append(["My ", *split(text, 4)])
    for parts in cuts:
        request, rule = PARTS[surface](parts), redacting(kind)
        verdict = SCREENER.check_input(screened_texts(request), rule)
        assert verdict.action is Action.REDACT
        sent = with_redactions(request, verdict.spans)
        assert SCREENER.check_input(screened_texts(sent), rule).action is Action.ALLOW
        texts = [each.text for each in screened_texts(sent)]
        assert not any(text in each or text[4:] in each for each in texts)


@pytest.mark.parametrize("surface", CONTINUED)
@pytest.mark.parametrize("kind", RULES)
def test_an_answer_is_judged_with_the_text_that_it_continues(surface: str, kind: str) -> None:
    build, choice = CONTINUED[surface]
    text = RULES[kind][1]
    before, after = split(f"We are {text}", len(text) + 4)
    request = build(before)
    guard = StreamGuard(policy(kind), SCREENER, partial(continued_text, request))
    releases = [guard.feed(choice, each) for each in (*after, " .")]
    releases.append(guard.finish(choice))
    assert releases[-1].blocked and "".join(each.text for each in releases) == ""


def test_what_was_flagged_before_an_answer_does_not_end_it() -> None:
    request = CONTINUED["prefill"][0]("zorgblat it is, and")
    guard = StreamGuard(policy("word"), SCREENER, partial(continued_text, request))
    assert guard.feed(0, " so on").text + guard.finish(0).text == " so on"
    assert guard.verdict().action is Action.ALLOW


ordinary = st.sampled_from(["a", "the", "walk", "by", "river", "zebra", "two", "code", "4111"])


@given(
    st.sampled_from(("phrase", "word", "hyphenated")),
    st.lists(ordinary, max_size=6),
    st.lists(ordinary, max_size=6),
    st.data(),
)
def test_what_a_reader_does_not_notice_changes_no_verdict(
    kind: str, before: list[str], after: list[str], data: st.DataObject
) -> None:
    """Gaps are drawn between words, and signs that do not show within them; a filler is one of both."""
    words = [*before, *RULES[kind][1].split(" "), *after]
    fillers = set(FILLERS) if data.draw(st.booleans()) else set()
    signs = [sign for sign in NOTHING.values() if sign not in FILLERS or fillers]
    gaps = st.sampled_from([" ", *({*GAPS.values(), *LINES.values()} - fillers)])
    stuffed = []
    for word in words:
        at = data.draw(st.integers(1, len(word)))
        at -= word[:at] == word
        stuffed.append(word[:at] + data.draw(st.sampled_from(["", *signs])) + word[at:])
    text = stuffed[0] + "".join(data.draw(gaps) + word for word in stuffed[1:])
    assert blocks_input(kind, text)
    assert delivered(kind, [text])[1] and delivered(kind, list(text))[1]
