"""llama.cpp on the work in bf16, or f16 where the processor lacks it, all in one batch, greedy.

By its C interface; the checkpoint is written to GGUF first. Its adapters are set for a whole batch,
so the mixed batch is not run. Stands alone: it runs in an environment without this project.
"""

import json
import sys
from pathlib import Path
from typing import Any

import gguf
import llama_cpp as lc
import numpy as np
from llama_cpp_batch import rate
from protocol import answer


def main() -> None:
    with open(sys.argv[1], encoding="utf-8") as file:
        work = json.load(file)
    path = _write_gguf(Path(work["checkpoint"]), "BF16" if work["bfloat16"] else "F16")
    lc.llama_backend_init()
    model = lc.llama_model_load_from_file(str(path).encode(), lc.llama_model_default_params())
    prompts = work["prompts"]
    rate(model, work, prompts[:2])
    answer(
        {
            "base": lambda: rate(model, work, prompts),
            "one": lambda: rate(model, work, prompts[:1]),
        }
    )


def _write_gguf(checkpoint: Path, kind: str) -> Path:
    target = checkpoint.parent / f"model-{kind.lower()}.gguf"
    if target.exists():
        return target
    with open(checkpoint / "config.json", encoding="utf-8") as file:
        config = json.load(file)
    tensors = _read(checkpoint / "model.safetensors")
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    partial = target.with_suffix(".part")
    writer = gguf.GGUFWriter(str(partial), "llama")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{kind}"])
    writer.add_tokenizer_model("no_vocab")
    names = {"model.embed_tokens.weight": "token_embd.weight"}
    names["model.norm.weight"] = "output_norm.weight"
    for n in range(config["num_hidden_layers"]):
        for theirs, ours in _NAMES.items():
            names[f"model.layers.{n}.{theirs}.weight"] = f"blk.{n}.{ours}.weight"
    for name, ours in names.items():
        data = tensors[name]
        if name.endswith("q_proj.weight"):
            data = _interleaved(data, heads)
        elif name.endswith("k_proj.weight"):
            data = _interleaved(data, kv_heads)
        wide = (data.astype(np.uint32) << 16).view(np.float32)
        if data.ndim == 1:  # norms are kept in float32
            writer.add_tensor(ours, wide)
        elif kind == "F16":
            writer.add_tensor(ours, wide.astype(np.float16))
        else:
            raw = np.ascontiguousarray(data).view(np.uint8)
            writer.add_tensor(ours, raw, raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    partial.rename(target)
    return target


_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def _interleaved(weight: Any, heads: int) -> Any:
    """Rows in the order of llama.cpp's rotation, which pairs neighbours and not halves."""
    shape = weight.shape
    return weight.reshape(heads, 2, -1, shape[1]).swapaxes(1, 2).reshape(shape)


def _read(path: Path) -> dict[str, Any]:
    """bfloat16 tensors of a safetensors file as uint16 arrays."""
    raw = path.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + size])
    header.pop("__metadata__", None)
    found = {}
    for name, entry in header.items():
        assert entry["dtype"] == "BF16", entry
        begin, end = entry["data_offsets"]
        data = np.frombuffer(raw, np.uint16, (end - begin) // 2, 8 + size + begin)
        found[name] = data.reshape(entry["shape"])
    return found


if __name__ == "__main__":
    main()
