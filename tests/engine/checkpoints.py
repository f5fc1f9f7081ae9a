"""Tiny random checkpoints and adapters, written by the libraries that define their layouts."""

import json
import warnings
from pathlib import Path
from typing import Any

import peft
import torch
import transformers

VOCAB = 211

_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}

ALL_LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def save_checkpoint(
    directory: Path, family: str = "Llama", shard: str | None = None, **changes: Any
) -> Path:
    """A float32 checkpoint of the family with weights large enough for answers to differ."""
    torch.manual_seed(7)
    kind = getattr(transformers, f"{family}ForCausalLM")
    model = kind(kind.config_class(**(_SHAPE | changes))).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.6 / parameter.shape[1] ** 0.5 if "proj" in name else 0.3)
            elif any(each in name for each in ("bias", "norm", "sinks", "scale")):
                parameter.add_(0.2 * torch.randn_like(parameter))
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0, 0.3)
    model.save_pretrained(directory, **({"max_shard_size": shard} if shard else {}))
    return directory


def reference(directory: Path, dtype: torch.dtype = torch.float32) -> Any:
    """The checkpoint as `transformers` runs it, by the plain attention that caps scores too. That of
    Falcon adds its linear biases twice; the other adds them once, as the model's own code does."""
    falcon = json.loads((directory / "config.json").read_text())["model_type"] == "falcon"
    return transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=dtype, attn_implementation="sdpa" if falcon else "eager"
    ).eval()


def save_adapter(
    checkpoint: Path,
    directory: Path,
    rank: int,
    seed: int,
    targets: list[str] | str | None = None,
    **changes: Any,
) -> Path:
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    config = peft.LoraConfig(
        r=rank,
        lora_alpha=changes.pop("lora_alpha", 2 * rank),
        target_modules=targets or ALL_LINEAR,
        init_lora_weights=False,
        **changes,
    )
    with warnings.catch_warnings():  # the two libraries' own deprecations, and what PEFT saves
        warnings.simplefilter("ignore")
        adapted = peft.get_peft_model(model, config)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.normal_(0, 0.12)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapted.save_pretrained(directory)
    return directory


def adapted_reference(checkpoint: Path, adapter: Path) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return peft.PeftModel.from_pretrained(reference(checkpoint), adapter).eval()


@torch.no_grad()
def reference_logits(model: Any, ids: list[int]) -> torch.Tensor:
    """[len(ids), vocab]"""
    return model(torch.tensor([ids])).logits[0].float()


@torch.no_grad()
def reference_greedy(model: Any, prompt: list[int], count: int) -> list[int]:
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]
