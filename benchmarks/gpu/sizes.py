"""How large what is measured is: so large that it fills a GPU, or so small that every section runs in
Triton's interpreter."""

from dataclasses import dataclass, field
from typing import Any

from benchmarks.gpu.models import DEEPSEEK_V3, LLAMA_8B, QWEN3_06B, QWEN3_30B_A3B

Shape = dict[str, Any]
Decodes = tuple[tuple[int, int], ...]  # sequences, and keys of each


@dataclass(frozen=True, slots=True)
class Heads:
    """Of attention."""

    queries: int = 32
    keys: int = 8
    dim: int = 128


@dataclass(frozen=True, slots=True)
class LatentHeads:
    """All heads read one vector of a position, as key and as value."""

    queries: int = 128
    latent: int = 512
    rotated: int = 64


@dataclass(frozen=True, slots=True)
class Place:
    """What a runner has room for."""

    blocks: int = 6000
    sequences: int = 64
    tokens: int = 8192  # of a step


@dataclass(frozen=True, slots=True)
class Work:
    """Of a whole engine."""

    requests: int = 256
    lengths: tuple[int, int] = (100, 1024)  # of prompts and of answers
    beside_peer: int = 64  # requests
    output: int = 256  # of each beside the peer


@dataclass(frozen=True, slots=True)
class Steps:
    """Of decoding sequences."""

    count: int = 200
    context: int = 256
    prompt: int = 100  # tokens of the one beside them
    sequences: tuple[int, ...] = (32, 64)  # with adapters
    adapters: int = 8
    rank: int = 16


@dataclass(frozen=True, slots=True)
class Sizes:
    copied: int = 1 << 30  # numbers of 16 bits
    matmul: int = 8192
    heads: Heads = Heads()
    latent_heads: LatentHeads = LatentHeads()
    prefills: tuple[int, ...] = (2048, 8192)
    decodes: Decodes = ((64, 2048), (8, 8192), (1, 8192))
    latent_decodes: Decodes = ((64, 4096), (8, 8192), (1, 8192))
    small: Shape = field(default_factory=lambda: QWEN3_06B)
    large: Shape = field(default_factory=lambda: LLAMA_8B)
    experts: Shape = field(default_factory=lambda: QWEN3_30B_A3B)
    latent: Shape = field(default_factory=lambda: DEEPSEEK_V3)
    of_small: Place = Place(34_000, 256)  # all requests of the work at their full length
    of_others: Place = Place()
    steps: Steps = Steps()
    work: Work = Work()


_TINY = {
    "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 32, "vocab_size": 90, "max_position_embeddings": 128,
}  # fmt: skip
_PLACE = Place(80, 2, 24)
TOY = Sizes(
    copied=1 << 10,
    matmul=16,
    heads=Heads(2, 1, 16),
    latent_heads=LatentHeads(16, 32, 16),
    prefills=(16,),
    decodes=((2, 32),),
    latent_decodes=((2, 32),),
    small=QWEN3_06B | _TINY,
    large=LLAMA_8B | _TINY,
    experts=QWEN3_30B_A3B | _TINY | {
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    },
    latent=DEEPSEEK_V3 | _TINY | {
        "num_key_value_heads": 2, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 16, "v_head_dim": 16,
    },
    of_small=_PLACE,
    of_others=_PLACE,
    steps=Steps(2, 20, 5, (2,), 2, 4),
    work=Work(3, (2, 5), 2, 3),
)  # fmt: skip
