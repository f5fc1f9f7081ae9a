"""An adapter that the base cannot carry is refused by name; the engine goes on with the others."""

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from peft.utils.other import get_pattern_key
from safetensors.torch import load_file, save_file

from engine.adapters.peft.patterns import value_of
from engine.errors import AdapterError
from gateway.catalog.adapter_archive import read_adapter
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
        ({"bias": "some"}, "bias is 'some'"),
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


@pytest.mark.parametrize("field", ["rank_pattern", "alpha_pattern"])
@pytest.mark.parametrize(
    ("pattern", "named"),
    [
        (r"(([a-z0-9_.]+)+)+!", ""),  # takes Python's `re` for ever
        (r"(x+x+)+y", ""),
        (r"(?=q)q_proj", "RE2 does not take"),
        (r"(.)\1_proj", "RE2 does not take"),
        ("(", "RE2 does not take"),
        ("a" * 513, "513 characters"),
        (r"(.?){1000}x", "instructions of RE2"),
        ("\ud800", "lone surrogate"),
    ],
)
def test_no_pattern_of_an_adapter_takes_long(
    driver: Driver, copy: Path, field: str, pattern: str, named: str
) -> None:
    fields = json.loads((copy / CONFIG).read_text())
    change(copy, **{field: {pattern: fields["r"] if field == "rank_pattern" else 3}})
    began = time.process_time()
    if not named:  # it matches no module
        driver.runner.register_adapter(str(copy))
        assert read_adapter(copy).unserved == ""
    else:
        message = refused(driver, copy)
        assert named in message and field in message
        assert named in read_adapter(copy).unserved  # and so is the upload
    assert time.process_time() - began < 1.0


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"rank_pattern": ["q_proj"]}, "rank_pattern is a list"),
        ({"rank_pattern": {"q_proj": 0}}, "'q_proj' the value 0"),
        ({"rank_pattern": {"q_proj": True}}, "'q_proj' the value True"),
        ({"rank_pattern": {"q_proj": "4"}}, "'q_proj' the value '4'"),
        ({"alpha_pattern": {"q_proj": float("nan")}}, "'q_proj' the value nan"),
        ({"alpha_pattern": {"q_proj": None}}, "'q_proj' the value None"),
        ({"alpha_pattern": {f"m{n}": 1 for n in range(4097)}}, "4097 patterns"),
    ],
)
def test_patterns_with_odd_values_are_refused_by_field(
    driver: Driver, copy: Path, fields: dict[str, Any], named: str
) -> None:
    change(copy, **fields)
    message = refused(driver, copy)
    assert named in message and CONFIG in message
    assert named in read_adapter(copy).unserved


NAMES = st.sampled_from(
    [f"model.layers.{n}.{m}" for n in (0, 1, 10, 11) for m in ("self_attn.q_proj", "mlp.up_proj")]
)
PARTS = st.sampled_from(
    [
        "q_proj",
        "up_proj",
        "layers.1",
        r"layers\.1\.",
        ".*",
        "[01]+",
        "(q|up)_proj",
        "^model.",
        "mlp.",
    ]
)


@given(
    st.dictionaries(st.lists(PARTS, min_size=1, max_size=3).map("".join), st.integers(1, 9)), NAMES
)
def test_patterns_mean_what_they_mean_in_peft(patterns: dict[str, int], module: str) -> None:
    key = get_pattern_key(patterns.keys(), module)
    assert value_of(patterns, module, 99) == patterns.get(key, 99)
