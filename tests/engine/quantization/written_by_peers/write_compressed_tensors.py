"""Writes the checkpoints beside this file with compressed-tensors' own compressor, and the logits of its
own dequantised weights by `transformers`.

    pip install compressed-tensors==0.20.0 && python \
        tests/engine/quantization/written_by_peers/write_compressed_tensors.py

It is not part of the development extra, because tests read what it has written.
"""

from pathlib import Path

import torch
import transformers
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
    apply_quantization_config,
)
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import save_file

HERE = Path(__file__).parent
VOCAB = 61
IDS = [3 + (n * n * 7 + n) % (VOCAB - 3) for n in range(24)]
_BYTE = {"num_bits": 8, "symmetric": True}
_ROWS = {**_BYTE, "dynamic": True, "strategy": "token"}
# Weights, and activations where they are rounded too.
SCHEMES = {
    "int4-group": ({"num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": True}, None),
    "int4-group-zeros": (
        {"num_bits": 4, "strategy": "group", "group_size": 64, "symmetric": False}, None),
    "int8-channel": ({**_BYTE, "strategy": "channel"}, None),
    "w8a8": ({**_BYTE, "strategy": "channel"}, {**_ROWS, "type": "int"}),
    "fp8-channel": ({**_BYTE, "type": "float", "strategy": "channel"}, {**_ROWS, "type": "float"}),
}  # fmt: skip


def model() -> transformers.LlamaForCausalLM:
    torch.manual_seed(7)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
        bos_token_id=1, eos_token_id=2, pad_token_id=0, tie_word_embeddings=True,
    )  # fmt: skip
    made = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.1 if "proj" in name else 0.3)
    return made.bfloat16().eval()


def ends(weight: torch.Tensor, args: QuantizationArgs) -> tuple[torch.Tensor, torch.Tensor]:
    """The least and most of what shares a scale."""
    groups = weight.view(weight.shape[0], -1, args.group_size or weight.shape[1])
    return groups.amin(2), groups.amax(2)


@torch.no_grad()
def write(name: str, target: Path) -> None:
    weights, rows = SCHEMES[name]
    scheme = QuantizationScheme(
        targets=["Linear"],
        weights=QuantizationArgs(**weights),
        input_activations=None if rows is None else QuantizationArgs(**rows),
    )
    made = model()
    config = QuantizationConfig(config_groups={"group_0": scheme}, ignore=["lm_head"])
    apply_quantization_config(made, config, show_progress=False)
    for module in made.modules():
        if getattr(module, "quantization_scheme", None) is not None:
            args = module.quantization_scheme.weights
            scale, zero = calculate_qparams(*ends(module.weight.float(), args), args)
            module.weight_scale.copy_(scale)
            if hasattr(module, "weight_zero_point"):
                module.weight_zero_point.copy_(zero)
    compressor = ModelCompressor.from_pretrained_model(made)
    compressor.compress_model(made)
    made.save_pretrained(target)
    compressor.update_config(str(target))
    for module in made.modules():  # so that its products with the codes are not rounded
        if hasattr(module, "weight_scale"):
            module.weight_scale.data = module.weight_scale.data.float()
    compressor.decompress_model(made)
    for module in made.modules():
        module.quantization_enabled = False  # activations stay as they are
    plain = transformers.LlamaForCausalLM(made.config).eval()
    values = {key: each.float() for key, each in made.state_dict().items()}
    plain.load_state_dict({key: values[key] for key in plain.state_dict()})
    ids = torch.tensor(IDS)
    save_file({"ids": ids, "logits": plain(ids[None]).logits[0]}, target / "expected.safetensors")
    (target / "generation_config.json").unlink()


if __name__ == "__main__":
    for each in SCHEMES:
        write(each, HERE / f"compressed-tensors-{each}")
