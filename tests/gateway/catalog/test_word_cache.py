"""The ids of a text's words, one after the other, are those of the text."""

import string

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, normalizers, pre_tokenizers, processors

from engine.demo.paths import MODEL_DIR
from gateway.catalog.codec import word_cache
from gateway.catalog.codec.word_cache import WordCache

FILE = str(MODEL_DIR / "tokenizer.json")


def split_by(source: str) -> Tokenizer:
    """As Qwen's and Llama 3's files have it."""
    made = Tokenizer.from_file(FILE)
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(source), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    made.normalizer = normalizers.NFC()
    made.post_processor = processors.ByteLevel(trim_offsets=False)
    made.add_tokens(
        [AddedToken("<|im_start|>user", normalized=False), AddedToken("<t>", normalized=False)]
    )
    return made


TOKENIZERS = {
    "demo": Tokenizer.from_file(FILE),
    "qwen": split_by(word_cache._QWEN),
    "llama": split_by(word_cache._LLAMA),
}
WORDS = {name: WordCache(each) for name, each in TOKENIZERS.items()}
MARKS = ["<|im_start|>", "<|im_end|>", "<|im_start|>user", "<t>", "<|im_", "'s", "'LL", "don't"]
pieces = (
    st.text(string.printable + "\x00\x1c\x1f\x7f", max_size=8)
    | st.text(" \n\r\t\v\f", max_size=4)
    | st.sampled_from([*MARKS, " the", "1234567", "...\n\n"])
)


@pytest.mark.parametrize("name", sorted(TOKENIZERS))
@settings(max_examples=400)
@given(st.lists(pieces, max_size=8).map("".join))
def test_ids_of_the_words_are_those_of_the_text(name: str, text: str) -> None:
    expected = TOKENIZERS[name].encode(text, add_special_tokens=False).ids
    assert WORDS[name].encode(text) in (expected, None)
    for _ in range(20):  # some of its words are learnt each time
        found = WORDS[name].encode(text)
        if found is not None:
            break
    assert found == expected


def test_other_texts_and_tokenizers_are_left_alone() -> None:
    assert WORDS["demo"].encode("caf\u00e9") is None
    assert WORDS["demo"].encode("a" * 2_000) is None
    metaspace = Tokenizer.from_file(FILE)
    metaspace.pre_tokenizer = pre_tokenizers.Metaspace()
    assert WordCache(metaspace).encode("a") is None
    glued = Tokenizer.from_file(FILE)
    glued.add_tokens([AddedToken("word", single_word=True, normalized=False)])
    assert WordCache(glued).encode("a") is None


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(word_cache, "_MAX_WORDS", 20)
    words = WordCache(TOKENIZERS["demo"])
    for number in range(50):
        words.encode(f"w{number} is {'long' * 20}{number}")
        assert len(words._cached) <= 20
