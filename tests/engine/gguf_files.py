"""Writes small GGUF files by the format's description, and reads its blocks one value at a time.

Block layouts are those of ggml's `ggml-common.h` and the loops of its `dequantize_row_*`.
"""

import math
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

TYPES = {
    "F32": (0, 1, 4), "F16": (1, 1, 2), "Q4_0": (2, 32, 18), "Q4_1": (3, 32, 20),
    "Q5_0": (6, 32, 22), "Q5_1": (7, 32, 24), "Q8_0": (8, 32, 34), "Q2_K": (10, 256, 84),
    "Q3_K": (11, 256, 110), "Q4_K": (12, 256, 144), "Q5_K": (13, 256, 176),
    "Q6_K": (14, 256, 210), "BF16": (30, 1, 2),
}  # fmt: skip
# Where in a block its float16 factors lie.
_FACTORS = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q2_K": (80, 82),
    "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,),
}  # fmt: skip

Tensor = tuple[str, tuple[int, ...], str, bytes]  # name, shape as torch has it, type, data


class Typed(tuple[int, Any]):
    """A metadata value of a type that its Python type does not tell: (number of the type, value)."""


def u64(value: int) -> Typed:
    return Typed((10, value))


def text(value: str) -> bytes:
    raw = value.encode()
    return struct.pack("<Q", len(raw)) + raw


def _value(value: Any) -> bytes:
    if isinstance(value, Typed):
        return struct.pack("<I", value[0]) + struct.pack("<Q", value[1])
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + text(value)
    if not value or isinstance(value[0], str):
        return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(text, value))
    kind, form = (6, "f") if isinstance(value[0], float) else (5, "i")
    return struct.pack(f"<IIQ{len(value)}{form}", 9, kind, len(value), *value)


def write_gguf(
    path: Path, metadata: dict[str, Any], tensors: Sequence[Tensor], version: int = 3
) -> Path:
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(metadata))
    head += b"".join(text(key) + _value(value) for key, value in metadata.items())
    data = b""
    for name, shape, kind, raw in tensors:
        dims = struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
        head += text(name) + dims + struct.pack("<IQ", TYPES[kind][0], len(data))
        data += raw + bytes(-len(raw) % 32)
    path.write_bytes(head + bytes(-len(head) % 32) + data)
    return path


def random_blocks(kind: str, count: int, seed: int, size: float = 1.0) -> bytes:
    """Any bits in the blocks' integers; factors of usual size, both signs."""
    random = np.random.default_rng(seed)
    raw = random.integers(0, 256, (count, TYPES[kind][2]), dtype=np.uint8)
    for at in _FACTORS[kind]:
        halves = (random.uniform(0.2, 1.0, count) * random.choice([-1, 1], count) * size).astype(
            "<f2"
        )
        raw[:, at : at + 2] = halves.view(np.uint8).reshape(count, 2)
    return raw.tobytes()


def half(block: bytes, at: int) -> float:
    return float(struct.unpack_from("<e", block, at)[0])


def _q4_0(b: bytes) -> list[float]:
    low = [(b[2 + j] & 15) - 8 for j in range(16)]
    return [half(b, 0) * q for q in low + [(b[2 + j] >> 4) - 8 for j in range(16)]]


def _q4_1(b: bytes) -> list[float]:
    both = [b[4 + j] & 15 for j in range(16)] + [b[4 + j] >> 4 for j in range(16)]
    return [half(b, 0) * q + half(b, 2) for q in both]


def _five(b: bytes, at: int) -> list[int]:
    high = struct.unpack_from("<I", b, at)[0]
    low = [b[at + 4 + j] & 15 | (high >> j & 1) << 4 for j in range(16)]
    return low + [b[at + 4 + j] >> 4 | (high >> (j + 16) & 1) << 4 for j in range(16)]


def _q5_0(b: bytes) -> list[float]:
    return [half(b, 0) * (q - 16) for q in _five(b, 2)]


def _q5_1(b: bytes) -> list[float]:
    return [half(b, 0) * q + half(b, 2) for q in _five(b, 4)]


def _q8_0(b: bytes) -> list[float]:
    return [half(b, 0) * q for q in struct.unpack_from("<32b", b, 2)]


def _q2_k(b: bytes) -> list[float]:
    out = []
    for n in range(256):
        part, within = divmod(n, 128)
        shift, place = within // 32 * 2, within % 32
        scale = b[n // 16]
        q = b[16 + part * 32 + place] >> shift & 3
        out.append(half(b, 80) * (scale & 15) * q - half(b, 82) * (scale >> 4))
    return out


def _q3_k(b: bytes) -> list[float]:
    out = []
    for n in range(256):
        part, within = divmod(n, 128)
        shift, place = within // 32 * 2, within % 32
        group = n // 16
        low = b[96 + group % 8] >> 4 * (group // 8) & 15
        scale = (low | (b[96 + 8 + group % 4] >> 2 * (group // 4) & 3) << 4) - 32
        q = b[32 + part * 32 + place] >> shift & 3
        q -= 0 if b[place] >> (n // 32) & 1 else 4
        out.append(half(b, 108) * scale * q)
    return out


def _scale_and_minimum(scales: bytes, j: int) -> tuple[int, int]:
    if j < 4:
        return scales[j] & 63, scales[j + 4] & 63
    scale = scales[j + 4] & 15 | scales[j - 4] >> 6 << 4
    return scale, scales[j + 4] >> 4 | scales[j] >> 6 << 4


def _q4_k(b: bytes) -> list[float]:
    out = []
    for n in range(256):
        scale, minimum = _scale_and_minimum(b[4:16], n // 32)
        q = b[16 + n // 64 * 32 + n % 32] >> 4 * (n // 32 % 2) & 15
        out.append(half(b, 0) * scale * q - half(b, 2) * minimum)
    return out


def _q5_k(b: bytes) -> list[float]:
    out = []
    for n in range(256):
        scale, minimum = _scale_and_minimum(b[4:16], n // 32)
        q = b[48 + n // 64 * 32 + n % 32] >> 4 * (n // 32 % 2) & 15
        q += 16 * (b[16 + n % 32] >> n // 32 & 1)
        out.append(half(b, 0) * scale * q - half(b, 2) * minimum)
    return out


def _q6_k(b: bytes) -> list[float]:
    out = []
    for n in range(256):
        part, within = divmod(n, 128)
        quarter, place = divmod(within, 32)
        low = b[part * 64 + quarter % 2 * 32 + place] >> 4 * (quarter // 2) & 15
        q = (low | (b[128 + part * 32 + place] >> 2 * quarter & 3) << 4) - 32
        scale = struct.unpack_from("<b", b, 192 + n // 16)[0]
        out.append(half(b, 208) * scale * q)
    return out


_READERS: dict[str, Callable[[bytes], list[float]]] = {
    "F32": lambda b: [struct.unpack("<f", b)[0]],
    "F16": lambda b: [half(b, 0)],
    "BF16": lambda b: [struct.unpack("<f", b"\0\0" + b)[0]],
    "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1, "Q8_0": _q8_0,
    "Q2_K": _q2_k, "Q3_K": _q3_k, "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k,
}  # fmt: skip


def scalar_values(kind: str, raw: bytes) -> list[float]:
    size = TYPES[kind][2]
    return [
        value for at in range(0, len(raw), size) for value in _READERS[kind](raw[at : at + size])
    ]


def f32(name: str, tensor: torch.Tensor) -> Tensor:
    return name, tuple(tensor.shape), "F32", tensor.float().contiguous().numpy().tobytes()


def vocabulary(count: int) -> dict[str, Any]:
    """The byte-level alphabet of GPT-2, a few merges, control tokens, then fillers."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = [chr(byte) for byte in printable] + [chr(256 + n) for n in range(len(others))]
    merges = ["h e", "l l", "he ll", "hell o", "Ġ w", "Ġ Ġ"]
    tokens = ["<|end|>", "<|start|>", "<|stop|>", *alphabet, *(m.replace(" ", "") for m in merges)]
    kinds = [3, 3, 3] + [1] * (len(tokens) - 3)
    if count < len(tokens):  # the models of the parity tests have fewer
        tokens, kinds, merges = tokens[:count], kinds[:count], merges[:0]
    extra = count - len(tokens)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens + [f"[PAD{n}]" for n in range(extra)],
        "tokenizer.ggml.token_type": kinds + [5] * extra,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


_NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
}  # fmt: skip
_GEMMA = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def converted(checkpoint: Path, path: Path, **changes: Any) -> Path:
    """The float32 checkpoint as llama.cpp's converter writes it."""
    config = AutoConfig.from_pretrained(checkpoint)
    family = "llama" if config.model_type == "mistral" else config.model_type
    names = _NAMES | (_GEMMA if family == "gemma2" else {})
    tensors = []
    for name, tensor in load_file(checkpoint / "model.safetensors").items():
        stem, _, last = name.removeprefix("model.").rpartition(".")
        if family == "llama" and ("q_proj" in stem or "k_proj" in stem):
            heads = config.num_attention_heads if "q_proj" in stem else config.num_key_value_heads
            tensor = neighboured(tensor, heads)
        if family == "gemma2" and "norm" in stem:
            tensor = tensor + 1
        top = {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}.get(stem)
        if top is None:
            _, layer, part = stem.split(".", 2)
            top = f"blk.{layer}.{names[part]}"
        tensors.append(f32(f"{top}.{last}", tensor))
    rope = rope_factors(checkpoint, config)
    if rope is not None:
        tensors.append(rope)
    return write_gguf(path, metadata_of(config, family) | changes, tensors)


def neighboured(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """Row by row: of each head, rows 0, n/2, 1, n/2 + 1, ..."""
    size = tensor.shape[0] // heads
    order = [
        head * size + half_ * (size // 2) + row
        for head in range(heads)
        for row in range(size // 2)
        for half_ in range(2)
    ]
    return tensor[order]


def rope_factors(checkpoint: Path, config: Any) -> Tensor | None:
    if config.rope_parameters.get("rope_type") != "llama3":
        return None
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    found = model.model.rotary_emb.inv_freq
    size = len(found) * 2
    theta = config.rope_parameters["rope_theta"]
    plain = torch.tensor([theta ** (-2 * n / size) for n in range(size // 2)])
    return f32("rope_freqs.weight", plain / found)


def metadata_of(config: Any, family: str) -> dict[str, Any]:
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    own: dict[str, Any] = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "attention.key_length": head,
        "attention.value_length": head,
        "rope.freq_base": float(config.rope_parameters["rope_theta"]),
    }
    if config.model_type in ("mistral", "gemma2") and config.sliding_window:
        own["attention.sliding_window"] = config.sliding_window
    if family == "gemma2":
        own["attn_logit_softcapping"] = float(config.attn_logit_softcapping)
        own["final_logit_softcapping"] = float(config.final_logit_softcapping)
    rope = config.rope_parameters
    if rope.get("rope_type") in ("linear", "yarn"):
        own["rope.scaling.type"] = rope["rope_type"]
        own["rope.scaling.factor"] = float(rope["factor"])
        if "original_max_position_embeddings" in rope:
            own["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
    return {
        "general.architecture": family,
        **{f"{family}.{key}": value for key, value in own.items()},
        **vocabulary(config.vocab_size),
    }


def size_of(kind: str, shape: tuple[int, ...]) -> int:
    """Blocks in a tensor."""
    return math.prod(shape) // TYPES[kind][1]
