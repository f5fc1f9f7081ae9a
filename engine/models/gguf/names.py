"""GGUF's tensor names as Hugging Face checkpoints have them, and what its converter changed.

Source: `convert_hf_to_gguf.py` of llama.cpp.
"""

import re
from dataclasses import dataclass

from engine.models.gguf.fields import Fields
from engine.models.gguf.header import GgufHeader, TensorInfo

_BLOCK = re.compile(r"blk\.(0|[1-9]\d*)\.(\w+)\.(weight|bias)")
_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_PARTS = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
_QWEN3 = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_GEMMA2 = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
ROPE_FACTORS = "rope_freqs.weight"  # read into the configuration


@dataclass(frozen=True, slots=True)
class Placed:
    """A tensor of the file. With `heads`, its rows lie in the order of a rotation that pairs
    neighbours, and are to be put back into halves; `offset` is taken off each value."""

    info: TensorInfo
    heads: int = 0
    offset: float = 0.0


def hugging_face_names(header: GgufHeader, fields: Fields) -> dict[str, Placed]:
    """Raises CheckpointError for a tensor that the architecture has no place for."""
    architecture = fields.architecture
    parts = _PARTS | {"qwen3": _QWEN3, "gemma2": _GEMMA2}.get(architecture, {})
    heads = fields.whole(fields.own("attention.head_count"))
    rows = {
        "attn_q": heads,
        "attn_k": fields.whole(fields.own("attention.head_count_kv"), heads),
    }
    turned = rows if architecture == "llama" else {}
    found: dict[str, Placed] = {}
    for name, info in header.tensors.items():
        if name == ROPE_FACTORS:
            continue
        match = _BLOCK.fullmatch(name)
        part = match[2] if match else ""
        if match is not None and part in parts:
            target = f"model.layers.{int(match[1])}.{parts[part]}.{match[3]}"
        elif name in _TOP:
            target = _TOP[name]
        else:
            raise fields.fail(f"tensor {name} belongs to no part of {architecture} models")
        # Gemma's norms multiply by 1 + weight; the file holds the sum.
        offset = 1.0 if architecture == "gemma2" and name.endswith("norm.weight") else 0.0
        found[target] = Placed(info, turned.get(part, 0), offset)
    return found
