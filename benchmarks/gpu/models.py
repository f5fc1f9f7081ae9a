"""Models of well-known shapes with random weights, made on the device in a moment."""

from typing import Any, cast

import torch
from torch import Tensor

from engine.config import EngineConfig
from engine.execution.gpu_runner import GpuRunner
from engine.layers.linear import DenseLinear
from engine.layers.matrices import PARTS, part_shape
from engine.lora.adapter_files import AdapterWeights
from engine.model_spec import ModelSpec
from engine.models.decoder import Decoder
from engine.models.load import LoadedModel
from engine.models.registry import model_spec
from engine.models.weights import Weights

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


class RandomWeights:
    """Stands where a checkpoint's weights do: every tensor is drawn anew when it is taken."""

    def __init__(self, dtype: torch.dtype, device: torch.device, tied: bool) -> None:
        self.dtype = dtype
        self.by_row = False
        self.device = device
        self._tied = tied

    def __contains__(self, name: str) -> bool:
        return not name.endswith(".bias") and not (self._tied and name == "lm_head.weight")

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        tensor = torch.empty(shape, dtype=self.dtype, device=self.device)
        return tensor.fill_(1.0) if len(shape) == 1 else tensor.normal_(0, shape[1] ** -0.5)

    def codes(self, name: str, shape: tuple[int, int], embedding: bool = False) -> None:
        """The kernels read floats."""

    def take_optional(self, name: str, shape: tuple[int, ...]) -> Tensor | None:
        return self.take(name, shape) if name in self else None


def random_model(raw: dict[str, Any], dtype: torch.dtype, device: torch.device) -> LoadedModel:
    spec = model_spec(raw)
    weights = cast(Weights, RandomWeights(dtype, device, spec.tied))
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
    generator = torch.Generator().manual_seed(seed)
    matrices = {}
    for layer in range(spec.layers):
        for part in PARTS:
            inputs, outputs = part_shape(spec, part)
            a, b = (
                torch.randn(rows, columns, generator=generator, dtype=torch.float32).to(dtype)
                for rows, columns in ((rank, inputs), (rank, outputs))
            )
            matrices[layer, part] = (a * inputs**-0.5, b * 0.01)
    return AdapterWeights(f"{seed:064x}", rank, matrices)


def read_once(model: LoadedModel) -> int:
    """Bytes of weights that a decoding step must read."""
    decoder = model.decoder
    linears = [
        site.linear
        for block in decoder.blocks
        for site in (block.qkv, block.o, block.gate_up, block.down)
    ]
    dense = [each for each in (*linears, decoder.head) if isinstance(each, DenseLinear)]
    return sum(linear.weight.nbytes for linear in dense)


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
