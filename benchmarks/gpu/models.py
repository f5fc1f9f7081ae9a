"""Models of well-known shapes with random weights, made on the device in a moment."""

from typing import Any, cast

import torch
from torch import Tensor

from engine.adapters.files import AdapterWeights
from engine.backends.layers.adapter_extras import AdapterExtras
from engine.backends.layers.device.linear import DeviceLinear
from engine.backends.layers.device.mixture import DeviceMixture
from engine.backends.layers.latent import LatentOutput, LatentQkv
from engine.backends.layers.linear import DenseLinear
from engine.backends.layers.matrices import PARTS, SITE_OF, latent_shapes, part_shape
from engine.backends.layers.norm import RmsNorm
from engine.backends.layers.packed import Codes
from engine.config import EngineConfig
from engine.model_spec import ModelSpec
from engine.models.decoder import Decoder
from engine.models.load import LoadedModel
from engine.models.registry import model_spec
from engine.models.weights import Weights
from engine.runners.gpu.runner import GpuRunner

LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rope_theta": 500000.0,
    "rms_norm_eps": 1e-5,
}
QWEN3_06B = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 4096,
    "rope_theta": 1000000.0,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
}


QWEN3_30B_A3B = QWEN3_06B | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "tie_word_embeddings": False,
}
# Without experts: what is measured of it is its attention.
DEEPSEEK_V3 = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 3,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 256,
    "n_group": 8,
    "topk_group": 4,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "moe_intermediate_size": 2048,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "vocab_size": 129280,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
}
# E4B, with few layers, of which `num_kv_shared_layers` read the keys of those before.
GEMMA3N = {
    "architectures": ["Gemma3nForCausalLM"],
    "model_type": "gemma3n_text",
    "hidden_size": 2048,
    "intermediate_size": 16384,
    "num_hidden_layers": 3,
    "num_kv_shared_layers": 0,
    "layer_types": ["full_attention"] * 3,
    "activation_sparsity_pattern": [0.95] * 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "sliding_window": 512,
    "vocab_size": 262400,
    "vocab_size_per_layer_input": 262144,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
}
# By the name of a format: kind of codes, bits, inputs of a scale (None: all), whether rows are rounded.
CODES: dict[str, tuple[str, int, int | None, bool]] = {
    "int4": ("int", 4, 128, False),  # as AWQ, GPTQ and compressed-tensors store it
    "w8a8": ("int", 8, None, True),
    "fp8": ("e4m3", 8, 128, True),
    "mxfp4": ("e2m1", 4, 32, False),
}


class RandomWeights:
    """Stands where a checkpoint's weights do: every tensor is drawn anew when it is taken."""

    def __init__(
        self, dtype: torch.dtype, device: torch.device, tied: bool, stored: str = ""
    ) -> None:
        """`stored`: a name of `CODES`, or nothing for floats."""
        self._stored = stored
        self.dtype = dtype
        self.by_row = False
        self.on_device = device.type != "cpu"
        self.device = device
        self._tied = tied

    @property
    def source(self) -> "RandomWeights":
        """Nothing is stored: what is asked of the files is answered here."""
        return self

    def __contains__(self, name: str) -> bool:
        return not name.endswith(".bias") and not (self._tied and name == "lm_head.weight")

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        tensor = torch.empty(shape, dtype=self.dtype, device=self.device)
        return tensor.fill_(1.0) if len(shape) == 1 else tensor.normal_(0, shape[1] ** -0.5)

    def codes(self, name: str, shape: tuple[int, int], embedding: bool = False) -> Codes | None:
        """Of matrices of layers, as checkpoints have them. The bits are random, but for e4m3's largest
        exponents, of which one stands for no number."""
        if not self._stored or embedding:
            return None
        kind, bits, group, rounded_rows = CODES[self._stored]
        out, width = shape
        columns = 1 if group is None else -(-width // group)
        most = {"e4m3": 120}.get(kind, 1 << bits)
        codes = torch.randint(0, most, shape, dtype=torch.uint8, device=self.device)
        size = {"e4m3": 0.06, "e2m1": 0.5}.get(kind, 2.0 / (1 << bits)) / width**0.5
        return Codes(
            codes=codes,
            scales=torch.full((out, columns), size, device=self.device),
            minima=None,
            bits=bits,
            group=-(-width // 32) * 32 if group is None else group,
            zero=1 << (bits - 1) if kind == "int" else 0,
            kind=kind,
            rounded_rows=rounded_rows,
        )

    def take_optional(self, name: str, shape: tuple[int, ...]) -> Tensor | None:
        return self.take(name, shape) if name in self else None


def random_model(
    raw: dict[str, Any], dtype: torch.dtype, device: torch.device, stored: str = ""
) -> LoadedModel:
    """`stored`: how matrices of layers are, a name of `CODES`, or nothing for floats."""
    spec = model_spec(raw)
    weights = cast(Weights, RandomWeights(dtype, device, spec.tied, stored))
    decoder = Decoder(spec, weights)
    return LoadedModel(
        name="random",
        digest="0" * 64,
        bytes=0,
        spec=spec,
        native_context=spec.context,
        dtype=dtype,
        device=device,
        decoder=decoder,
    )


def random_adapter(spec: ModelSpec, rank: int, seed: int, dtype: torch.dtype) -> AdapterWeights:
    """Of every matrix of every layer, but for those of experts."""
    generator = torch.Generator().manual_seed(seed)

    def pairs(shapes: dict[str, tuple[int, int]]) -> dict[tuple[int, str], tuple[Tensor, Tensor]]:
        found = {}
        for layer in range(spec.layers):
            for part, (inputs, outputs) in shapes.items():
                a, b = (
                    torch.randn(rows, columns, generator=generator, dtype=torch.float32).to(dtype)
                    for rows, columns in ((rank, inputs), (rank, outputs))
                )
                found[layer, part] = (a * inputs**-0.5, b * 0.01)
        return found

    latent = latent_shapes(spec)
    parts = [part for part in PARTS if not (latent and SITE_OF[part] in ("qkv", "o"))]
    matrices = pairs({part: part_shape(spec, part) for part in parts})
    extras = AdapterExtras(pairs=pairs(latent)) if latent else None
    return AdapterWeights(f"{seed:064x}", rank, matrices, extras)


def read_once(model: LoadedModel) -> int:
    """Bytes of weights that a decoding step of one token must read."""
    linears, absorbed = [], 0
    for each in model.decoder.linears:
        if isinstance(each, LatentQkv):
            linears += [*(q for q in each.queries if not isinstance(q, RmsNorm)), each.keys]
        elif isinstance(each, LatentOutput):
            linears.append(each.output)
        else:
            linears.append(each)
        if isinstance(each, LatentQkv | LatentOutput):
            absorbed += each.absorbed.nbytes
    dense = [each for each in linears if isinstance(each, DenseLinear)]
    coded = [part for each in linears if isinstance(each, DeviceLinear) for part in each.parts]
    mixtures = [
        block.mixture for block in model.decoder.blocks if isinstance(block.mixture, DeviceMixture)
    ]
    read = absorbed + sum(each.weight.nbytes for each in dense)
    read += sum(part.bytes for part in coded)
    return read + sum(each.bytes * each.active // each.count for each in mixtures)


def make_runner(
    model: LoadedModel, blocks: int | None, most_running: int, slots: int = 1, **settings: Any
) -> GpuRunner:
    fields: dict[str, Any] = {
        "model": "random",
        "num_blocks": blocks,
        "max_running": most_running,
        "max_adapter_slots": slots,
        "max_lora_rank": 16,
        "max_batch_tokens": 8192,
    }
    return GpuRunner(EngineConfig(**(fields | settings)), model)
