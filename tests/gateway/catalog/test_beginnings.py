"""Beginnings of long prompts as one entry: the ids stay those of the whole text."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.demo.paths import MODEL_DIR
from gateway.catalog.codec import prefix_tokens as prefixes
from gateway.catalog.codec.prefix_tokens import Beginnings, PrefixTokenCache
from gateway.catalog.codec.tokenizing import load_codec
from gateway.catalog.codec.word_cache import WordCache

TOKENIZER = load_codec(MODEL_DIR).tokenizer
words = st.text(max_size=12) | st.sampled_from(["<|im_", "end|>", " ", "\n", "é", "the"])
messages = st.lists(st.lists(words, max_size=9).map("".join), min_size=1, max_size=6)


def turn(number: int, words: int = 200) -> str:
    role = ("user", "assistant")[number % 2]
    return f"<|im_start|>{role}\n{number} {'word ' * words}<|im_end|>\n"


def prompt(turns: int, last: str = "") -> str:
    before = "".join(turn(number) for number in range(turns))
    return f"{before}{last}<|im_start|>assistant\n"


@settings(max_examples=60, deadline=None)
@given(
    conversations=st.lists(messages, min_size=2, max_size=3),
    order=st.lists(st.integers(0, 2), max_size=9),
)
def test_ids_are_those_of_the_whole_text(conversations: list[list[str]], order: list[int]) -> None:
    """Conversations with the same first messages, whose turns come in any order."""
    cache = PrefixTokenCache(TOKENIZER, min_piece=9, words=WordCache(TOKENIZER))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefixes, "LEAST", 30)
        patch.setattr(prefixes, "TAIL", 120)
        reached = dict.fromkeys(range(3), 0)
        for which in [*order, 0, 1, 0]:
            said = conversations[0][:2] + conversations[which % len(conversations)]
            reached[which] = min(reached[which] + 1, len(said))
            listed = [f"<|im_start|>user\n{each}<|im_end|>\n" for each in said[: reached[which]]]
            text = "".join([*listed, "<|im_start|>assistant\n"])
            fresh = TOKENIZER.encode(text, add_special_tokens=False).ids
            assert cache.pieces("t1", text).ids() == fresh


def test_the_next_turn_takes_up_all_before_it_at_once() -> None:
    cache = PrefixTokenCache(TOKENIZER)
    cache.pieces("t1", prompt(20)).ids()
    found = cache.pieces("t1", prompt(20) + turn(20).removeprefix("<|im_start|>user\n"))
    assert found._begun.length == len("".join(turn(each) for each in range(20)))
    assert len(found._cut) <= 3


def test_prompts_that_share_all_but_the_last_message_share_a_beginning() -> None:
    cache = PrefixTokenCache(TOKENIZER)
    for case in range(4):
        text = prompt(20, f"<|im_start|>user\nCase {case}<|im_end|>\n")
        found = cache.pieces("t1", text)
        ids = found.ids()
        assert ids == TOKENIZER.encode(text, add_special_tokens=False).ids
    assert found._begun.shared and found._begun.length > len(prompt(18))
    assert found.new_characters < 100


def test_a_tenant_finds_no_beginning_of_another() -> None:
    cache = PrefixTokenCache(TOKENIZER)
    cache.pieces("t1", prompt(20)).ids()
    assert cache.pieces("t2", prompt(20)).new_characters == len(prompt(20))


def test_texts_that_end_alike_are_told_apart() -> None:
    kept = Beginnings(1 << 20)
    end = "z" * 5_000
    kept.keep("t1", "a" + end, [1, 7], 1, shared=False)
    assert kept.longest("t1", "b" + end, [5_001]).length == 0
    assert not kept.has("t1", "b" + end, 5_001, shared=False)
    kept.drop("t1", "b" + end, 5_001)
    assert kept.longest("t1", "a" + end + "!", [5_001]).ids == [1, 7]
    kept.keep("t1", "b" + end, [2], 1, shared=True)
    assert kept.longest("t1", "b" + end, [5_001]).ids == [2]
    assert kept.longest("t1", "a" + end, [5_001]).length == 0
    kept.drop("t1", "b" + end, 5_001)
    assert kept.bytes == 0


def test_memory_is_bounded_and_what_a_conversation_outgrew_goes() -> None:
    kept = Beginnings(9_000)
    for number in range(50):
        kept.keep("t1", f"{number}" * 900, [1] * 100, 100, shared=False)
        assert kept.bytes <= 9_000
    assert kept.longest("t1", "49" * 900 + "more", [1_800]).length == 1_800
    assert kept.longest("t1", "0" * 1_800, [900]).length == 0
    kept.drop("t1", "49" * 900 + "more", 1_800)
    assert kept.longest("t1", "49" * 900 + "more", [1_800]).length == 0
    cache = PrefixTokenCache(TOKENIZER)
    for turns in range(10, 20):
        cache.pieces("t1", prompt(turns)).ids()
    assert len(cache._beginnings._entries) < 5
