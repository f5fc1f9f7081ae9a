"""The ids of a chat are those of a fresh tokenisation, whatever of it came before."""

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, pre_tokenizers

from engine.demo.paths import MODEL_DIR
from gateway.catalog.codec.prefix_tokens import PrefixTokenCache
from gateway.catalog.codec.tokenizing import load_codec
from gateway.catalog.codec.word_cache import WordCache
from tests.gateway.catalog.test_control_tokens import MARKS, byte_level, sentence_piece
from tests.gateway.deployment import MODEL, Deployment


def first_only() -> Tokenizer:
    """As Llama 2's newer files: a metaspace before the first piece of the whole text alone."""
    made = sentence_piece()
    made.normalizer = None
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    return made


TOKENIZERS = {
    "bytes": byte_level(),
    "pieces": sentence_piece(),
    "first": first_only(),
    "demo": load_codec(MODEL_DIR).tokenizer,
}
# What the cuts are beside: letters that merge, white space that is eaten, halves of control tokens.
words = st.text(max_size=12) | st.sampled_from(
    [" ", "\n", "▁", "<|im_", "end|>", "the", "é", *MARKS]
)
texts = st.lists(words, min_size=1, max_size=14).map("".join)


@pytest.mark.parametrize("name", sorted(TOKENIZERS))
@settings(max_examples=80)
@given(said=st.lists(texts, min_size=1, max_size=4), least=st.integers(1, 40))
def test_ids_are_those_of_the_whole_text(name: str, said: list[str], least: int) -> None:
    words = WordCache(TOKENIZERS[name])
    prefix_tokens = PrefixTokenCache(TOKENIZERS[name], min_piece=least, max_bytes=3000, words=words)
    grown = ""
    for each in said:  # a conversation: each request holds all that came before
        grown += each
        fresh = TOKENIZERS[name].encode(grown, add_special_tokens=False).ids
        assert prefix_tokens.pieces("t1", grown).ids() == fresh
        assert prefix_tokens.pieces("t1", grown).ids() == fresh
        assert prefix_tokens.bytes <= 3000


def chat(turns: int) -> str:
    return "".join(f"<|im_start|>user\n{n} {'word ' * 200}<|im_end|>\n" for n in range(turns))


def test_only_the_newest_turn_is_encoded_anew() -> None:
    prefix_tokens = PrefixTokenCache(TOKENIZERS["demo"])
    before, after = chat(20), chat(21)
    assert prefix_tokens.pieces("t1", before).new_characters == len(before)
    prefix_tokens.pieces("t1", before).ids()
    assert prefix_tokens.pieces("t1", after).new_characters < 2 * len(chat(1)) + 20


def test_a_tenant_finds_nothing_of_another() -> None:
    prefix_tokens = PrefixTokenCache(TOKENIZERS["demo"])
    prefix_tokens.pieces("t1", chat(9)).ids()
    assert prefix_tokens.pieces("t2", chat(9)).new_characters == len(chat(9))


def test_memory_is_bounded_and_the_oldest_goes_first() -> None:
    prefix_tokens = PrefixTokenCache(TOKENIZERS["demo"], max_bytes=20_000)
    prefix_tokens.pieces("t1", "first" + chat(4)).ids()
    for number in range(20):
        prefix_tokens.pieces("t1", f"{number}" + chat(4)).ids()
        assert prefix_tokens.bytes <= 20_000
    last = f"{number}" + chat(4)
    assert prefix_tokens.pieces("t1", last).new_characters < len(last)
    assert "first" not in "".join(piece for _, piece in prefix_tokens._entries)


@pytest.mark.parametrize(
    "token",
    [
        AddedToken("<cut>", special=True, normalized=False, lstrip=True),
        AddedToken("<cut>", special=True, normalized=True),
        AddedToken("<cut>", special=False, normalized=False),
    ],
    ids=["eats white space", "normalised text", "no control token"],
)
def test_tokens_whose_neighbours_matter_are_no_place_to_cut(token: AddedToken) -> None:
    made = Tokenizer.from_str(byte_level().to_str())
    made.add_tokens([token])
    text = "a <cut> " * 300
    assert len(PrefixTokenCache(made).pieces("t1", text)._cut) == 1


def test_a_token_that_another_reaches_into_is_no_place_to_cut() -> None:
    made = Tokenizer.from_str(byte_level().to_str())
    made.add_special_tokens([AddedToken("end|><s>", special=True)])
    text = "end|><s>" + "x" * 600 + "<|im_end|><s>" + "x" * 600 + "end|><s>" + "y" * 9
    prefix_tokens = PrefixTokenCache(made)
    assert prefix_tokens.pieces("t1", text).ids() == made.encode(text, add_special_tokens=False).ids


def test_a_token_that_overlaps_itself_is_no_place_to_cut() -> None:
    made = Tokenizer.from_str(byte_level().to_str())
    made.add_special_tokens([AddedToken("=^=", special=True)])
    text = "x" * 510 + "=^=^=" + "y" * 900 + "=^=^=^="
    prefix_tokens = PrefixTokenCache(made)
    assert prefix_tokens.pieces("t1", text).ids() == made.encode(text, add_special_tokens=False).ids
    assert len(prefix_tokens.pieces("t1", text)._cut) == 1


def test_the_pipeline_uses_it(deployment: Deployment) -> None:
    codec = deployment.services.catalog._models[MODEL].codec
    assert codec is not None and codec.template is not None
    said = [{"role": "system", "content": "Please answer. " * 80}]
    for turn in ("Hi", "And now?"):
        said.append({"role": "user", "content": turn})
        body = {"model": MODEL, "messages": said}
        told = httpx.post(
            f"{deployment.url}/tokenize", json=body, headers=deployment.headers
        ).json()
        assert told["tokens"] == codec.encode(codec.template.render(said))
        assert codec.prefix_tokens.bytes > 1000
