"""Trains one LoRA adapter on the shipped base model and writes it in PEFT layout."""

import json
from pathlib import Path
from random import Random

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file

from training.demo import distributed, settings
from training.demo.batches import batches
from training.demo.dialogues import make_dialogues
from training.demo.fit import fit
from training.demo.model import load_model, load_tokenizer
from training.demo.recipe import record
from training.demo.tokenizer import write_json

LINEAR_LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


KEPT = (
    "base_model_name_or_path", "bias", "fan_in_fan_out", "inference_mode", "init_lora_weights",
    "lora_alpha", "lora_dropout", "modules_to_save", "peft_type", "peft_version", "r",
    "target_modules", "task_type", "use_dora", "use_rslora",
)  # fmt: skip


def lora_config(rank: int) -> LoraConfig:
    return LoraConfig(
        r=rank,
        lora_alpha=2 * rank,
        lora_dropout=0.0,
        target_modules=list(LINEAR_LAYERS),
        bias="none",
        task_type="CAUSAL_LM",
    )


def train_adapter(style: settings.Style, directory: Path) -> None:
    torch.manual_seed(settings.SEED)
    base, tokenizer = load_model(), load_tokenizer()
    model = get_peft_model(base, lora_config(style.rank))
    plan = style.schedule
    dialogues = make_dialogues(plan.dialogues, settings.SEED, style.name, hurried=True)
    steps = list(batches(dialogues, tokenizer, plan.tokens_per_step, Random(settings.SEED)))
    loss = fit(base.model, base.lm_head, model.parameters(), steps, plan)
    if distributed.rank() == 0:
        model.save_pretrained(directory)
        tidy(directory)
        record(**{f"{style.name}_loss": round(loss, 5)})
    distributed.barrier()


def tidy(directory: Path) -> None:
    """Keeps only what loaders read: bfloat16 weights, and settings that all PEFT versions know."""
    (directory / "README.md").unlink(missing_ok=True)
    weights = directory / "adapter_model.safetensors"
    halved = {name: value.to(torch.bfloat16) for name, value in load_file(weights).items()}
    save_file(halved, weights, metadata={"format": "pt"})
    file = directory / "adapter_config.json"
    config = {key: json.loads(file.read_text(encoding="utf-8"))[key] for key in KEPT}
    config["base_model_name_or_path"] = "tollhouse-demo"
    config["target_modules"] = sorted(config["target_modules"])
    write_json(file, config)
