"""Weights of GGUF files: every block type against a scalar reading, every family against
`transformers`, and the memory that loading takes."""

import importlib.util
import tracemalloc
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from engine.backends.compiled.linear import RowGatedLinear, RowLinear
from engine.config import EngineConfig
from engine.models.checkpoint import open_checkpoint
from engine.models.decoder import Decoder
from engine.models.gguf.dequantise import dequantise
from engine.models.gguf.header import read_header
from engine.models.gguf.weights import GgufSource
from engine.models.load import load_model
from tests.engine.checkpoints import (
    VOCAB,
    reference,
    reference_greedy,
    reference_logits,
    save_checkpoint,
)
from tests.engine.driver import LogitDriver
from tests.engine.gguf_files import (
    TYPES,
    Tensor,
    converted,
    f32,
    neighboured,
    random_blocks,
    scalar_values,
    size_of,
    vocabulary,
    write_gguf,
)
from tests.engine.models.test_family_parity import CASES

BLOCK_TYPES = [kind for kind, (_, values, _) in TYPES.items() if values > 1]


@pytest.mark.parametrize("kind", BLOCK_TYPES)
def test_blocks_read_as_the_format_says(kind: str) -> None:
    raw = random_blocks(kind, 40, seed=len(kind))
    found = dequantise(TYPES[kind][0], np.frombuffer(raw, np.uint8))
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, scalar_values(kind, raw), rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
def test_plain_values_read_exactly(kind: str) -> None:
    plain = np.random.default_rng(1).standard_normal(100).astype(np.float32)
    stored = {
        "F32": plain,
        "F16": plain.astype(np.float16),
        "BF16": torch.from_numpy(plain).bfloat16().view(torch.int16).numpy(),
    }[kind]
    raw = stored.tobytes()
    found = dequantise(TYPES[kind][0], np.frombuffer(raw, np.uint8))
    assert found.tolist() == scalar_values(kind, raw)


@pytest.mark.skipif(
    importlib.util.find_spec("gguf") is None, reason="`gguf` is absent: pip install '.[dev]'"
)
@pytest.mark.parametrize("kind", BLOCK_TYPES)
def test_blocks_read_as_the_gguf_package_reads_them(kind: str) -> None:
    import gguf

    raw = np.frombuffer(random_blocks(kind, 300, seed=9), np.uint8)
    number = TYPES[kind][0]
    expected = gguf.quants.dequantize(raw.reshape(300, -1), gguf.GGMLQuantizationType(number))
    np.testing.assert_array_equal(dequantise(number, raw), expected.reshape(-1))


_READ = {"Llama", "Mistral", "Qwen2", "Qwen3", "Gemma2"}  # the others are refused by name
_FAMILIES = {
    **{
        name: case
        for name, case in CASES.items()
        if case[0] in _READ and "dynamic" not in name and "windows" not in name
    },
    "gemma2": ("Gemma2", {"sliding_window": 24, "head_dim": 32, "query_pre_attn_scalar": 32}),
}


@pytest.mark.parametrize("case", _FAMILIES)
def test_logits_of_a_converted_checkpoint_are_those_of_transformers(
    case: str, tmp_path: Path
) -> None:
    family, changes = _FAMILIES[case]
    checkpoint = save_checkpoint(tmp_path / "hf", family, **changes)
    file = converted(checkpoint, tmp_path / "model.gguf")
    ids = torch.randint(3, VOCAB, (75,), generator=torch.Generator().manual_seed(4)).tolist()
    expected = reference_logits(reference(checkpoint), ids)
    driver = LogitDriver(file, dtype="float32")
    found = driver.logits(driver.sequence(ids), 75)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


def _matrices(config: LlamaConfig) -> dict[str, tuple[int, int]]:
    q = config.num_attention_heads * config.head_dim
    kv = config.num_key_value_heads * config.head_dim
    hidden, inner = config.hidden_size, config.intermediate_size
    return {
        "attn_q": (q, hidden), "attn_k": (kv, hidden), "attn_v": (kv, hidden),
        "attn_output": (hidden, q), "ffn_gate": (inner, hidden), "ffn_up": (inner, hidden),
        "ffn_down": (hidden, inner),
    }  # fmt: skip


_THEIRS = {
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}  # fmt: skip
# The size of a block's factors that gives weights of a usual size.
_SIZES = {"Q2_K": 5e-4, "Q3_K": 2e-4, "Q4_K": 2e-5, "Q5_K": 1e-5, "Q6_K": 1e-5, "Q8_0": 5e-4}


def _quantised_llama(path: Path) -> LlamaForCausalLM:
    """Writes a model with every block type in it; returns it as the scalar reading has it."""
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=256, intermediate_size=256, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=64, max_position_embeddings=128,
        tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(3)
    model = LlamaForCausalLM(config).float().eval()
    state = model.state_dict()
    tensors: list[Tensor] = []
    kinds = [*BLOCK_TYPES, *BLOCK_TYPES[-4:]]
    for layer in range(2):
        for norm, name in (
            ("input_layernorm", "attn_norm"),
            ("post_attention_layernorm", "ffn_norm"),
        ):
            tensors.append(
                f32(f"blk.{layer}.{name}.weight", state[f"model.layers.{layer}.{norm}.weight"])
            )
        for part, shape in _matrices(config).items():
            kind = kinds.pop(0)
            raw = random_blocks(kind, size_of(kind, shape), len(kinds), _SIZES.get(kind, 5e-3))
            tensors.append((f"blk.{layer}.{part}.weight", shape, kind, raw))
            read = torch.tensor(scalar_values(kind, raw)).view(shape)
            heads = {"attn_q": 4, "attn_k": 2}.get(part)
            if heads:  # the file's rows are the neighboured ones: sort them back by inversion
                order = neighboured(torch.arange(shape[0]), heads)
                read = read[torch.argsort(order)]
            state[f"model.layers.{layer}.{_THEIRS[part]}.weight"].copy_(read)
    assert not set(BLOCK_TYPES) - {kind for _, _, kind, _ in tensors}
    for name, theirs in (("token_embd", "model.embed_tokens"), ("output_norm", "model.norm")):
        tensors.append(f32(f"{name}.weight", state[f"{theirs}.weight"]))
    tensors.append(f32("output.weight", state["lm_head.weight"]))
    write_gguf(path, _metadata(config), tensors, version=2)
    return model


def _metadata(config: LlamaConfig) -> dict[str, Any]:
    return {
        "general.architecture": "llama",
        "llama.block_count": 2,
        "llama.context_length": 128,
        "llama.embedding_length": 256,
        "llama.feed_forward_length": 256,
        "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 2,
        "llama.attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "llama.rope.dimension_count": 64,
    } | vocabulary(VOCAB)


def test_a_model_of_all_block_types_answers_as_its_scalar_reading(tmp_path: Path) -> None:
    file = tmp_path / "mixed.gguf"
    model = _quantised_llama(file)
    ids = torch.randint(3, VOCAB, (40,), generator=torch.Generator().manual_seed(8)).tolist()
    driver = LogitDriver(file, dtype="float32", quantization="none")
    found = driver.logits(driver.sequence(ids), 40)
    expected = reference_logits(model, ids)
    assert expected.std() > 0.1
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=1e-4)
    asked = driver.sequence(ids)
    driver.run([asked])
    assert asked.output == reference_greedy(model, ids, 16)


def _half_exact(checkpoint: Path) -> None:
    """Values that fit float16, which a CPU without bfloat16 then keeps them in."""
    path = checkpoint / "model.safetensors"
    tensors = {name: tensor.half().float() for name, tensor in load_file(path).items()}
    save_file(tensors, path, metadata={"format": "pt"})


@pytest.mark.skipif(
    importlib.util.find_spec("gguf") is None, reason="`gguf` is absent: pip install '.[dev]'"
)
def test_weights_are_those_that_transformers_reads(tmp_path: Path) -> None:
    file = tmp_path / "mixed.gguf"
    _quantised_llama(file)
    theirs = LlamaForCausalLM.from_pretrained(tmp_path, gguf_file=file.name, dtype=torch.float32)
    with closing(GgufSource(read_header(file))) as source:
        assert len(source) == 2 * 9 + 3
        for name in source.names():
            found = source.read(name, torch.float32)
            torch.testing.assert_close(found, theirs.state_dict()[name], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("form", ["safetensors", "gguf"])
def test_loading_keeps_only_what_is_served(tmp_path: Path, dtype: str, form: str) -> None:
    """By the bytes of the storages that the decoder's tensors hold."""
    shape = {"hidden_size": 768, "intermediate_size": 1024, "num_hidden_layers": 1}
    model = save_checkpoint(tmp_path / "hf", **shape)
    _half_exact(model)
    if form == "gguf":
        model = converted(model, tmp_path / "model.gguf")
    config = EngineConfig(model=str(model), num_blocks=4, dtype=dtype)
    tensors = _tensors(load_model(config).decoder)
    held = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}
    seen = {each.data_ptr(): each.numel() * each.itemsize for each in tensors}
    assert sum(held.values()) == sum(seen.values())


def _tensors(decoder: Decoder) -> list[torch.Tensor]:
    """The embedding and what layers hold beside the matrices that are packed for the processor."""
    found = [decoder.embedding.weight]
    linears = [site.linear for block in decoder.blocks for site in block.sites]
    for linear in (decoder.head, *linears):
        found += _of_product(linear)
    return [tensor for tensor in found if tensor.layout == torch.strided]


def _of_product(linear: Any) -> list[torch.Tensor]:
    if isinstance(linear, RowGatedLinear):
        return [linear.gate.matrix.tiles, linear.up.matrix.tiles]
    if isinstance(linear, RowLinear):
        return [linear.matrix.tiles]
    return [linear.weight, *(half.weight for half in getattr(linear, "_halves", None) or ())]


def test_a_large_tensor_is_read_in_small_parts(tmp_path: Path) -> None:
    rows, width = 4096, 2048
    raw = random_blocks("Q8_0", rows * width // 32, seed=1)
    metadata = {"general.architecture": "llama", "llama.attention.head_count": 4}
    name = ("output.weight", (rows, width), "Q8_0", raw)
    source = GgufSource(read_header(write_gguf(tmp_path / "large.gguf", metadata, [name])))
    tracemalloc.start()  # sees NumPy's memory, not torch's
    with closing(source):
        found = source.read("lm_head.weight", torch.bfloat16)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    expected = torch.tensor(scalar_values("Q8_0", raw[-34 * 64 :])).bfloat16()
    assert torch.equal(found[-1], expected)
    assert peak < rows * width * 4 / 1.5


def test_a_files_digest_tells_its_content_and_not_its_name(tmp_path: Path) -> None:
    file = converted(save_checkpoint(tmp_path / "hf"), tmp_path / "one.gguf")
    same = tmp_path / "two.gguf"
    same.write_bytes(file.read_bytes())
    other = tmp_path / "three.gguf"
    other.write_bytes(file.read_bytes()[:-4] + b"\0\0\0\x3f")
    digests = []
    for each in (file, same, other):
        checkpoint = open_checkpoint(each)
        checkpoint.source.close()
        digests.append(checkpoint.digest)
    assert digests[0] == digests[1] != digests[2]
