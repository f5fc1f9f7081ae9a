"""The work: a random checkpoint, adapters for it, and prompts, made once and kept."""

import json
import os
import random
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.home import home
from engine.backends.layers.linear import multiplies_bfloat16

HEAD_DIM = 64
RANK = 16


@dataclass(frozen=True)
class Shape:
    """About 200 million parameters by default; `SMALL` tries a script in seconds."""

    hidden: int = 1024
    inner: int = 2816
    layers: int = 16
    heads: int = 16
    kv_heads: int = 4
    vocab: int = 16000
    experts: int = 0  # of which each token uses two


MIXED = Shape(hidden=512, inner=1408, layers=8, heads=8, experts=8)
SMALL = Shape(hidden=256, inner=512, layers=2, heads=4, kv_heads=2, vocab=1024)


@dataclass(frozen=True)
class Work:
    """What every engine is given. Prompts are ids; outputs are counted, EOS is ignored."""

    checkpoint: str
    adapters: list[str]
    prompts: list[list[int]]
    output: int
    threads: int
    repeats: int
    bfloat16: bool  # whether the processor multiplies it; else each takes what serves it best
    int8: bool = False  # whether weights are rounded to 8 bits


def make_work(quick: bool, threads: int, *, experts: bool = False, int8: bool = False) -> Work:
    """With `experts` the model is a mixture of them; with these or `int8` there are no adapters."""
    shape = SMALL if quick else MIXED if experts else Shape()
    shape = replace(shape, experts=MIXED.experts) if experts else shape
    name = "work-experts" if experts else "work"
    where = home() / (f"{name}-quick" if quick else name)
    count, prompt, output = (4, 32, 8) if quick else (32, 128, 64)
    random_ids = random.Random(17)
    prompts = [[random_ids.randrange(3, shape.vocab) for _ in range(prompt)] for _ in range(count)]
    return Work(
        checkpoint=str(_checkpoint(where / "base", shape)),
        adapters=[
            str(_adapter(where / f"adapter-{n}", shape, n))
            for n in range(0 if experts or int8 else 32)
        ],
        prompts=prompts,
        output=output,
        threads=threads,
        repeats=1 if quick else 3,
        bfloat16=multiplies_bfloat16(),
        int8=int8,
    )


def save_work(work: Work, path: Path) -> Path:
    path.write_text(json.dumps(asdict(work)), encoding="utf-8")
    return path


def registered_directories(work: Work, count: int) -> list[Path]:
    """`count` adapters that differ to the engine: linked weights, each with an alpha of its own."""
    root = Path(work.checkpoint).parent / "registered"
    made = []
    for n in range(count):
        source = Path(work.adapters[n % len(work.adapters)])
        target = root / str(n)
        made.append(target)
        if (target / "adapter_config.json").exists():
            continue
        target.mkdir(parents=True, exist_ok=True)
        weights = target / "adapter_model.safetensors"
        if not weights.exists():
            os.link(source / "adapter_model.safetensors", weights)
        config = json.loads((source / "adapter_config.json").read_text(encoding="utf-8"))
        config["lora_alpha"] = RANK + n / 1000
        (target / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    return made


def _checkpoint(where: Path, shape: Shape) -> Path:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.inner,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": HEAD_DIM,
        "vocab_size": shape.vocab,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    if shape.experts:
        mixed = {"num_local_experts": shape.experts, "num_experts_per_tok": 2}
        config |= {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", **mixed}
    if (where / "config.json").exists():
        return where
    generator = torch.Generator().manual_seed(0)
    tensors = {
        "model.embed_tokens.weight": _random(generator, shape.vocab, shape.hidden),
        "model.norm.weight": torch.ones(shape.hidden, dtype=torch.bfloat16),
    }
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}"
        for name, (out, width) in _matrices(shape).items():
            tensors[f"{prefix}.{name}.weight"] = _random(generator, out, width)
        for name in ("input_layernorm", "post_attention_layernorm"):
            ones = torch.ones(shape.hidden, dtype=torch.bfloat16)
            tensors[f"{prefix}.{name}.weight"] = ones
    _save(where, "model.safetensors", tensors, "config.json", config)
    return where


def _adapter(where: Path, shape: Shape, seed: int) -> Path:
    if (where / "adapter_config.json").exists():
        return where
    generator = torch.Generator().manual_seed(1000 + seed)
    tensors = {}
    for layer in range(shape.layers):
        for name, (out, width) in _matrices(shape).items():
            key = f"base_model.model.model.layers.{layer}.{name}"
            tensors[f"{key}.lora_A.weight"] = _random(generator, RANK, width)
            tensors[f"{key}.lora_B.weight"] = _random(generator, out, RANK)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": RANK,
        "lora_alpha": RANK,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": [name.split(".")[-1] for name in _matrices(shape)],
        "base_model_name_or_path": None,
    }
    _save(where, "adapter_model.safetensors", tensors, "adapter_config.json", config)
    return where


def _matrices(shape: Shape) -> dict[str, tuple[int, int]]:
    """(out, in) of every linear layer."""
    q, kv = shape.heads * HEAD_DIM, shape.kv_heads * HEAD_DIM
    attention = {
        "self_attn.q_proj": (q, shape.hidden),
        "self_attn.k_proj": (kv, shape.hidden),
        "self_attn.v_proj": (kv, shape.hidden),
        "self_attn.o_proj": (shape.hidden, q),
    }
    sizes = {"gate": (shape.inner, shape.hidden), "up": (shape.inner, shape.hidden)}
    sizes["down"] = shape.hidden, shape.inner
    if not shape.experts:
        return attention | {f"mlp.{name}_proj": size for name, size in sizes.items()}
    names = {"gate": "w1", "up": "w3", "down": "w2"}
    experts = {
        f"block_sparse_moe.experts.{n}.{names[name]}": size
        for n in range(shape.experts)
        for name, size in sizes.items()
    }
    return attention | experts | {"block_sparse_moe.gate": (shape.experts, shape.hidden)}


def _random(generator: torch.Generator, *size: int) -> torch.Tensor:
    return (torch.randn(*size, generator=generator) * 0.02).bfloat16()


def _save(
    where: Path,
    name: str,
    tensors: dict[str, torch.Tensor],
    config_file: str,
    config: dict[str, Any],
) -> None:
    where.mkdir(parents=True, exist_ok=True)
    save_file(tensors, where / name, metadata={"format": "pt"})
    (where / config_file).write_text(json.dumps(config), encoding="utf-8")
