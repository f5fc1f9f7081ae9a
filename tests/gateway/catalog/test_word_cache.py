"""The ids of a text's words, one after the other, are those of the text."""

import string
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, normalizers, pre_tokenizers, processors

from core import compiled
from engine.demo.paths import MODEL_DIR
from gateway.catalog.codec import word_cache
from gateway.catalog.codec.word_cache import DIGITS, WordCache
from tests.compiled import built_extension

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


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Any:
    source = Path(compiled.__file__).with_name("kernel.c")
    return built_extension(source, tmp_path_factory.mktemp("words"))


@pytest.mark.parametrize("name", sorted(TOKENIZERS))
@settings(max_examples=600)
@given(st.lists(pieces, max_size=12).map("".join), st.integers(0, 100))
def test_the_compiled_words_are_the_patterns_own(
    kernel: Any, name: str, text: str, lost: int
) -> None:
    pattern = word_cache.word_pattern(TOKENIZERS[name])
    assert pattern is not None
    words, digits = pattern.findall(text), DIGITS[pattern.pattern]
    known = {word: [number, -number] for number, word in enumerate(dict.fromkeys(words))}
    ids = [each for word in words for each in known[word]]
    assert kernel.word_ids(text, known, digits) == (ids, len(words))
    if words:
        del known[words[lost % len(words)]]
        assert kernel.word_ids(text, known, digits) is None


def test_what_is_no_ascii_text_is_refused(kernel: Any) -> None:
    with pytest.raises(ValueError, match="ASCII"):
        kernel.word_ids("é", {}, 0)
    with pytest.raises(TypeError):
        kernel.word_ids(b"e", {}, 0)
    with pytest.raises(TypeError):
        kernel.word_ids("e", {"e": 1}, 0)
