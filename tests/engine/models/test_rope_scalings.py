"""Every family that takes a rotary scaling computes it as `transformers` does, within the original
context and beyond it. (Dynamic NTK follows the position here, and the length of the sequence there: it
equals `transformers` up to the original context, `test_family_parity.py`. Phi-3 takes LongRoPE alone.)"""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from engine.models.registry import model_spec
from tests.engine.checkpoints import VOCAB, reference, save_checkpoint
from tests.engine.driver import LogitDriver

ORIGINAL, CONTEXT = 32, 128
SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": ORIGINAL},
    "llama3": {
        "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": ORIGINAL,
    },
}  # fmt: skip
EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 28}
FAMILIES: dict[str, dict[str, Any]] = {
    "Mistral": {"sliding_window": None},
    "Qwen2": {},
    "Qwen3": {},
    "Granite": {},
    "Olmo2": {},
    "SmolLM3": {},
    "Mixtral": {"head_dim": 16, "num_local_experts": 3, "num_experts_per_tok": 2},
    "Qwen3Moe": EXPERTS,
    "Qwen2Moe": EXPERTS | {"shared_expert_intermediate_size": 36},
    "Cohere": {},
}


def scaled(kind: str, family: str, folder: Path) -> Path:
    rope = {"rope_type": kind, "rope_theta": 10000.0} | SCALINGS[kind]
    changes = FAMILIES[family] | {"rope_parameters": rope}
    return save_checkpoint(
        folder, family, **(changes | {"max_position_embeddings": CONTEXT, "num_hidden_layers": 1})
    )


def random_ids(count: int, seed: int) -> list[int]:
    return torch.randint(3, VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("kind", SCALINGS)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_beyond_the_original_context(family: str, kind: str, tmp_path: Path) -> None:
    checkpoint, ids = scaled(kind, family, tmp_path), random_ids(90, 7)
    with torch.no_grad():
        expected = reference(checkpoint)(torch.tensor([ids])).logits[0].float()
    driver = LogitDriver(checkpoint, dtype="float32")
    sequence = driver.sequence(ids)
    found = torch.cat([driver.logits(sequence, 60), driver.logits(sequence, 30)])
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


def test_of_two_fields_transformers_takes_the_older() -> None:
    newer = {"rope_type": "default", "rope_theta": 10_000.0}
    older = {"rope_type": "linear", "factor": 4.0}
    config = transformers.LlamaConfig(rope_parameters=dict(newer), rope_scaling=dict(older))
    assert config.rope_parameters["rope_type"] == "linear"
    raw = config.to_dict() | {
        "architectures": ["LlamaForCausalLM"], "rope_parameters": newer, "rope_scaling": older,
    }  # fmt: skip
    assert model_spec(raw).rope.kind == "linear"
