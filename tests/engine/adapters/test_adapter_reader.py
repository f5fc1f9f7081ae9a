"""What the reader of adapters may take for granted of files that it has read before."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.adapters import files as adapter_files
from engine.adapters import reader as adapter_reader
from engine.adapters.digest import adapter_digest, digest_of
from engine.adapters.reader import AdapterReader
from engine.errors import AdapterError
from engine.models.base_weights import BaseWeights
from engine.models.registry import model_spec, read_config
from tests.engine.adapters.test_bad_adapters import KEY, rewrite
from tests.engine.checkpoints import save_adapter, save_checkpoint


@pytest.fixture
def reader(tmp_path: Path) -> AdapterReader:
    spec = model_spec(read_config(save_checkpoint(tmp_path / "base")))
    return AdapterReader(BaseWeights("none", spec), torch.float32, max_rank=64)


@pytest.fixture
def adapter(tmp_path: Path, reader: AdapterReader) -> Path:
    return save_adapter(tmp_path / "base", tmp_path / "adapter", rank=4, seed=1, lora_alpha=3)


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Digests worked out from a file's bytes, in order; files count as settled at once."""
    seen: list[str] = []

    def count(config: dict[str, Any], weights: bytes) -> str:
        seen.append(digest_of(config, weights))
        return seen[-1]

    monkeypatch.setattr(adapter_files, "digest_of", count)
    monkeypatch.setattr(adapter_reader, "_SETTLED_NS", -1)
    return seen


def test_unchanged_files_are_hashed_once(
    reader: AdapterReader, adapter: Path, hashed: list[str]
) -> None:
    first = reader.read(adapter)
    again = reader.read(adapter)
    assert hashed == [adapter_digest(adapter)]
    assert again.digest == first.digest
    for key, pair in first.matrices.items():
        for one, other in zip(pair, again.matrices[key], strict=True):
            assert torch.equal(one, other)


def test_files_that_were_just_written_are_hashed_again(
    reader: AdapterReader, adapter: Path, hashed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter_reader, "_SETTLED_NS", 1 << 60)
    reader.read(adapter)
    reader.read(adapter)
    assert len(hashed) == 2


def test_other_weights_under_the_same_name_are_another_adapter(
    reader: AdapterReader, adapter: Path, hashed: list[str]
) -> None:
    first = reader.read(adapter)
    rewrite(adapter, lambda tensors: tensors[KEY.format("A")].mul_(2))
    second = reader.read(adapter)
    assert second.digest == adapter_digest(adapter) != first.digest
    rewrite(adapter, lambda tensors: tensors[KEY.format("A")].fill_(float("nan")))
    with pytest.raises(AdapterError, match=r"layer 1 self_attn\.q_proj lora_A has NaN"):
        reader.read(adapter)


def test_the_host_copy_outlives_its_file(reader: AdapterReader, adapter: Path) -> None:
    held = reader.read(adapter).matrices[1, "q"][0]
    before = held.clone()
    weights = adapter / "adapter_model.safetensors"
    weights.write_bytes(bytes(weights.stat().st_size))
    assert torch.equal(held, before)


@pytest.mark.parametrize(
    ("stored", "alpha", "kept"),
    [
        (torch.bfloat16, 8, torch.bfloat16),  # twice its rank: doubling is exact
        (torch.bfloat16, 3, torch.float32),
        (torch.float16, 4, torch.float16),
        (torch.float16, 8, torch.float32),
        (torch.float32, 4, torch.float32),
    ],
)
def test_half_types_stay_in_host_memory_where_they_lose_nothing(
    reader: AdapterReader, tmp_path: Path, stored: torch.dtype, alpha: int, kept: torch.dtype
) -> None:
    adapter = save_adapter(tmp_path / "base", tmp_path / "half", 4, seed=2, lora_alpha=alpha)
    given: dict[str, torch.Tensor] = {}

    def halve(tensors: dict[str, torch.Tensor]) -> None:
        given.update({name: values.to(stored) for name, values in tensors.items()})
        tensors.update(given)

    rewrite(adapter, halve)
    a, b = reader.read(adapter).matrices[1, "q"]
    assert (a.dtype, b.dtype) == (stored, kept)
    assert torch.equal(a, given[KEY.format("A")])
    assert torch.equal(b.float(), given[KEY.format("B")].float().mul(alpha / 4).T)


def test_names_without_the_prefix_of_a_saved_model(tmp_path: Path, adapter: Path) -> None:
    """As of layers that were put into a model by themselves, without a `PeftModel` around it."""
    spec = model_spec(read_config(tmp_path / "base"))

    def loaded() -> dict[Any, tuple[torch.Tensor, torch.Tensor]]:
        return (
            AdapterReader(BaseWeights("none", spec), torch.float32, max_rank=64)
            .read(adapter)
            .matrices
        )

    before = loaded()
    path = adapter / "adapter_model.safetensors"
    tensors = load_file(path)
    save_file({key.removeprefix("base_model.model."): each for key, each in tensors.items()}, path)
    after = loaded()
    assert before and before.keys() == after.keys()
    for key, pair in before.items():
        assert all(map(torch.equal, pair, after[key]))
