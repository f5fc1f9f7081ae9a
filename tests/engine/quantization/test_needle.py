"""A needle among two thousand keys in 8 bits: attention finds the value of the query's key."""

import pytest
import torch

from engine.backends.cpu.attention import attend
from engine.backends.layers.attention_plan import plan_tiles
from engine.backends.layers.kv import KvPool
from engine.backends.layers.operations import Attention
from engine.backends.layers.quantised_kv import QuantizedKvPool
from engine.batch import Row
from engine.model_spec import AttentionShape, ModelSpec, Sight
from engine.models.registry import model_spec
from engine.protocol import SamplingParams

LENGTH, BLOCK, DIM = 2000, 16, 64
DEPTHS = [0, 1, 15, 16, 200, 999, 1500, 1990, 1999]


def shape() -> ModelSpec:
    return model_spec(
        {
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 32,
            "hidden_size": 4 * DIM, "intermediate_size": 32, "num_hidden_layers": 1,
            "num_attention_heads": 4, "num_key_value_heads": 1, "max_position_embeddings": LENGTH,
        }
    )  # fmt: skip


def found_at(pool: KvPool, coarse: bool = False) -> list[int]:
    """For a query of each depth's key, the position whose value the output is nearest to. Keys come in
    families, whose members differ little; some values of a key are large, as
    models have them. coarse: keys in 4 bits, which shows that the test can fail."""
    random = torch.Generator().manual_seed(3)
    families = torch.randn(40, DIM, generator=random)
    keys = families[torch.arange(LENGTH) % 40]
    keys = keys + 0.2 * torch.randn(LENGTH, DIM, generator=random)
    keys[:, 5] *= 4
    keys = 8 * torch.nn.functional.normalize(keys)  # each is nearest to itself
    values = torch.randn(LENGTH, DIM, generator=random)
    stored = keys
    if coarse:
        scale = keys.abs().amax(1, keepdim=True) / 7
        stored = (keys / scale).round() * scale
    blocks = torch.randperm(LENGTH // BLOCK, generator=random)
    place = torch.arange(LENGTH)
    first = blocks[place // BLOCK] * 2
    slots = torch.stack([first, first + 1], 1) * BLOCK + (place % BLOCK)[:, None]
    pool.write(0, slots, torch.stack([stored, values], 1))
    found = []
    for depth in DEPTHS:
        query = keys[depth] * 5
        row = Row(0, [1], LENGTH - 1, blocks.tolist(), None, True, SamplingParams(max_tokens=1),
                  0, [1], 1)  # fmt: skip
        tiles = plan_tiles([row], [], Sight(), pool)
        attention = Attention(0, 0, AttentionShape(1.0), None, None, None)
        out = attend(query.expand(1, 4, DIM).contiguous(), pool, tiles, attention).view(4, DIM)
        nearest = (out @ values.t()).argmax(1)
        assert (nearest == nearest[0]).all(), "of each head"
        found.append(int(nearest[0]))
    return found


def pool_of(kind: str) -> KvPool:
    blocks = LENGTH // BLOCK
    if kind == "float":
        return KvPool(shape(), blocks, BLOCK, torch.float32, torch.device("cpu"))
    return QuantizedKvPool(shape(), blocks, BLOCK, torch.float32, kind)


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_the_needle_is_found_at_every_depth(kind: str) -> None:
    assert found_at(pool_of("float")) == DEPTHS
    assert found_at(pool_of(kind)) == DEPTHS


def test_the_needle_is_lost_where_keys_are_too_coarse() -> None:
    assert found_at(pool_of("float"), coarse=True) != DEPTHS
