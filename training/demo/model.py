"""The demo model's configuration; creates and saves the model in Hugging Face layout."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

from engine.demo.paths import MODEL_DIR
from training.demo.chat import END, PAD
from training.demo.settings import CONTEXT, SEED, SHAPE
from training.demo.tokenizer import write_json


def config_of(tokenizer: Tokenizer) -> dict[str, Any]:
    """The content of config.json."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": tokenizer.get_vocab_size(),
        "hidden_size": SHAPE.hidden,
        "intermediate_size": SHAPE.intermediate,
        "num_hidden_layers": SHAPE.layers,
        "num_attention_heads": SHAPE.heads,
        "num_key_value_heads": SHAPE.kv_heads,
        "head_dim": SHAPE.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": SHAPE.norm_eps,
        "rope_theta": SHAPE.rope_theta,
        "rope_scaling": None,
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": tokenizer.token_to_id(END),
        "pad_token_id": tokenizer.token_to_id(PAD),
        "torch_dtype": "bfloat16",
        "use_cache": True,
    }


def new_model(config: dict[str, Any]) -> LlamaForCausalLM:
    torch.manual_seed(SEED)
    return LlamaForCausalLM(LlamaConfig(**{**config, "torch_dtype": "float32"}))


def load_model() -> LlamaForCausalLM:
    """The shipped model, in float32."""
    return LlamaForCausalLM.from_pretrained(MODEL_DIR, dtype=torch.float32)


def load_tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json"))


def write_config(config: dict[str, Any], directory: Path) -> None:
    write_json(directory / "config.json", config)
    generation = {
        "eos_token_id": config["eos_token_id"],
        "pad_token_id": config["pad_token_id"],
        "do_sample": False,
        "max_new_tokens": 512,
    }
    write_json(directory / "generation_config.json", generation)


def write_weights(model: LlamaForCausalLM, directory: Path) -> None:
    """Saves in bfloat16; the output head is tied to the embedding and not stored."""
    tensors = {
        name: value.detach().to(torch.bfloat16).contiguous()
        for name, value in model.state_dict().items()
        if name != "lm_head.weight"
    }
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
