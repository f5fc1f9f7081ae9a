"""A GGUF file's metadata as the `config.json` that the same model has in Hugging Face layout."""

import re
from typing import Any

import numpy as np

from engine.json_fields import shown
from engine.models.gguf.dequantise import dequantise
from engine.models.gguf.fields import Fields
from engine.models.gguf.header import GgufHeader
from engine.models.gguf.names import ROPE_FACTORS
from engine.regular_files import open_regular

_CLASSES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
}
# Fields of config.json, by what they are called in a file's metadata.
_KEYS = {
    "hidden_size": "embedding_length", "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count", "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv", "head_dim": "attention.key_length",
    "max_position_embeddings": "context_length", "sliding_window": "attention.sliding_window",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon", "rope_theta": "rope.freq_base",
    "rope_scaling.factor": "rope.scaling.factor", "vocab_size": "vocab_size",
    "rope_scaling.original_max_position_embeddings": "rope.scaling.original_context_length",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}  # fmt: skip
_FIELD = re.compile("|".join(rf"\b{re.escape(each)}\b" for each in sorted(_KEYS, key=len)[::-1]))
_GEMMA2_27B_LAYERS = 46  # the size whose queries are scaled by hidden / heads, not by the head


def read_config(header: GgufHeader, fields: Fields) -> dict[str, Any]:
    """All but the end tokens. Raises CheckpointError for an unsupported architecture or value."""
    architecture = fields.architecture
    if architecture not in _CLASSES:
        known = ", ".join(_CLASSES)
        raise fields.fail(f"general.architecture is {shown(architecture)}; supported: {known}")
    own = fields.own
    if fields.whole(own("expert_count"), 0) > 0:
        raise fields.fail(f"{own('expert_count')} is set: mixtures of experts are not supported")
    config: dict[str, Any] = {
        "architectures": [_CLASSES[architecture]],
        "model_type": architecture,
        "vocab_size": _vocabulary(header, fields),
        "hidden_size": fields.whole(own("embedding_length")),
        "intermediate_size": fields.whole(own("feed_forward_length")),
        "num_hidden_layers": fields.whole(own("block_count")),
        "num_attention_heads": fields.whole(own("attention.head_count")),
        "max_position_embeddings": fields.whole(own("context_length")),
        "rms_norm_eps": fields.number(own("attention.layer_norm_rms_epsilon")),
        "rope_theta": fields.number(own("rope.freq_base"), 10000.0),
        "hidden_act": "silu",
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "bos_token_id": fields.values.get("tokenizer.ggml.bos_token_id"),
        "torch_dtype": "float16",
    }
    heads = config["num_attention_heads"]
    config["num_key_value_heads"] = fields.whole(own("attention.head_count_kv"), heads)
    config["head_dim"] = _head_size(fields, config["hidden_size"], heads)
    scaling = _rope_scaling(header, fields, config["head_dim"])
    if scaling is not None:
        config["rope_scaling"] = scaling
    if architecture == "gemma2":
        config.update(_gemma2(fields, config))
    elif architecture == "llama" and own("attention.sliding_window") in fields.values:
        config["architectures"], config["model_type"] = ["MistralForCausalLM"], "mistral"
        config["sliding_window"] = fields.whole(own("attention.sliding_window"))
    return config


def in_own_words(message: str, fields: Fields) -> str:
    """What is wrong with the configuration, with the metadata's keys in place of its fields."""
    plain = message.removeprefix("config.json: ")
    return _FIELD.sub(lambda match: fields.own(_KEYS[match[0]]), plain)


def _vocabulary(header: GgufHeader, fields: Fields) -> int:
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None:
        raise fields.fail("tensor token_embd.weight is missing")
    declared = fields.whole(fields.own("vocab_size"), embedding.shape[0])
    if declared != embedding.shape[0]:
        raise fields.fail(
            f"{fields.own('vocab_size')} is {declared}, but token_embd.weight has "
            f"{embedding.shape[0]} rows"
        )
    return declared


def _head_size(fields: Fields, hidden: int, heads: int) -> int:
    if heads < 1:
        raise fields.fail(f"{fields.own('attention.head_count')} is {heads}: it must be above 0")
    size = fields.whole(fields.own("attention.key_length"), hidden // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        other = fields.whole(fields.own(key), size)
        if other != size:
            raise fields.fail(
                f"{fields.own(key)} is {other}: only the head size, {size}, is supported"
            )
    return size


def _rope_scaling(header: GgufHeader, fields: Fields, head: int) -> dict[str, Any] | None:
    own = fields.own
    if ROPE_FACTORS in header.tensors:
        return {"rope_type": "divided", "divisors": _divisors(header, fields, head)}
    named = own("rope.scaling.type")
    kind = fields.text(named) if named in fields.values else "none"
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise fields.fail(
            f"{own('rope.scaling.type')} is {shown(kind)}; supported: none, linear, yarn"
        )
    scaling: dict[str, Any] = {
        "rope_type": kind,
        "factor": fields.number(own("rope.scaling.factor")),
    }
    if own("rope.scaling.original_context_length") in fields.values:
        scaling["original_max_position_embeddings"] = fields.whole(
            own("rope.scaling.original_context_length")
        )
    return scaling


def _divisors(header: GgufHeader, fields: Fields, head: int) -> list[float]:
    """Llama 3.1's scaling comes as a factor for each frequency, worked out by the converter."""
    info = header.tensors[ROPE_FACTORS]
    if info.shape != (head // 2,):
        raise fields.fail(f"{ROPE_FACTORS} has shape {list(info.shape)}: it must be [{head // 2}]")
    with open_regular(info.path) as file:
        file.seek(info.start)
        raw = np.frombuffer(file.read(info.bytes), np.uint8)
    values = dequantise(info.type, raw)
    if not (np.isfinite(values).all() and (values > 0).all()):
        raise fields.fail(f"{ROPE_FACTORS} holds values that are not above 0")
    return [float(value) for value in values]


def _gemma2(fields: Fields, config: dict[str, Any]) -> dict[str, Any]:
    """Missing values are those that all published sizes share."""
    scalar = config["head_dim"]
    if config["num_hidden_layers"] == _GEMMA2_27B_LAYERS:
        scalar = config["hidden_size"] // config["num_attention_heads"]
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": scalar,
        "sliding_window": fields.whole(fields.own("attention.sliding_window"), 4096),
        "attn_logit_softcapping": fields.number(fields.own("attn_logit_softcapping"), 50.0),
        "final_logit_softcapping": fields.number(fields.own("final_logit_softcapping"), 30.0),
    }
