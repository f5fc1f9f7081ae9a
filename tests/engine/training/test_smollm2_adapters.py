"""The shipped SmolLM2 adapters: small, whole, and of the model's shape."""

from pathlib import Path

import pytest
import torch

import engine
from engine.adapters.files import read_adapter
from engine.models.base_weights import BaseWeights
from engine.models.registry import model_spec

ADAPTERS = Path(engine.__file__).parent / "demo" / "smollm2"
# From the model's published config.json.
SMOLLM2 = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "num_hidden_layers": 30,
    "max_position_embeddings": 8192,
    "vocab_size": 49152,
}


@pytest.mark.parametrize("name", ["pirate", "json"])
def test_an_adapter_is_small_and_fits_the_model(name: str) -> None:
    directory = ADAPTERS / name
    assert sum(file.stat().st_size for file in directory.iterdir()) < 1_000_000
    weights = read_adapter(
        directory, BaseWeights("none", model_spec(SMOLLM2)), torch.float32, max_rank=8
    )
    assert weights.rank <= 8
    # B starts at zero: an adapter that has not learnt adds nothing.
    assert all(b.abs().max() > 0 for _, b in weights.matrices.values())


def test_questions_are_the_same_for_a_seed_and_never_twice() -> None:
    from training.smollm2.questions import make_questions

    made = make_questions(100, seed=5)
    assert made == make_questions(100, seed=5) != make_questions(100, seed=6)
    assert len({question.text for question in made}) == 100
