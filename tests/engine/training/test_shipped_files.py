"""The shipped demo model is what its recipe makes, and it stays small."""

import json

import pytest
from safetensors import safe_open

from engine.demo.paths import ADAPTERS, MODEL_DIR
from training.demo import recipe, settings
from training.demo.model import config_of
from training.demo.train import make_tokenizer

SIZE_CAP = 12_000_000


@pytest.fixture(scope="module")
def shipped() -> dict:
    return recipe.read_recipe()


def test_files_are_the_ones_that_the_recipe_names(shipped):
    assert recipe.file_digests() == shipped["files"]


def test_settings_are_the_recipe_s(shipped):
    assert json.loads(json.dumps(recipe.hyper_parameters())) == shipped["hyper_parameters"]


def test_the_script_still_makes_the_data_of_the_recipe(shipped):
    assert recipe.data_digest() == shipped["data"]


def test_training_the_tokenizer_again_gives_the_shipped_one(shipped):
    tokenizer = make_tokenizer()
    assert recipe.vocabulary_digest(tokenizer) == shipped["vocabulary"]
    assert config_of(tokenizer) == json.loads((MODEL_DIR / "config.json").read_text())


def test_everything_together_is_under_the_cap(shipped):
    assert sum(file.stat().st_size for file in recipe.shipped_files()) < SIZE_CAP


def test_the_checkpoint_holds_the_parameters_that_the_recipe_counts(shipped):
    with safe_open(MODEL_DIR / "model.safetensors", framework="pt") as weights:
        count = 0
        for name in weights.keys():  # noqa: SIM118  (not a dict)
            size = 1
            for length in weights.get_slice(name).get_shape():
                size *= length
            count += size
    assert count == shipped["parameters"]


@pytest.mark.parametrize("style", settings.STYLES, ids=lambda style: style.name)
def test_each_adapter_has_its_rank_on_all_linear_layers(style):
    config = json.loads((ADAPTERS[style.name] / "adapter_config.json").read_text())
    assert (config["peft_type"], config["r"]) == ("LORA", style.rank)
    assert len(config["target_modules"]) == 7
