"""Deny and allow lists, tenant patterns, personal data and secrets, and their redaction."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moderation.categories import ENTITY_KINDS
from moderation.entities import RECOGNISERS, entity_matchers
from moderation.errors import BadPattern, BadPolicy
from moderation.patterns import PatternMatcher, compile_pattern
from moderation.policy import Policy, default_policy
from moderation.screener import Screener
from moderation.verdict import Action, ScreenedText
from tests.moderation.helpers import BrokenClassifier, WordClassifier

ALL = dict.fromkeys(ENTITY_KINDS, Action.REDACT)


def redacted(text: str, **screen: object) -> str:
    policy = Policy.from_dict({"input": {"categories": {}, "entities": {}, **screen}})
    return Screener().check_input([ScreenedText("user", text)], policy).texts[0]


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("write to bob.smith+x@mail.example.co.uk now", "write to [EMAIL] now"),
        ("call +1 (415) 555-0132 or 415-555-0132", "call [PHONE] or [PHONE]"),
        ("card 4111 1111 1111 1111.", "card [CARD]."),
        ("order 2023 4111 1111 1111 1111", "order 2023 [CARD]"),
        ("card 4111 1111 1111 1112.", "card 4111 1111 1111 1112."),
        ("to GB82 WEST 1234 5698 7654 32 today", "to [IBAN] today"),
        ("to GB83 WEST 1234 5698 7654 32 today", "to GB83 WEST 1234 5698 7654 32 today"),
        ("ssn 536-90-4399, not 666-12-1234", "ssn [US_SSN], not 666-12-1234"),
        ("host 192.168.1.20 or 2001:db8::1", "host [IP] or [IP]"),
        (
            "at 10:20:30 on 2024-01-12 we paid 1,234,567",
            "at 10:20:30 on 2024-01-12 we paid 1,234,567",
        ),
        ("unix time 1700000000 and version 1.2.3", "unix time 1700000000 and version 1.2.3"),
        ("key AKIAIOSFODNN7EXAMPLE end", "key [API_KEY] end"),
        ("sk-proj-AbCd1234EfGh5678IjKl9012", "[API_KEY]"),
        ("b\u200bob@example.com", "[EMAIL]"),
    ],
)
def test_personal_data_and_secrets_are_redacted_with_their_offsets(text: str, clean: str) -> None:
    assert redacted(text, entities=dict.fromkeys(ENTITY_KINDS, "redact")) == clean


def test_a_private_key_goes_whole() -> None:
    body = "MIIEpAIBAAKCAQEA75rZNDV3n8r9J\nabcdEFGH12345678abcdEFGH12345678"
    dashes = "-" * 5
    key = f"{dashes}BEGIN RSA PRIVATE KEY{dashes}\n{body}\n{dashes}END RSA PRIVATE KEY{dashes}"
    assert redacted(f"here: {key} ok", entities={"private_key": "redact"}) == (
        "here: [PRIVATE_KEY] ok"
    )


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("a Bad word", "a [DENY_LIST] word"),
        ("a badge", "a badge"),
        ("a baaaad word", "a [DENY_LIST] word"),
        ("a b4d word", "a [DENY_LIST] word"),
        ("a bаd word", "a [DENY_LIST] word"),
        ("a b\u200ba\u0301d word", "a [DENY_LIST] word"),
        ("not bad at all", "not bad at all"),
        ("an ass, as ever", "an [DENY_LIST], as ever"),
        ("assss", "[DENY_LIST]"),
        ("日本の禁止語です", "日本の[DENY_LIST]です"),
        ("so b a d dog", "so [DENY_LIST] dog"),
        ("b.a.d!", "[DENY_LIST]!"),
    ],
)
def test_terms_match_whole_words_in_both_views(text: str, clean: str) -> None:
    deny = [{"text": term, "action": "redact"} for term in ("bad", "ass", "禁止語")]
    assert redacted(text, deny=deny, allow=["not bad at all"]) == clean


def test_the_answer_says_which_view_fired() -> None:
    policy = Policy.from_dict({"input": {"deny": ["bad"]}})
    screener = Screener()
    assert screener.check_input([ScreenedText("user", "bad")], policy).view == "plain"
    assert screener.check_input([ScreenedText("user", "b4d")], policy).view == "loose"


def test_a_role_is_not_screened_where_the_policy_leaves_it_out() -> None:
    policy = Policy.from_dict({"input": {"deny": ["bad"]}, "roles": ["user", "tool"]})
    texts = [ScreenedText("system", "never say bad"), ScreenedText("user", "hello")]
    assert Screener().check_input(texts, policy).action is Action.ALLOW
    texts.append(ScreenedText("tool", "a bad result"))
    verdict = Screener().check_input(texts, policy)
    assert (verdict.action, verdict.spans[0].index) == (Action.BLOCK, 2)


def test_shadow_says_what_it_would_do_and_does_nothing() -> None:
    policy = Policy.from_dict({"input": {"deny": ["bad"]}, "shadow": True})
    verdict = Screener().check_input([ScreenedText("user", "a bad day")], policy)
    assert (verdict.action, verdict.would) == (Action.ANNOTATE, Action.BLOCK)
    assert verdict.texts == ("a bad day",)


def test_a_failing_stage_closes_unless_it_is_opened(caplog: pytest.LogCaptureFixture) -> None:
    text = [ScreenedText("user", "the xylophone of Ann")]
    closed = Screener(BrokenClassifier()).check_input(text, default_policy())
    assert (closed.action, closed.flagged) == (Action.BLOCK, ("classifier_failed",))
    opened = Policy.from_dict({"on_error": {"classifier": "open"}})
    passed = Screener(BrokenClassifier()).check_input(text, opened)
    assert (passed.action, passed.unscanned) == (Action.ALLOW, ("classifier",))
    assert "xylophone" not in caplog.text and "RuntimeError" in caplog.text


@pytest.mark.parametrize(
    ("pattern", "says"),
    [
        (r"(?=secret)x", "RE2 refuses"),
        (r"(a)\1", "RE2 refuses"),
        ("(", "RE2 refuses"),
        ("(a{1,1000}){1,1000}", "RE2 refuses"),
        ("a*", "empty text"),
        ("", "empty"),
        ("x" * 2_000, "at most"),
        ("\ud800", "surrogate"),
    ],
)
def test_a_pattern_that_cannot_be_used_is_refused_with_the_reason(pattern: str, says: str) -> None:
    with pytest.raises(BadPattern, match=says):
        compile_pattern(pattern)


@pytest.mark.parametrize(
    ("document", "place"),
    [
        ({"input": {"categories": {"violense": {}}}}, "input.categories"),
        ({"input": {"categories": {"violence": {"block": 2}}}}, "violence.block"),
        ({"input": {"categories": {"violence": {"explode": 1}}}}, "explode"),
        ({"output": {"entities": {"email": "shred"}}}, "output.entities.email"),
        ({"input": {"patterns": [{"name": "n", "pattern": "(?=a)"}]}}, r"patterns\[0\]"),
        ({"input": {"deny": [{"text": ""}]}}, r"deny\[0\]"),
        ({"input": {"deny": ["\u200b"]}}, "empty after normalisation"),
        ({"input": []}, "input"),
        ({"roles": ["king"]}, "king"),
        ({"mode": "sometimes"}, "sometimes"),
        ({"on_error": {"rules": "ajar"}}, "ajar"),
        ({"second_stage": {"guard": "g", "low": 0.9, "high": 0.1}}, "low"),
        ({"strikes": {"limit": 0}}, "limit"),
        ({"colour": "red"}, "colour"),
    ],
)
def test_a_wrong_policy_is_refused_with_its_place(document: dict[str, object], place: str) -> None:
    with pytest.raises(BadPolicy, match=place):
        Policy.from_dict(document)


def test_a_policy_survives_its_document_and_keeps_its_version() -> None:
    document = {
        "name": "strict",
        "input": {"deny": ["a"], "patterns": [{"name": "n", "pattern": "x+", "action": "redact"}]},
        "second_stage": {"guard": "llama-guard"},
        "strikes": {"limit": 3},
    }
    policy = Policy.from_dict(document)
    again = Policy.from_dict(policy.to_dict())
    assert (again.version, again.to_dict()) == (policy.version, policy.to_dict())
    assert Policy.from_dict({**document, "shadow": True}).version != policy.version
    assert policy.input.categories  # a deny list alone does not drop the classifier


@pytest.mark.parametrize(
    "text",
    ["1" * 1_000_000, "1 " * 300_000, "a@b.co " * 30_000, "-" * 1_000_000, "\x00\ud800" * 200_000],
    ids=["digits", "number groups", "addresses", "dashes", "binary"],
)
def test_rules_take_bounded_time_on_hostile_text(text: str) -> None:
    pattern = {"name": "p", "pattern": "(a|aa)+b|1.*2", "action": "redact"}
    policy = Policy.from_dict(
        {
            "input": {
                "entities": dict.fromkeys(ENTITY_KINDS, "redact"),
                "patterns": [pattern],
                "deny": ["1 1", "bad"],
            }
        }
    )
    began = time.process_time()
    Screener(WordClassifier()).check_input([ScreenedText("user", text)], policy)
    assert time.process_time() - began < 15


@given(st.text(alphabet="ab1 .@-+4\n", max_size=60), st.integers(0, 60))
def test_the_hold_covers_every_match_that_a_cut_would_split(text: str, cut: int) -> None:
    patterns = [PatternMatcher("p", r"a[b1]{2,6}@", Action.REDACT, longest=12)]
    for matcher in (*entity_matchers(ALL), *patterns):
        hold = matcher.hold(text[:cut])
        for hit in matcher.find(text):
            if hit.start < min(cut, len(text)) < hit.end:
                assert hold <= hit.start, (matcher, text, cut)


def test_every_recogniser_has_a_kind_that_a_policy_may_name() -> None:
    assert {each.kind for each in RECOGNISERS} <= set(ENTITY_KINDS)
