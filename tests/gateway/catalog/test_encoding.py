"""Long texts are encoded in slices to the same ids, and the bound on tokens is a lower bound."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers, processors

from gateway.catalog.codec import encoding
from gateway.catalog.codec.encoding import TextEncoder, TooManyTokens
from tests.gateway.catalog.test_control_tokens import byte_level
from tests.gateway.catalog.test_prefix_tokens import TOKENIZERS as OTHERS


def _digits() -> Tokenizer:
    """As SmolLM's: single digits, then GPT-2's words; a token at the start of every raw prompt."""
    made = byte_level()
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    made.normalizer = normalizers.NFKC()
    made.decoder = decoders.ByteLevel()
    start = made.get_added_tokens_decoder()
    number, token = next(iter(start.items()))
    made.post_processor = processors.TemplateProcessing(
        single=f"{token.content} $A {token.content}", special_tokens=[(token.content, number)]
    )
    return made


TOKENIZERS = {**OTHERS, "digits": _digits()}
_PARTS = "a b| word|Hello World|\n\n|<|im_|end|>|éä|e\u0301|ﬁ|ﷺ|12 3|'s x|  | |"
_PARTS += "…|\u1100\u1161\u11a8|𝐀 b"
_PARTS += """|{"a":1,"b":"c"}|1.5|a=b|x+y/z|don't|l's|9 8|\u0338|=\u0338|a  b|a \n b|:\n\n|1234 5"""
words = st.sampled_from([*_PARTS.split("|"), "r" * 40, "<|im_end|>"])


@pytest.mark.parametrize("name", sorted(TOKENIZERS))
@settings(max_examples=80)
@given(parts=st.lists(words, min_size=1, max_size=60))
def test_slices_change_no_id(name: str, parts: list[str]) -> None:
    tokenizer, text = TOKENIZERS[name], "".join(parts)
    encoder = TextEncoder(tokenizer)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(encoding, "_SLICE", 20)
        for special in (False, True):
            whole = tokenizer.encode(text, add_special_tokens=special).ids
            assert encoder.encode(text, special=special) == whole
            assert encoder.encode(text, special=special, at_most=len(whole)) == whole
            with pytest.raises(TooManyTokens) as refused:
                encoder.encode(text, special=special, at_most=len(whole) - 1)
            assert refused.value.tokens <= len(whole)
        assert encoder.least_tokens(text) <= len(tokenizer.encode(text).ids)


def test_a_text_is_cut_only_between_words() -> None:
    text = "one two three " * 100
    marks = re.compile("[ ,]")
    cut = list(encoding.slices(text, 50, marks))
    assert "".join(cut) == text and len(cut) > 10
    assert all(part.startswith(" ") and part[1].isalpha() for part in cut[1:])
    assert list(encoding.slices("r" * 1000, 50, marks)) == ["r" * 1000]


@pytest.mark.parametrize(
    "text", ["3fa94c1d ", "12345 ", '{"id":12345,"b":[1]},', "QmFzZTY0+", "a\n"]
)
def test_no_common_text_is_encoded_at_once(text: str) -> None:
    """The tokenizer's result takes hundreds of bytes per token while it is made."""
    longest = 0
    encoder = TextEncoder(TOKENIZERS["digits"])
    plain = encoder._encode

    def _encode(piece: str, at_most: int | None, *, special: bool) -> list[int]:
        nonlocal longest
        longest = max(longest, len(piece))
        return plain(piece, at_most, special=special)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(encoder, "_encode", _encode)
        encoder.encode((text * 100_000)[:300_000])
    assert longest < 100_000
