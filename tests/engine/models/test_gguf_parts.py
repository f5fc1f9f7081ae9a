"""A GGUF model in several files, as llama-gguf-split writes them, is the model of the one file."""

from contextlib import closing
from pathlib import Path

import pytest
import torch

from engine.errors import CheckpointError
from engine.models.checkpoint import open_checkpoint
from engine.models.gguf.header import read_header
from tests.engine.checkpoints import save_checkpoint
from tests.engine.gguf_files import Tensor, converted, write_gguf

COUNT = 3


def split(whole: Path, directory: Path) -> list[Path]:
    """The first part has the metadata and no tensor, which is what `--no-tensor-first-split` does."""
    header = read_header(whole)
    raw = whole.read_bytes()
    kinds = {0: "F32", 1: "F16", 2: "Q4_0", 8: "Q8_0", 30: "BF16"}
    tensors: list[Tensor] = [
        (each.name, each.shape, kinds[each.type], raw[each.start : each.start + each.bytes])
        for each in header.tensors.values()
    ]
    half = len(tensors) // 2
    found = []
    for number, some in enumerate(([], tensors[:half], tensors[half:])):
        path = directory / f"model-{number + 1:05}-of-{COUNT:05}.gguf"
        numbers = {"split.no": number, "split.count": COUNT, "split.tensors.count": len(tensors)}
        metadata = header.metadata if number == 0 else {}
        plain = {
            key: value.tolist() if hasattr(value, "tolist") else value
            for key, value in metadata.items()
        }
        found.append(write_gguf(path, {**plain, **numbers}, some))
    return found


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    return converted(save_checkpoint(tmp_path / "hf"), tmp_path / "whole.gguf")


def test_the_parts_hold_what_the_file_does(whole: Path, tmp_path: Path) -> None:
    parts = split(whole, tmp_path)
    one, several = open_checkpoint(whole), open_checkpoint(parts[0])
    with closing(one.source), closing(several.source):
        assert several.config == one.config
        assert set(several.source.names()) == set(one.source.names())  # type: ignore[attr-defined]
        for name in one.source.names():  # type: ignore[attr-defined]
            ours = several.source.read(name, torch.float32)
            assert torch.equal(ours, one.source.read(name, torch.float32))
        assert several.source.place(name).startswith(f"{tmp_path}/model-0000")
    # Another file of weights is another model.
    digest = several.digest
    changed = bytearray(parts[2].read_bytes())
    changed[-40] ^= 1
    parts[2].write_bytes(changed)
    again = open_checkpoint(parts[0])
    again.source.close()
    assert again.digest != digest


def refused(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(path)
    return caught.value.message


def test_parts_that_do_not_belong_together(whole: Path, tmp_path: Path) -> None:
    parts = split(whole, tmp_path)
    assert "give the first part" in refused(parts[1])
    second = parts[1].read_bytes()
    parts[1].write_bytes(parts[2].read_bytes())
    assert "it is part 3 of 3, where part 2 of 3 is needed" in refused(parts[0])
    parts[1].unlink()
    assert parts[1].name in refused(parts[0])
    parts[1].write_bytes(second)
    other = parts[0].rename(tmp_path / "renamed.gguf")
    assert "-00001-of-00003.gguf" in refused(other)
