"""Small models of every family, each with a tokenizer, that the hostile files are made of."""

import json
import shutil
from pathlib import Path
from typing import Any

import transformers
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from engine.models.registry import FAMILIES
from tests.engine.checkpoints import save_adapter, save_checkpoint
from tests.engine.gguf_files import converted

VOCAB = 288
_CHAT = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_EXPERTS: dict[str, Any] = {
    "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 28,
}  # fmt: skip
_MLA: dict[str, Any] = {
    "num_key_value_heads": 4, "kv_lora_rank": 26, "q_lora_rank": 22, "qk_rope_head_dim": 10,
    "qk_nope_head_dim": 14, "v_head_dim": 18, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 28, "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1,
}  # fmt: skip
_WINDOW = {"head_dim": 16, "sliding_window": 22}
_KINDS = {"layer_types": ["sliding_attention", "full_attention"]}
_SHAPES: dict[str, dict[str, Any]] = {
    "Gemma2": _WINDOW,
    "Gemma3": _WINDOW | _KINDS,
    "Gemma3n": _WINDOW | _KINDS | {
        "num_kv_shared_layers": 0, "vocab_size_per_layer_input": VOCAB, "laurel_rank": 10,
        "hidden_size_per_layer_input": 24, "activation_sparsity_pattern": [0.9, 0.0],
    },
    "Qwen3": {"head_dim": 16}, "Qwen3Moe": _EXPERTS | {"head_dim": 16}, "Mixtral": _EXPERTS,
    "Qwen2Moe": _EXPERTS | {"shared_expert_intermediate_size": 32},
    "GptOss": _EXPERTS | {"head_dim": 16, "sliding_window": 18}, "DeepseekV2": _MLA, "DeepseekV3": _MLA,
    "Cohere2": {"sliding_window": 22}, "Mistral": {"sliding_window": 24},
}  # fmt: skip
# A model with a tower for images is made of the text model: (its family, the name of its decoder).
_TOWERS = {
    "Gemma3ForConditionalGeneration": ("Gemma3ForCausalLM", "language_model.model."),
    "Gemma3nForConditionalGeneration": ("Gemma3nForCausalLM", "model.language_model."),
}
GGUF_FAMILIES = ("Llama", "Mistral", "Qwen2", "Qwen3", "Gemma2")


def make(directory: Path) -> None:
    """A folder for each family, by its architecture, an adapter of each (`adapters/…`), and GGUF files
    (`gguf/….gguf`)."""
    for family in sorted(FAMILIES):
        if family in _TOWERS:
            continue
        folder = directory / family
        short = family.removesuffix("ForCausalLM")
        shape = {"vocab_size": VOCAB, "num_hidden_layers": 2} | _SHAPES.get(short, {})
        save_checkpoint(folder, short, **shape)
        _write_whole_config(folder, family)
        _write_tokenizer(folder)
    for family, (text, root) in _TOWERS.items():
        _with_tower(directory / text, directory / family, family, root)
    (directory / "gguf").mkdir()
    for short in GGUF_FAMILIES:
        folder = directory / f"{short}ForCausalLM"
        converted(folder, directory / "gguf" / f"{short}.gguf")
    for short in ("Llama", "Mixtral"):
        save_adapter(directory / f"{short}ForCausalLM", directory / "adapters" / short, 4, 1)


def _write_whole_config(folder: Path, family: str) -> None:
    """With every field that the library knows of the family."""
    kind = getattr(transformers, family).config_class
    config = json.loads(kind.from_pretrained(folder).to_json_string(use_diff=False))
    config |= {"architectures": [family], "torch_dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(config))


def _with_tower(text: Path, folder: Path, family: str, root: str) -> None:
    shutil.copytree(text, folder)
    config = json.loads((text / "config.json").read_text())
    kind = getattr(transformers, family).config_class.model_type
    whole = {"architectures": [family], "model_type": kind, "text_config": config}
    (folder / "config.json").write_text(json.dumps(whole | {"vision_config": {"hidden_size": 8}}))
    tensors = load_file(text / "model.safetensors")
    renamed = {root + name.removeprefix("model."): each for name, each in tensors.items()}
    save_file(renamed, folder / "model.safetensors", metadata={"format": "pt"})


def _write_tokenizer(folder: Path) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {text: number for number, text in enumerate(["<unk>", "<s>", "</s>", *alphabet])}
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("Ġ", "w"), ("Ġ", "t")]
    for left, right in merges:
        vocab[left + right] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
    tokenizer.add_special_tokens([AddedToken(each, special=True) for each in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "bos_token": "<s>", "eos_token": "<|im_end|>", "unk_token": "<unk>", "pad_token": None,
        "tokenizer_class": "PreTrainedTokenizerFast", "chat_template": _CHAT, "add_bos_token": False,
        "model_max_length": 256, "clean_up_tokenization_spaces": False,
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
