"""Joined, the bytes of a text's tokens are the text's, also where a character is cut between tokens."""

from pathlib import Path
from string import ascii_lowercase

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from engine.demo.paths import MODEL_DIR
from engine.protocol import TokenLogprob
from gateway.catalog.codec.tokenizing import TextCodec, load_codec
from gateway.formats.chat.response import logprobs_object

TEXTS = [
    "plain text",
    "ü and é",
    "殺す 杀",
    "🏳️‍🌈 🌈",
    "\ufffd is a character",
    "тест\n\tx",
    "a\u200bb",
]


def byte_fallback() -> TextCodec:
    """As SentencePiece writes vocabularies: spaces as a sign, unknown characters as single bytes."""
    words = ["<unk>", *[f"<0x{byte:02X}>" for byte in range(256)], "\u2581", *ascii_lowercase]
    vocab = {word: n for n, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return TextCodec(tokenizer, None, ())


def byte_level() -> TextCodec:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS * 3, trainer)
    return TextCodec(tokenizer, None, ())


CODECS = {
    "demo": lambda: load_codec(Path(MODEL_DIR)),
    "byte fallback": byte_fallback,
    "bytes": byte_level,
}


@pytest.mark.parametrize("name", CODECS)
def test_the_bytes_of_tokens_are_those_of_the_text(name: str) -> None:
    codec = CODECS[name]()
    for text in TEXTS:
        ids = codec.encode(text)
        assert b"".join(map(codec.token_bytes, ids)) == text.encode(), text
    cut = codec.encode("🌈")
    assert len(cut) > 1 or name == "bytes"


def test_log_probabilities_have_the_bytes_of_parts_of_characters() -> None:
    codec = load_codec(MODEL_DIR)
    own = [TokenLogprob(token, -0.5, [(token, -0.5)]) for token in codec.encode("🌈!")]
    content = logprobs_object(own, [], codec)["content"]
    assert bytes(b for each in content for b in each["bytes"]) == "🌈!".encode()
    tops = [each["top_logprobs"][0]["bytes"] for each in content]
    assert bytes(b for each in tops for b in each) == "🌈!".encode()
