"""Adapters of modules inside a layer's operations: the projections of latent attention, and experts.
PEFT is the reference where it computes these modules; elsewhere the weights with the change in them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from engine.errors import AdapterError
from tests.engine.checkpoints import (
    adapted_reference,
    reference,
    reference_greedy,
    reference_logits,
    save_adapter,
)
from tests.engine.driver import Driver, LogitDriver
from tests.engine.models.test_experts import save_checkpoint, some_ids

IDS = some_ids(19)
ATTENTION = r".*self_attn\.(q_proj|q_a_proj|q_b_proj|kv_a_proj_with_mqa|kv_b_proj|o_proj)"


def same_in_one_batch(checkpoint: Path, adapters: list[tuple[Path, Any]]) -> None:
    """Logits and greedy tokens of (adapter, its reference) alone; then the tokens of all at once."""
    expected = [reference_greedy(reference(checkpoint), IDS, 6)]
    for adapter, model in adapters:
        driver = LogitDriver(checkpoint, dtype="float32")
        handle = driver.adapter(adapter, 0)
        found = driver.logits(driver.sequence(IDS, adapter=handle), len(IDS))
        torch.testing.assert_close(found, reference_logits(model, IDS), atol=5e-4, rtol=5e-4)
        sequence = driver.sequence(IDS, adapter=handle)
        driver.run([sequence], count=6)
        expected.append(reference_greedy(model, IDS, 6))
        assert sequence.output == expected[-1]
    driver = Driver(checkpoint, blocks=300, dtype="float32", max_adapter_slots=len(adapters))
    handles = [None, *(driver.adapter(path, slot) for slot, (path, _) in enumerate(adapters))]
    sequences = [driver.sequence(IDS, adapter=handle) for handle in handles * 2]
    driver.run(sequences, chunk=7, count=6)
    assert [each.output for each in sequences] == expected * 2
    assert len({tuple(each) for each in expected}) == len(expected)


@pytest.mark.parametrize("case", ["deepseek-v2", "deepseek-v3"])
def test_each_projection_of_latent_attention(case: str, tmp_path: Path) -> None:
    checkpoint = save_checkpoint(tmp_path / "base", case)
    kinds: list[Any] = [
        (3, ATTENTION, {"rank_pattern": {"kv_b_proj": 5}}),
        (2, ["kv_b_proj"], {"use_rslora": True}),
        (4, ["q_b_proj" if case == "deepseek-v3" else "q_proj", "o_proj", "embed_tokens"], {}),
    ]
    adapters = []
    for n, (rank, targets, changes) in enumerate(kinds):
        path = save_adapter(checkpoint, tmp_path / str(n), rank, n, targets, **changes)
        adapters.append((path, adapted_reference(checkpoint, path)))
    same_in_one_batch(checkpoint, adapters)


def adapter_of(folder: Path, modules: dict[str, tuple[int, int]], seed: int) -> tuple[Path, Any]:
    """An adapter in PEFT's layout, of rank 3 and scale 2, and what it adds to each module."""
    folder.mkdir()
    random = torch.Generator().manual_seed(seed)
    tensors, added = {}, {}
    for name, (out, width) in modules.items():
        a, b = (torch.randn(*s, generator=random) * 0.15 for s in ((3, width), (out, 3)))
        tensors[f"base_model.model.{name}.lora_A.weight"] = a
        tensors[f"base_model.model.{name}.lora_B.weight"] = b
        added[name] = 2.0 * (b @ a)
    save_file(tensors, folder / "adapter_model.safetensors")
    targets = sorted({name.rsplit(".", 1)[1] for name in modules})
    config = {"peft_type": "LORA", "r": 3, "lora_alpha": 6, "target_modules": targets}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder, added


EXPERTS = {  # of case: the module's name in checkpoints, its matrices, the shared expert's name
    "mixtral": ("block_sparse_moe", ("w1", "w3", "w2"), ""),
    "qwen2-moe": ("mlp", ("gate_proj", "up_proj", "down_proj"), "shared_expert"),
    "deepseek-v3": ("mlp", ("gate_proj", "up_proj", "down_proj"), "shared_experts"),
}


def with_change(checkpoint: Path, added: dict[str, torch.Tensor]) -> Any:
    """`transformers`' model with the change in its weights, which hold all experts as one tensor."""
    model = reference(checkpoint)
    for name, change in added.items():
        layer, part = int(name.split(".")[2]), name.rsplit(".", 1)[1]
        mlp = model.model.layers[layer].mlp
        with torch.no_grad():
            if ".shared_expert" in name:
                mlp.get_submodule(name.split(".mlp.")[1]).weight += change
            elif part in ("down_proj", "w2"):
                mlp.experts.down_proj[int(name.split(".")[-2])] += change
            else:
                half = 0 if part in ("gate_proj", "w1") else change.shape[0]
                weight = mlp.experts.gate_up_proj[int(name.split(".")[-2])]
                weight[half : half + change.shape[0]] += change
    return model


@pytest.mark.parametrize("case", ["mixtral", "qwen2-moe", "deepseek-v3"])
def test_experts_by_name(case: str, tmp_path: Path) -> None:
    """One adapter of some matrices of some experts, and one of all of them and of the shared expert."""
    checkpoint = save_checkpoint(tmp_path / "base", case)
    module, names, shared = EXPERTS[case]
    mlp = reference(checkpoint).model.layers[2].mlp
    count, hidden, size = mlp.experts.down_proj.shape
    shapes = dict(zip(names, ((size, hidden), (size, hidden), (hidden, size)), strict=True))
    root = f"model.layers.2.{module}"
    some = {f"{root}.experts.{n}.{names[n % 3]}": shapes[names[n % 3]] for n in range(count)}
    every = {f"{root}.experts.{n}.{each}": shapes[each] for n in range(count) for each in names}
    if shared:
        out, width = mlp.get_submodule(shared).gate_proj.weight.shape
        every[f"{root}.{shared}.up_proj"] = out, width
        every[f"{root}.{shared}.down_proj"] = width, out
    adapters = []
    for n, modules in enumerate((some, every)):
        path, added = adapter_of(tmp_path / str(n), modules, n)
        adapters.append((path, with_change(checkpoint, added)))
    same_in_one_batch(checkpoint, adapters)


def test_all_experts_as_peft_reads_them(tmp_path: Path) -> None:
    """PEFT turns the tensors of single experts into changes of the stacked parameters."""
    checkpoint = save_checkpoint(tmp_path / "base")
    model = reference(checkpoint)
    count, hidden, size = model.model.layers[0].mlp.experts.down_proj.shape
    modules = {
        f"model.layers.{layer}.block_sparse_moe.experts.{n}.{each}": shape
        for layer in range(3)
        for n in range(count)
        for each, shape in (("w1", (size, hidden)), ("w3", (size, hidden)), ("w2", (hidden, size)))
    }
    path, _ = adapter_of(tmp_path / "adapter", modules, 1)
    expected = reference_logits(adapted_reference(checkpoint, path), IDS)
    driver = LogitDriver(checkpoint, dtype="float32")
    found = driver.logits(driver.sequence(IDS, adapter=driver.adapter(path, 0)), len(IDS))
    torch.testing.assert_close(found, expected, atol=5e-4, rtol=5e-4)
    assert (expected - reference_logits(model, IDS)).abs().max() > 0.1


@pytest.mark.parametrize(
    ("case", "module", "shape", "told"),
    [
        (
            "qwen2-moe",
            "2.mlp.experts.99.up_proj",
            (64, 48),
            "experts, by names like mlp.experts.0.",
        ),
        (
            "deepseek-v3",
            "0.mlp.experts.0.up_proj",
            (48, 64),
            "layer 0 of the base model has no exp",
        ),
        ("gpt-oss", "1.mlp.experts.0.up_proj", (64, 64), "holds its experts as one tensor"),
        ("deepseek-v3", "1.self_attn.kv_b_proj", (7, 26), "was it trained on another base"),
        ("deepseek-v2", "1.self_attn.q_a_proj", (7, 64), "target_modules has 'q_a_proj'"),
    ],
)
def test_modules_that_are_not_there_are_refused_by_name(
    case: str, module: str, shape: tuple[int, int], told: str, tmp_path: Path
) -> None:
    checkpoint = save_checkpoint(tmp_path / "base", case)
    path, _ = adapter_of(tmp_path / "adapter", {f"model.layers.{module}": shape}, 1)
    with pytest.raises(AdapterError, match=told):
        Driver(checkpoint).runner.register_adapter(str(path))


def test_dora_of_latent_attention_is_refused_by_name(tmp_path: Path) -> None:
    checkpoint = save_checkpoint(tmp_path / "base", "deepseek-v2")
    path = save_adapter(checkpoint, tmp_path / "adapter", 2, 1, ["kv_b_proj"], use_dora=True)
    with pytest.raises(AdapterError, match=r"kv_b_proj has a lora_magnitude_vector: DoRA is not"):
        Driver(checkpoint).runner.register_adapter(str(path))
