"""Mixtures of experts: rounded weights, load, batches, and what is refused.

`test_family_parity.py` compares each family's logits and greedy tokens with `transformers`.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.backends.layers.experts import Mixture
from engine.config import EngineConfig
from engine.errors import AdapterError, CheckpointError
from engine.loop import Engine
from engine.models.load import load_model
from engine.models.quantise_files import write_quantized
from tests.engine.checkpoints import VOCAB, reference, reference_logits, save_adapter
from tests.engine.checkpoints import save_checkpoint as save_any
from tests.engine.driver import Driver, LogitDriver, alone_and_together
from tests.engine.models.test_family_parity import CASES
from tests.engine.quantization.test_models import in_int8, needs_kernel

EXPERT = "model.layers.1.block_sparse_moe.experts.3.w2.weight"


def save_checkpoint(directory: Path, case: str = "mixtral", **changes: Any) -> Path:
    family, usual = CASES[case]
    return save_any(directory, family, **(usual | changes))


def some_ids(count: int) -> list[int]:
    return torch.randint(3, VOCAB, (count,), generator=torch.Generator().manual_seed(2)).tolist()


class Apart(torch.nn.Module):
    """The experts of a layer of `transformers`, each as modules of its own, row by row."""

    def __init__(self, given: Any) -> None:
        super().__init__()
        self.act = given.act_fn
        self.up = torch.nn.ModuleList(map(_linear, given.gate_up_proj))
        self.down = torch.nn.ModuleList(map(_linear, given.down_proj))

    def forward(self, x: torch.Tensor, which: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(x)
        for row, (numbers, weights) in enumerate(zip(which.tolist(), shares, strict=True)):
            for number, weight in zip(numbers, weights, strict=True):
                gate, up = self.up[number](x[row : row + 1]).chunk(2, -1)
                out[row] += weight * self.down[number](self.act(gate) * up)[0]
        return out


def _linear(weight: torch.Tensor) -> torch.nn.Linear:
    made = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    made.weight.data.copy_(weight)
    return made


def apart(model: Any) -> Any:
    for layer in model.model.layers:
        if hasattr(layer.mlp, "experts"):
            layer.mlp.experts = Apart(layer.mlp.experts)
        if hasattr(layer.mlp, "shared_expert_gate"):  # stays in floats
            weight = layer.mlp.shared_expert_gate.weight.detach().clone()
            layer.mlp.shared_expert_gate = torch.nn.Bilinear(1, 1, 1)
            layer.mlp.shared_expert_gate.forward = lambda x, w=weight: x @ w.t()
    return model


@pytest.mark.parametrize("case", ["mixtral", "qwen2-moe"])
def test_experts_in_int8(case: str, tmp_path: Path) -> None:
    checkpoint = save_checkpoint(tmp_path, case)
    ids = some_ids(40)
    plain = reference_logits(apart(reference(checkpoint)), ids)
    torch.testing.assert_close(plain, reference_logits(reference(checkpoint), ids))
    expected = reference_logits(in_int8(apart(reference(checkpoint))), ids)
    driver = LogitDriver(checkpoint, dtype="float32", quantization="int8")
    found = driver.logits(driver.sequence(ids), 40, (driver.sequence(some_ids(30)), 30))
    errors, of_rounding = (found - expected).abs().mean(1), (expected - plain).abs().mean()
    assert errors.mean() < of_rounding / 2, "nearer to its own reference than to the float model"
    assert errors.min() < 1e-5, "equal where no value lies between two steps"


@needs_kernel
def test_a_written_checkpoint_keeps_its_experts_in_codes_and_its_router_in_floats(
    tmp_path: Path,
) -> None:
    sizes = {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 64}
    base = save_checkpoint(tmp_path / "base", "qwen2-moe", intermediate_size=96, **sizes)
    write_quantized(base, tmp_path / "out", "int8")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert "model.layers.0.mlp.experts.6.down_proj.weight_packed" in tensors
    assert "model.layers.2.mlp.shared_expert.up_proj.weight_packed" in tensors
    assert "model.layers.0.mlp.gate.weight" in tensors
    assert "model.layers.0.mlp.shared_expert_gate.weight" in tensors
    ids = some_ids(30)
    found = []
    for path, quantization in ((tmp_path / "out", "auto"), (base, "int8")):
        driver = LogitDriver(path, dtype="float32", quantization=quantization)
        found.append(driver.logits(driver.sequence(ids), 30))
    plain = reference_logits(reference(base), ids)
    assert (found[0] - plain).abs().mean() < 0.1 * plain.std()
    driver = LogitDriver(base, dtype="float32")
    assert (
        driver.runner._model.bytes > 2 * load_model(EngineConfig(model=str(tmp_path / "out"))).bytes
    )


@needs_kernel
def test_a_row_of_rounded_experts_is_the_same_bit_for_bit_in_any_batch(tmp_path: Path) -> None:
    checkpoint = save_checkpoint(tmp_path, "qwen2-moe")
    driver = Driver(checkpoint, quantization="int8", dtype="float32")
    mixture = driver.runner._model.decoder.blocks[0].mixture
    assert isinstance(mixture, Mixture)
    x = torch.randn(37, 64, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        alone = [mixture(row[None], "silu") for row in x]
        assert torch.equal(mixture(x, "silu"), torch.cat(alone))


def test_answers_do_not_depend_on_the_batch(tmp_path: Path) -> None:
    checkpoint = save_checkpoint(tmp_path, "qwen3-moe")
    prompts = [some_ids(9 + 7 * n)[n:] for n in range(5)]
    alone, together = alone_and_together(checkpoint, prompts)
    assert together == alone


def test_a_row_that_is_not_finite_stays_alone(tmp_path: Path) -> None:
    driver = Driver(save_checkpoint(tmp_path), dtype="float32")
    mixture = driver.runner._model.decoder.blocks[0].mixture
    assert isinstance(mixture, Mixture)
    x = torch.randn(6, 64, generator=torch.Generator().manual_seed(1))
    poisoned = x.clone()
    poisoned[2] = float("nan")
    good = mixture(x, "silu")
    found = mixture(poisoned, "silu")
    assert found[2].isnan().all()
    others = [0, 1, 3, 4, 5]
    torch.testing.assert_close(found[others], good[others], rtol=0, atol=1e-5)


def test_the_load_of_each_expert_is_counted(tmp_path: Path) -> None:
    checkpoint = save_checkpoint(tmp_path, "qwen2-moe")
    driver = Driver(checkpoint, dtype="float32")
    sequence = driver.sequence(some_ids(11))
    driver.run([sequence], count=3)
    rows = driver.runner.expert_rows
    assert sorted(rows) == [0, 2], "layer 1 has a plain MLP"
    assert sum(rows[0]) == 3 * (11 + 2), "three experts for each token that was computed"
    assert sum(rows[2]) == 3 * 3, "the last layer computes sampled rows only"
    engine = Engine(EngineConfig(model=str(checkpoint)), driver.runner)
    text = engine.metrics_text()
    for expert, count in enumerate(rows[2]):
        line = f'tollhouse_engine_expert_rows_total{{layer="2",expert="{expert}"}} {count}'
        assert line in text.splitlines()


def refused(checkpoint: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        load_model(EngineConfig(model=str(checkpoint)))
    return caught.value.message


def test_an_expert_that_is_missing_or_of_another_shape(tmp_path: Path) -> None:
    checkpoint = save_checkpoint(tmp_path)
    path = checkpoint / "model.safetensors"
    tensors = load_file(path)
    whole = tensors.pop(EXPERT)
    save_file(tensors, path, metadata={"format": "pt"})
    assert f"tensor {EXPERT} is missing" in refused(checkpoint)
    save_file(tensors | {EXPERT: whole[:, :100].contiguous()}, path, metadata={"format": "pt"})
    assert f"{EXPERT} has shape [64, 100], the configuration asks for [64, 112]" in refused(
        checkpoint
    )


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"num_experts_per_tok": 6}, "num_experts_per_tok is 6, of 5 experts"),
        (
            {"num_local_experts": 0},
            "num_local_experts is 0: it must be a whole number from 1 to 65536",
        ),
        ({"num_local_experts": 4}, "gate.weight has shape [5, 64]"),
    ],
)
def test_a_number_of_experts_that_cannot_be(
    fields: dict[str, Any], told: str, tmp_path: Path
) -> None:
    checkpoint = save_checkpoint(tmp_path)
    path = checkpoint / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    assert told in refused(checkpoint)


@pytest.mark.parametrize(
    ("module", "shape", "told"),
    [
        ("2.mlp.gate_proj", (112, 64), "layer 2 of the base model has experts there"),
        (
            "2.mlp.shared_experts.up_proj",
            (52, 64),
            "experts, by names like mlp.experts.0.gate_proj",
        ),
    ],
)
def test_an_adapter_of_other_experts_is_refused_by_its_tensor(
    module: str, shape: tuple[int, int], told: str, tmp_path: Path
) -> None:
    checkpoint = save_checkpoint(tmp_path / "base", "qwen2-moe")
    adapter = save_adapter(checkpoint, tmp_path / "adapter", 3, 1, ["q_proj"])
    path = adapter / "adapter_model.safetensors"
    key = f"base_model.model.model.layers.{module}.lora_A.weight"
    added = {
        key: torch.zeros(3, shape[1]),
        key.replace("lora_A", "lora_B"): torch.zeros(shape[0], 3),
    }
    save_file(load_file(path) | added, path)
    driver = Driver(checkpoint)
    with pytest.raises(AdapterError) as caught:
        driver.runner.register_adapter(str(adapter))
    assert f"layers.{module}.lora_" in caught.value.message and told in caught.value.message


def test_an_adapter_of_whole_parameters_is_refused_by_the_field(tmp_path: Path) -> None:
    checkpoint = save_checkpoint(tmp_path / "base")
    adapter = save_adapter(checkpoint, tmp_path / "adapter", 3, 1, ["q_proj"])
    config = adapter / "adapter_config.json"
    told = {"target_parameters": ["mlp.experts.down_proj"]}
    config.write_text(json.dumps(json.loads(config.read_text()) | told))
    with pytest.raises(AdapterError, match="target_parameters is set"):
        Driver(checkpoint).runner.register_adapter(str(adapter))


def test_adapters_of_a_model_of_experts_take_room_for_attention_only(tmp_path: Path) -> None:
    """Blocks of 16 tokens in float32 have 3 * 16 * 2 * 2 * 20 * 4 bytes."""
    checkpoint = save_checkpoint(tmp_path / "base")
    adapter = save_adapter(checkpoint, tmp_path / "adapter", 8, 1, ["q_proj"])
    driver = Driver(checkpoint, dtype="float32")
    digest = driver.runner.register_adapter(str(adapter)).digest
    sizes = (64 + 80) + 2 * (64 + 40) + (80 + 64)
    assert driver.runner.adapter_blocks(digest) == -(-3 * 8 * sizes * 4 // (3 * 16 * 80 * 4))
