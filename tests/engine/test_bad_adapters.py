"""An adapter that the base cannot carry is refused by name; the engine goes on with the others."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.errors import AdapterError
from tests.engine.checkpoints import reference, reference_greedy, save_adapter, save_checkpoint
from tests.engine.driver import Driver

PROMPT = [5, 9, 12, 40, 33]
WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"
KEY = "base_model.model.model.layers.1.self_attn.q_proj.lora_{}.weight"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def good(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_adapter(base, tmp_path_factory.mktemp("good"), rank=4, seed=1)


@pytest.fixture(scope="module")
def driver(base: Path) -> Driver:
    return Driver(base, max_lora_rank=64)


@pytest.fixture
def copy(good: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(good, tmp_path / "adapter"))


def refused(driver: Driver, directory: Path) -> str:
    with pytest.raises(AdapterError) as caught:
        driver.runner.register_adapter(str(directory))
    return caught.value.message


def change(directory: Path, **fields: Any) -> None:
    path = directory / CONFIG
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def rewrite(directory: Path, work: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(directory / WEIGHTS)
    work(tensors)
    save_file(tensors, directory / WEIGHTS, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"r": 0}, "r is 0"),
        ({"r": -3}, "r is -3"),
        ({"r": 65}, "1 to 64"),
        ({"r": "eight"}, "r is 'eight'"),
        ({"r": 8}, "rank 8"),
        ({"lora_alpha": float("inf")}, "lora_alpha"),
        ({"target_modules": ["q_proj", "conv_proj"]}, "conv_proj"),
        ({"bias": "all"}, "bias"),
        ({"use_dora": True}, "use_dora"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"modules_to_save": ["score"]}, "modules_to_save has 'score': supported are embed_tokens"),
        ({"peft_type": "IA3"}, "IA3"),
        ({"target_parameters": ["mlp.experts.down_proj"]}, "target_parameters is set"),
        ({"trainable_token_indices": [3]}, "trainable_token_indices is set"),
        ({"init_lora_weights": "pissa_niter_4"}, "changes the base model"),
    ],
)
def test_a_configuration_that_cannot_be_served(
    driver: Driver, copy: Path, fields: dict[str, Any], named: str
) -> None:
    change(copy, **fields)
    message = refused(driver, copy)
    assert named in message and CONFIG in message


@pytest.mark.parametrize(
    ("work", "named"),
    [
        (lambda t: t.pop(KEY.format("B")), "lora_A without the other half"),
        (lambda t: t[KEY.format("A")].__setitem__((0, 0), float("nan")), "NaN"),
        (
            lambda t: t.update({KEY.format("B"): torch.zeros(64, 5)}),
            "rank 4 in A, 5 in B: both must be 1 to",
        ),
        (lambda t: t.update({KEY.format("A"): torch.zeros(4, 96)}), "another base"),
        (lambda t: t.update({KEY.format("A").replace("1", "7"): torch.zeros(4, 64)}), "3 layers"),
        (
            lambda t: t.update({"base_model.model.lm_head.lora_A.weight": torch.zeros(4, 64)}),
            "lm_h",
        ),
        (lambda t: t.clear(), "no lora_A"),
    ],
)
def test_weights_that_do_not_fit(
    driver: Driver, copy: Path, work: Callable[[dict[str, torch.Tensor]], object], named: str
) -> None:
    rewrite(copy, work)
    message = refused(driver, copy)
    assert named in message and WEIGHTS in message


def test_truncated_and_absent_files(driver: Driver, copy: Path, tmp_path: Path) -> None:
    whole = (copy / WEIGHTS).read_bytes()
    (copy / WEIGHTS).write_bytes(whole[:-50])
    assert WEIGHTS in refused(driver, copy)
    (copy / WEIGHTS).unlink()
    assert WEIGHTS in refused(driver, copy)
    assert CONFIG in refused(driver, tmp_path / "nowhere")


def test_an_adapter_of_another_base(driver: Driver, tmp_path: Path) -> None:
    other = save_checkpoint(tmp_path / "other", hidden_size=96, num_attention_heads=6)
    adapter = save_adapter(other, tmp_path / "adapter", rank=4, seed=1)
    assert "another base" in refused(driver, adapter)


def test_the_others_are_served_on(base: Path, driver: Driver, good: Path, copy: Path) -> None:
    sequence = driver.sequence(PROMPT)
    driver.step((sequence, 0))
    change(copy, r=0)
    refused(driver, copy)
    driver.run([sequence], count=8)
    assert sequence.output == reference_greedy(reference(base), PROMPT, 8)
    assert driver.runner.register_adapter(str(good)).rank == 4
