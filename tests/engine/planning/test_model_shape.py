"""Sizes against numbers worked out by hand, or published with the model."""

import pytest

from engine.errors import CheckpointError
from engine.planning.known_models import known_names, known_shape, plain_name
from engine.planning.model_shape import shape_of
from engine.planning.precision import precision

LLAMA = {
    "model_type": "llama", "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 16, "vocab_size": 10,
}  # fmt: skip


def test_the_cache_of_llama_3_70b_at_4096_tokens_is_1_25_gib() -> None:
    # 2 (keys, values) · 80 layers · 8 heads · 128 values · 2 bytes · 4,096 positions
    shape = known_shape("Llama-3-70B")
    assert shape is not None
    assert shape.cached_values(4096) * 2 == 2 * 80 * 8 * 128 * 2 * 4096 == 1.25 * 2**30


def test_a_tiny_model_by_hand() -> None:
    shape = shape_of(LLAMA, "tiny")
    # A head has 2 values: Q 8×8, K and V 8×4 each, O 8×8; the MLP three of 8×16; tables 10×8 twice.
    assert shape.attention == 2 * (64 + 32 + 32 + 64)
    assert shape.dense == 2 * 3 * 8 * 16
    assert shape.parameters == 384 + 768 + 160
    assert shape.active == 384 + 768 + 80  # the table of embeddings is looked up
    assert shape.cached_per_token == 2 * 2 * 2 * 2


def test_multi_head_attention_keeps_every_head() -> None:
    assert shape_of(LLAMA | {"num_key_value_heads": 4}).cached_per_token == 2 * 2 * 4 * 2


@pytest.mark.parametrize(
    ("model", "billions"),
    [
        ("Llama-3.1-8B", 8.03), ("Llama-3.1-70B", 70.55), ("Qwen/Qwen3-32B", 32.76),
        ("deepseek-ai/DeepSeek-V3", 671.03), ("Mixtral-8x7B-Instruct-v0.1", 46.7),
        ("Qwen/Qwen3-30B-A3B", 30.53), ("openai/gpt-oss-120b", 116.8),
    ],
)  # fmt: skip
def test_published_numbers_of_parameters(model: str, billions: float) -> None:
    shape = known_shape(model)
    assert shape is not None
    assert shape.parameters / 1e9 == pytest.approx(billions, rel=0.002)


def test_latent_attention_keeps_one_vector_for_all_heads() -> None:
    shape = known_shape("DeepSeek-R1")
    assert shape is not None
    assert shape.cached_per_token == 61 * (512 + 64)
    assert shape.kv_heads == 1


def test_a_window_bounds_what_its_layers_keep() -> None:
    raw = LLAMA | {"sliding_window": 100, "layer_types": ["sliding_attention", "full_attention"]}
    shape = shape_of(raw)
    assert shape.cached_values(50) == 2 * 8 * 50
    assert shape.cached_values(1000) == 8 * 100 + 8 * 1000


def test_layers_with_a_state_take_the_same_whatever_the_length() -> None:
    shape = known_shape("qwen3-next-80b-a3b")
    assert shape is not None
    grown = shape.cached_values(2000) - shape.cached_values(1000)
    assert grown == 1000 * 12 * 2 * 2 * 256  # 12 of 48 layers are full, with 2 heads of 256


def test_experts_touched_by_hand() -> None:
    shape = shape_of(
        LLAMA | {"num_local_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 4}
    )
    assert shape.expert_weights == 2 * 8 * 3 * 8 * 4
    assert shape.experts_touched(1) == pytest.approx(2.0)
    assert shape.experts_touched(2) == pytest.approx(8 * (1 - 0.75**2))  # 3.5
    assert shape.active == 384 + 2 * (8 * 8) + 384 + 80  # router and two experts a layer


def test_bytes_of_weights_by_hand() -> None:
    shape = shape_of(LLAMA)
    assert precision("bf16").weight_bytes(shape) == 2 * 1312
    # 4 bits and a scale for 16 values; tables stay at 16 bits
    assert precision("fp4").weight_bytes(shape) == (384 + 768) * (0.5 + 1 / 16) + 2 * 160


@pytest.mark.parametrize(
    ("written", "plain"),
    [
        ("meta-llama/Llama-3.1-70B-Instruct-FP8", "llama-3.1-70b"),
        ("nvidia/Qwen3-32B-NVFP4", "qwen3-32b"),
        ("Qwen/Qwen3-235B-A22B-FP8", "qwen3-235b-a22b"),
        ("meta-llama/Meta-Llama-3-8B", "llama-3-8b"),
    ],
)
def test_names_without_what_is_added(written: str, plain: str) -> None:
    assert plain_name(written) == plain
    assert known_shape(written) is not None


def test_every_known_model_has_a_shape() -> None:
    assert len(known_names()) > 50
    assert all(known_shape(name) is not None for name in known_names())


@pytest.mark.parametrize("field", ["hidden_size", "num_hidden_layers", "num_attention_heads"])
@pytest.mark.parametrize("value", [None, 0, -1, "many", True])
def test_a_missing_or_wrong_size_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(CheckpointError, match=field):
        shape_of(LLAMA | {field: value})
