"""The check of an adapter's shapes by its file's header takes what the engine takes, and names the
tensor, its shape and the needed one otherwise."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.adapters.digest import WEIGHTS
from engine.adapters.files import read_adapter
from engine.adapters.peft.shapes import check_shapes
from engine.config import EngineConfig
from engine.demo.paths import ADAPTERS, MODEL_DIR
from engine.errors import AdapterError
from engine.models.base_weights import BaseWeights
from engine.models.load import load_model
from engine.models.registry import model_spec, read_config
from tests.engine.adapters.test_adapter_kinds import KINDS
from tests.engine.checkpoints import save_adapter, save_checkpoint

ROOT = "base_model.model.model.layers"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("base"))


def problem_of(adapter: Path, base: Path) -> str:
    try:
        check_shapes(adapter, model_spec(read_config(base)))
    except AdapterError as error:
        return error.message
    return ""


@pytest.mark.parametrize("kind", KINDS)
def test_what_peft_saves_is_taken(base: Path, tmp_path: Path, kind: str) -> None:
    adapter = save_adapter(base, tmp_path / "a", rank=4, seed=1, **dict(KINDS[kind]))
    assert problem_of(adapter, base) == ""


@pytest.mark.parametrize(
    ("family", "targets"),
    [
        ("Phi3", ["qkv_proj", "gate_up_proj", "o_proj", "down_proj"]),
        ("Mixtral", ["q_proj", "o_proj"]),
        ("Gemma2", None),
    ],
)
def test_what_peft_saves_of_other_families_is_taken(
    tmp_path: Path, family: str, targets: list[str] | None
) -> None:
    base = save_checkpoint(tmp_path / "base", family)
    adapter = save_adapter(base, tmp_path / "a", rank=3, seed=1, targets=targets)
    assert problem_of(adapter, base) == ""


@pytest.mark.parametrize(
    ("name", "shape", "needed"),
    [
        ("0.self_attn.q_proj.lora_A", [8, 13], r"\[8, 13\], the base model needs \[rank, 64\]"),
        ("1.mlp.up_proj.lora_B", [5, 8], r"\[5, 8\], the base model needs \[\d+, rank\]"),
        ("0.mlp.down_proj.lora_B", [64, 7], r"\[64, 7\], the other half .* rank 8"),
        ("0.mlp.down_proj.lora_B", [64], r"\[64\], the base model needs \[64, rank\]"),
        ("99.mlp.down_proj.lora_B", [64, 8], "has only"),
        ("0.mlp.side_proj.lora_B", [64, 8], "matches no linear layer"),
    ],
)
def test_a_wrong_tensor_is_named_with_its_shape_as_the_engine_refuses_it(
    tmp_path: Path, name: str, shape: list[int], needed: str
) -> None:
    base = save_checkpoint(tmp_path / "base", hidden_size=64)
    adapter = save_adapter(base, tmp_path / "a", rank=8, seed=1)
    tensors = load_file(adapter / WEIGHTS)
    key = f"{ROOT}.{name}.weight"
    save_file(tensors | {key: torch.zeros(shape)}, adapter / WEIGHTS)
    model = load_model(EngineConfig(model=str(base), dtype="float32"))
    with pytest.raises(AdapterError, match=f"tensor {key}.*{needed}"):
        check_shapes(adapter, model.spec)
    with pytest.raises(AdapterError):
        read_adapter(adapter, BaseWeights(str(base), model.spec), torch.float32, 64)


def test_an_adapter_of_another_base_is_refused(base: Path, tmp_path: Path) -> None:
    mine = Path(shutil.copytree(ADAPTERS["pirate"], tmp_path / "pirate"))
    check_shapes(mine, model_spec(read_config(MODEL_DIR)))
    with pytest.raises(AdapterError, match=r"has shape \[\d+, \d+\], the base model needs \["):
        check_shapes(mine, model_spec(read_config(base)))
