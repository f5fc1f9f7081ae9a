"""Checkpoints of quantised weights are refused by the name of their format, before weights are read."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from engine.errors import CheckpointError
from engine.models.formats.safetensors_source import SafetensorsSource
from engine.models.registry import model_spec

PLAIN: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 16,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
}


@pytest.mark.parametrize(
    ("declared", "named"),
    [
        # As published: Quark's FP8, HQQ, AutoRound, llm-compressor, bitsandbytes, gpt-oss.
        ({"quant_method": "quark", "fmt": "e4m3"}, "quark, e4m3"),
        ({"quant_method": "hqq", "bits": 4, "group_size": 64}, "hqq, 4 bits"),
        ({"quant_method": "auto-round", "bits": 4}, "auto-round, 4 bits"),
        (
            {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"},
            "compressed-tensors, nvfp4-pack-quantized",
        ),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes, 4 bits"),
        ({"quant_method": "mxfp4"}, "mxfp4"),
    ],
)
def test_a_declared_format_is_refused_by_name(declared: dict[str, Any], named: str) -> None:
    assert model_spec(PLAIN).layers == 1
    with pytest.raises(CheckpointError, match="quantised as") as caught:
        model_spec({**PLAIN, "quantization_config": declared})
    assert f"quantised as {named}," in caught.value.message
    assert "use the unquantised checkpoint" in caught.value.message


@pytest.mark.parametrize(
    ("tensor", "label"),
    [
        ("model.layers.0.mlp.up_proj.weight_scale", "FP8"),
        ("model.layers.0.mlp.up_proj.weight_scale_inv", "block FP8"),
        ("model.layers.0.mlp.up_proj.qweight", "GPTQ or AWQ"),
        ("model.layers.0.mlp.up_proj.SCB", "bitsandbytes"),
    ],
)
def test_scales_beside_the_weights_are_refused_where_config_is_silent(
    tmp_path: Path, tensor: str, label: str
) -> None:
    save_file(
        {"a.weight": torch.zeros(2, 2), tensor: torch.ones(1)}, tmp_path / "model.safetensors"
    )
    with pytest.raises(CheckpointError) as caught:
        SafetensorsSource(tmp_path)
    assert tensor in caught.value.message and label in caught.value.message


def test_an_unquantised_checkpoint_passes(tmp_path: Path) -> None:
    save_file({"a.weight": torch.zeros(2, 2)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(PLAIN))
    assert SafetensorsSource(tmp_path).stored_dtype() == torch.float32
