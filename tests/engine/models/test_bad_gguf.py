"""A GGUF file that cannot be served is refused in one line that names the file and the cause, in
bounded memory, whatever its header claims."""

import random
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.config import EngineConfig
from engine.errors import CheckpointError
from engine.models.gguf import describe
from engine.models.load import load_model
from tests.engine.checkpoints import save_checkpoint
from tests.engine.gguf_files import converted, f32, text, u64, vocabulary, write_gguf

VOCAB = 320
_CONFIG = {
    "general.architecture": "llama",
    "llama.block_count": 1,
    "llama.context_length": 64,
    "llama.embedding_length": 8,
    "llama.feed_forward_length": 8,
    "llama.attention.head_count": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
}
EMBEDDING = f32("token_embd.weight", torch.ones(VOCAB, 8))


def written(path: Path, *more: Any, **changes: Any) -> Path:
    """A file with the metadata of a model, and of its weights the embedding alone."""
    changes = {name.replace("__", "."): value for name, value in changes.items()}
    metadata = {**_CONFIG, **vocabulary(VOCAB), **changes}
    metadata = {key: value for key, value in metadata.items() if value is not None}
    return write_gguf(path, metadata, [EMBEDDING, *more])


def refused(path: Path, work: Callable[[Path], object] = describe) -> str:
    with pytest.raises(CheckpointError) as caught:
        work(path)
    message = caught.value.message
    assert path.name in message and "\n" not in message
    return message


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return written(tmp_path / "model.gguf")


def test_the_file_that_the_others_are_made_of_is_read(file: Path) -> None:
    assert describe(file).context_length == 64


def test_a_file_cut_off_anywhere(file: Path) -> None:
    whole = file.read_bytes()
    for size in [*range(200), *range(200, len(whole), 331), len(whole) - 1]:
        file.write_bytes(whole[:size])
        refused(file)


def test_a_file_cut_off_while_it_is_loaded(tmp_path: Path) -> None:
    file = converted(save_checkpoint(tmp_path / "hf"), tmp_path / "model.gguf")
    file.write_bytes(file.read_bytes()[:-4096])
    message = refused(file, lambda path: load_model(EngineConfig(model=str(path))))
    assert "cut off" in message


@pytest.mark.parametrize(
    ("at", "raw", "cause"),
    [
        (0, b"GGML", "GGML"),
        (4, struct.pack("<I", 1), "version is 1"),
        (4, struct.pack("<I", 4), "version is 4"),
        (4, struct.pack(">I", 3), "big-endian"),
        (8, struct.pack("<Q", 2**63), "number of tensors is 9223372036854775808"),
        (8, struct.pack("<Q", 2**20), "number of tensors is 1048576"),
        (16, struct.pack("<Q", 2**63), "number of metadata values is 9223372036854775808"),
        (24, struct.pack("<Q", 2**62), "length of metadata key 0 is 4611686018427387904"),
    ],
)
def test_a_first_field_that_cannot_be(file: Path, at: int, raw: bytes, cause: str) -> None:
    whole = file.read_bytes()
    file.write_bytes(whole[:at] + raw + whole[at + len(raw) :])
    assert cause in refused(file)


def _header(value: bytes, tensors: int = 0) -> bytes:
    """One metadata value, then nothing that is needed."""
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, 1) + text("key") + value


@pytest.mark.parametrize(
    ("value", "cause"),
    [
        (struct.pack("<IQ", 8, 2**40), "length of key is 1099511627776"),
        (struct.pack("<IIQ", 9, 8, 2**61), "length of key is 2305843009213693952"),
        (struct.pack("<IIQ", 9, 4, 2**62), "length of key is 4611686018427387904"),
        (struct.pack("<IIQ", 9, 9, 1), "array of arrays"),
        (struct.pack("<II", 77, 1), "value type 77"),
        (struct.pack("<IIQ", 9, 77, 1), "value type 77"),
        (struct.pack("<IQ", 8, 2) + b"\xff\xff", "not UTF-8"),
    ],
)
def test_a_value_that_cannot_be_takes_no_memory(tmp_path: Path, value: bytes, cause: str) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(_header(value) + bytes(1 << 16))
    tracemalloc.start()
    message = refused(file)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert cause in message
    assert peak < 1 << 20


def _tensor(shape: list[int], kind: int = 0, start: int = 0) -> bytes:
    dims = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    return text("t") + dims + struct.pack("<IQ", kind, start)


@pytest.mark.parametrize(
    ("tensor", "cause"),
    [
        (_tensor([2**63, 2**63]), "tensor t ends at byte"),
        (_tensor([64], start=2**63), "tensor t ends at byte"),
        (_tensor([]), "0 dimensions"),
        (_tensor([1] * 9), "9 dimensions"),
        (_tensor([0, 4]), "shape [4, 0]"),
        (_tensor([33], kind=8), "blocks of 32"),
        (_tensor([256], kind=16), "IQ2_XXS"),
        (_tensor([256], kind=1000), "type 1000"),
    ],
)
def test_a_tensor_that_cannot_be(tmp_path: Path, tensor: bytes, cause: str) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(_header(struct.pack("<II", 4, 1), 1) + tensor + bytes(1 << 12))
    assert cause in refused(file)


_SHORT = vocabulary(VOCAB)["tokenizer.ggml.tokens"][:-1]
_DOUBLE = [*_SHORT, _SHORT[5]]


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"general__architecture": "falcon"}, "'falcon'; supported: llama, qwen2, qwen3, gemma2"),
        ({"general__architecture": None}, "general.architecture is missing"),
        ({"llama__block_count": None}, "llama.block_count is missing"),
        ({"llama__block_count": "two"}, "llama.block_count is 'two'"),
        ({"llama__attention__head_count": 0}, "llama.attention.head_count is 0"),
        ({"llama__expert_count": 8}, "llama.expert_count"),
        ({"llama__vocab_size": 77}, "llama.vocab_size is 77"),
        ({"llama__rope__dimension_count": 2}, "llama.rope.dimension_count is 2"),
        ({"llama__rope__scaling__type": "longrope"}, "'longrope'"),
        ({"split__count": u64(3)}, "one of 3 parts"),
        ({"split__count": u64(65536)}, "split.count is 65536"),
        ({"general__alignment": 12}, "general.alignment is 12"),
        ({"tokenizer__ggml__tokens": None}, "tokenizer.ggml.tokens is missing"),
        ({"tokenizer__ggml__tokens": _SHORT}, "has 319 tokens, but the model 320"),
        ({"tokenizer__ggml__tokens": _DOUBLE}, "twice"),
        ({"tokenizer__ggml__token_type": [1, 2]}, "tokenizer.ggml.token_type"),
        ({"tokenizer__ggml__model": "t5"}, "'t5'; supported: gpt2, llama"),
        ({"tokenizer__ggml__model": None}, "tokenizer.ggml.model is missing"),
        ({"tokenizer__ggml__model": "llama"}, "tokenizer.ggml.scores"),
        ({"tokenizer__ggml__pre": "jais-2"}, "'jais-2'; supported: gpt-2, smollm"),
        ({"tokenizer__ggml__pre": None}, "tokenizer.ggml.pre is None"),
        ({"tokenizer__ggml__merges": None}, "tokenizer.ggml.merges is missing"),
        ({"tokenizer__ggml__merges": ["ab"]}, "'ab'"),
        ({"tokenizer__ggml__merges": ["q z"]}, "'qz'"),
        ({"tokenizer__ggml__eos_token_id": 320}, "tokenizer.ggml.eos_token_id is 320"),
    ],
)
def test_metadata_that_cannot_be_served(
    tmp_path: Path, changes: dict[str, Any], cause: str
) -> None:
    assert cause in refused(written(tmp_path / "model.gguf", **changes))


def test_a_tensor_without_a_place(tmp_path: Path) -> None:
    more = f32("blk.0.ssm_in.weight", torch.ones(8, 8))
    assert "blk.0.ssm_in.weight" in refused(written(tmp_path / "model.gguf", more))
    assert "occurs twice" in refused(written(tmp_path / "model.gguf", EMBEDDING))
    # Another spelling of a block's number is not that block.
    more = f32("blk.00.attn_norm.weight", torch.zeros(8))
    assert "blk.00.attn_norm.weight" in refused(written(tmp_path / "model.gguf", more))


def test_a_missing_and_a_misshapen_tensor(tmp_path: Path) -> None:
    file = written(tmp_path / "model.gguf")
    message = refused(file, lambda path: load_model(EngineConfig(model=str(path))))
    assert "model.layers.0.self_attn.q_proj.weight is missing" in message
    file = written(file, f32("blk.0.attn_norm.weight", torch.ones(8)),
                   f32("blk.0.attn_q.weight", torch.ones(8, 4)))  # fmt: skip
    message = refused(file, lambda path: load_model(EngineConfig(model=str(path))))
    assert "blk.0.attn_q.weight" in message and "[8, 4]" in message


def test_changed_bytes_never_give_another_error(file: Path) -> None:
    whole = file.read_bytes()
    head = len(whole) - VOCAB * 8 * 4
    draw = random.Random(12)
    for _ in range(400):
        changed = bytearray(whole)
        for _ in range(draw.choice([1, 1, 4])):
            # The first part holds the counts and the configuration, where a change does most.
            at = draw.randrange(draw.choice([700, head]))
            changed[at] = draw.randrange(256)
        file.write_bytes(changed)
        try:
            describe(file)
        except CheckpointError as error:
            assert file.name in error.message and "\n" not in error.message
