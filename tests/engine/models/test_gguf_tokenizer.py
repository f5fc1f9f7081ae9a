"""A GGUF file's tokenizer, against the tokenizer that its vocabulary was taken from.

Real ids beside llama.cpp's: `python -m benchmarks.real_model --check`.
"""

import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

from engine.models.gguf import GgufModel, describe
from tests.engine.gguf_files import f32, write_gguf
from tests.engine.models.test_bad_gguf import _CONFIG

TEXTS = [
    "Hello world, hello World!",
    "x  1  22 333 4444 12345",  # blanks before digits
    "   leading and trailing   ",
    "tabs\t\tand\n\nlines\r\n  end",
    "don't WON'T I'll they'VE 's 'S",
    "naïve café Straße МОСКВА 日本語のテキスト 中文 123",
    "🙂 👩‍👩‍👧 ½ Ⅷ ²³ ١٢٣",
    "def f(x):\n    return x+1  # two\n\n\n",
    "<|start|>user\nhi 5<|stop|>\n",
    "",
]
_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _TAIL
_QWEN2 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _TAIL
CONTROL = ["<|end|>", "<|start|>", "<|stop|>"]


def _published(pre: str) -> Tokenizer:
    """As the models' own tokenizer.json have it."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=pre == "llama-bpe"))
    if pre in ("llama-bpe", "qwen2"):
        pattern = Regex(_LLAMA3 if pre == "llama-bpe" else _QWEN2)
        steps: list[Any] = [
            pre_tokenizers.Split(pattern, "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    else:
        steps = [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
    if pre == "smollm":
        steps.insert(0, pre_tokenizers.Digits(individual_digits=True))
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=CONTROL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS * 3, trainer)
    return tokenizer


def _parts(tokenizer: Tokenizer) -> tuple[list[str], list[str]]:
    """Tokens by id, and merges as a GGUF file has them."""
    model = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    return tokens, [" ".join(merge) for merge in model["merges"]]


def _described(path: Path, tokens: list[str], **more: Any) -> GgufModel:
    metadata = {
        **_CONFIG,
        "tokenizer.ggml.tokens": tokens,
        **{f"tokenizer.ggml.{key}": value for key, value in more.items()},
    }
    embedding = f32("token_embd.weight", torch.ones(len(tokens), 8))
    return describe(write_gguf(path, metadata, [embedding]))


@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "llama-bpe", "qwen2"])
def test_byte_level_ids_are_those_of_the_published_tokenizer(tmp_path: Path, pre: str) -> None:
    published = _published(pre)
    tokens, merges = _parts(published)
    kinds = [3] * 3 + [1] * (len(tokens) - 3)
    found = _described(
        tmp_path / "model.gguf", tokens, model="gpt2", pre=pre, merges=merges, token_type=kinds
    ).tokenizer
    for text in TEXTS:
        ids = published.encode(text).ids
        assert found.encode(text, add_special_tokens=False).ids == ids
        assert found.decode(ids, skip_special_tokens=False) == published.decode(
            ids, skip_special_tokens=False
        )
    assert found.decode([1, 2, 50]) == published.decode([50])


def test_roles_ends_and_the_frame(tmp_path: Path) -> None:
    tokens, merges = _parts(_published("llama-bpe"))
    kinds = [3] * 3 + [1] * (len(tokens) - 3)
    fields = {"model": "gpt2", "merges": merges, "token_type": kinds}
    fields |= {"bos_token_id": 1, "eos_token_id": 2}
    llama = _described(tmp_path / "a.gguf", tokens, pre="llama-bpe", **fields)
    assert llama.special_tokens == {"bos_token": "<|start|>", "eos_token": "<|stop|>"}
    assert llama.eos_ids == (2, 0) and llama.config["eos_token_id"] == [2, 0]
    assert llama.tokenizer.encode("a").ids[0] == 1
    assert llama.tokenizer.encode("a", add_special_tokens=False).ids[0] != 1
    told = {"add_bos_token": False, "add_eos_token": True, "eot_token_id": 1}
    other = _described(tmp_path / "b.gguf", tokens, pre="llama-bpe", **fields, **told)
    assert other.tokenizer.encode("a").ids[-1] == 2
    assert other.tokenizer.encode("a").ids[0] != 1
    assert other.eos_ids == (2, 1, 0)
    smollm = _described(tmp_path / "c.gguf", tokens, pre="smollm", **fields)
    assert smollm.tokenizer.encode("a").ids[0] != 1


_MERGED = ["he", "ll", "hell", "hello", "▁he", "▁hello", "wo", "▁wo", "rl", "▁worl", "▁", "▁▁"]
_PIECES = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *_MERGED,
           *"abcdefghijklmnopqrstuvwxyz0123456789"]  # fmt: skip


def _joined(text: str) -> list[str]:
    """SentencePiece's BPE, as its paper tells it: the best-scored neighbours first, then bytes."""
    pieces = list(text)
    while True:
        joined = enumerate(map("".join, itertools.pairwise(pieces)))
        known = [(_PIECES.index(both), at) for at, both in joined if both in _PIECES]
        if not known:
            break
        at = min(known)[1]
        pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]
    found: list[str] = []
    for piece in pieces:
        parts = [f"<0x{byte:02X}>" for byte in piece.encode()]
        found += [piece] if piece in _PIECES else parts
    return found


@pytest.mark.parametrize("prefixed", [True, False])
def test_sentence_piece_ids(tmp_path: Path, prefixed: bool) -> None:
    count = len(_PIECES)
    kinds = [2, 3, 3] + [6] * 256 + [1] * (count - 259)
    told = {"unknown_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    found = _described(
        tmp_path / "model.gguf", _PIECES, model="llama", token_type=kinds,
        scores=[0.0] * 259 + [-float(n) for n in range(count - 259)],
        add_space_prefix=prefixed, **told,
    ).tokenizer  # fmt: skip
    for text in ("hello world", "hello  hello", "wohell worl 12 é🙂", " hello", "shell"):
        expected = _joined(("▁" if prefixed else "") + text.replace(" ", "▁"))
        encoded = found.encode(text)
        assert encoded.ids == [1, *(_PIECES.index(piece) for piece in expected)]
        assert found.decode(encoded.ids) == text


def test_user_defined_tokens_are_taken_whole(tmp_path: Path) -> None:
    tokens, merges = _parts(_published("gpt-2"))
    tokens.append("<tool>")
    kinds = [3] * 3 + [1] * (len(tokens) - 4) + [4]
    found = _described(
        tmp_path / "m.gguf", tokens, model="gpt2", pre="gpt-2", merges=merges, token_type=kinds
    ).tokenizer
    assert found.encode("a<tool>b").ids[1] == len(tokens) - 1
    assert found.get_added_tokens_decoder()[len(tokens) - 1] == AddedToken(
        "<tool>", special=False, normalized=False
    )
    assert found.decode([len(tokens) - 1]) == "<tool>"


def test_describing_a_file_needs_no_torch() -> None:
    code = "import sys, engine.models.gguf; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
