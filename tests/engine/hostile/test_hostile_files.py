"""Hostile and odd model files load, or are refused by one clear error that names file and field; here a
few of each class, and those that once did neither. `python -m tests.engine.hostile` tries thousands."""

import json
import os
import signal
from pathlib import Path

import pytest
import torch

from engine.errors import AdapterError, CheckpointError
from engine.models.formats.safetensors_source import SafetensorsSource
from engine.models.gguf.describe import describe
from engine.models.registry import model_spec
from engine.models.tokenizer_file import read_tokenizer
from gateway.catalog.adapter_archive import read_adapter
from tests.engine.gguf_files import f32, vocabulary, write_gguf
from tests.engine.hostile.runs import CLASSES, Run, made_bases
from tests.engine.hostile.serving import serve_adapter
from tests.engine.hostile.trial import LOADED, REFUSED, tried

pytestmark = [pytest.mark.proof, pytest.mark.timeout(600)]
PROTECTS = ("engine", "gateway/prompts/rendering.py")
_CASES = 40


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("hostile")
    return Run(made_bases(folder / "bases"), folder, seed=11)


@pytest.mark.parametrize("name", sorted(CLASSES))
def test_files_of_a_class(run: Run, name: str) -> None:
    counts, failures = run.of_class(name, range(_CASES))
    assert not failures
    assert counts[LOADED] and counts[REFUSED]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"quantization_config": {"quant_method": {"": {}}}}, "quantization_config.quant_method"),
        ({"quantization_config": {"quant_method": "mxfp4"}}, "quantization_config"),
        ({"rope_parameters": {"sliding_attention": [None]}}, "rope_parameters.sliding_attention"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 10**400}}, "rope_parameters.factor"),
        ({"num_experts_per_tok": float("nan")}, "num_experts_per_tok"),
        ({"no_rope_layers": [0.5]}, "no_rope_layers"),
    ],
)
def test_a_field_is_named(run: Run, changes: dict[str, object], told: str) -> None:
    config = json.loads((run.bases / "LlamaForCausalLM" / "config.json").read_text())
    with pytest.raises(CheckpointError, match=told):
        model_spec(config | changes)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        # The library takes memory for every id, and for a map what its first word says.
        ({"model": {"type": "WordLevel", "unk_token": "a", "vocab": {"a": 2**31}}}, "has the id"),
        ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": "/////wAAAAA="}}, "trie"),
        (
            {"added_tokens": [
                {"id": 3, "content": "x" * 1_000_000, "single_word": False, "lstrip": False,
                 "rstrip": False, "normalized": False, "special": True}
            ]},
            "1000000 characters",
        ),
    ],
)  # fmt: skip
def test_a_tokenizer_that_would_end_the_process(
    run: Run, tmp_path: Path, changes: dict[str, object], told: str
) -> None:
    whole = json.loads((run.bases / "LlamaForCausalLM" / "tokenizer.json").read_text())
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps(whole | changes))
    with pytest.raises(CheckpointError, match=told):
        read_tokenizer(file)
    hidden = json.dumps(whole | changes).replace("precompiled", "\\u0070recompiled")
    file.write_text(hidden)
    with pytest.raises(CheckpointError, match=told):
        read_tokenizer(file)


@pytest.mark.parametrize(
    "content", ["[1]", "{}", '{"weight_map": 3}', '{"weight_map": {"x": ".."}}']
)
def test_an_index_that_is_none(tmp_path: Path, content: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"index\.json: weight_map"):
        SafetensorsSource(tmp_path)


def test_metadata_are_named_as_the_file_has_them(run: Run, tmp_path: Path) -> None:
    raw = (run.bases / "gguf" / "Qwen3.gguf").read_bytes()
    key = b"qwen3.attention.layer_norm_rms_epsilon"
    at = raw.index(key) + len(key) + 4
    file = tmp_path / "model.gguf"
    file.write_bytes(raw[:at] + b"\x00\x00\xe0\x40" + raw[at + 4 :])  # 7.0
    with pytest.raises(CheckpointError, match=rf"model\.gguf: {key.decode()} is 7\.0"):
        describe(file)


@pytest.mark.parametrize("key", ["tokenizer.ggml.pre", "llama.rope.scaling.type"])
def test_a_list_in_place_of_a_text(tmp_path: Path, key: str) -> None:
    plain = {"general.architecture": "llama", "llama.block_count": 1, "llama.context_length": 64}
    plain |= {"llama.embedding_length": 8, "llama.feed_forward_length": 8}
    plain |= {"llama.attention.head_count": 2, "llama.attention.layer_norm_rms_epsilon": 1e-5}
    many = {key: list(range(2000))}
    table = f32("token_embd.weight", torch.ones(320, 8))
    file = write_gguf(tmp_path / "model.gguf", plain | vocabulary(320) | many, [table])
    with pytest.raises(CheckpointError, match=key) as caught:
        describe(file)
    assert "\n" not in caught.value.message and len(caught.value.message) < 1000


def test_fields_of_an_adapter(run: Run, tmp_path: Path) -> None:
    base = run.bases / "adapters" / "Llama"
    config = json.loads((base / "adapter_config.json").read_text())
    for field, value in (("modules_to_save", -0.5), ("use_dora", "x"), ("lora_alpha", 10**400)):
        for file in base.iterdir():
            (tmp_path / file.name).write_bytes(file.read_bytes())
        (tmp_path / "adapter_config.json").write_text(json.dumps(config | {field: value}))
        assert read_adapter(tmp_path).rank == 4
        with pytest.raises(AdapterError, match=field):
            serve_adapter(*run.engine("Llama"), tmp_path, by_gateway=False)


def test_the_trial_tells_how_work_ends() -> None:
    """That it sees what it is for."""

    def _refuses(message: str) -> str:
        raise CheckpointError(message)

    def _forever() -> str:
        while True:
            pass

    def _large() -> str:
        return str(len(bytearray(2 << 30)))

    def _named(message: str) -> bool:
        return "config.json" in message

    assert tried(lambda: "done", _named).kind == LOADED
    assert tried(lambda: _refuses("config.json: x"), _named).kind == REFUSED
    assert tried(lambda: _refuses("it is wrong"), _named).kind == "unclear"
    assert tried(lambda: _refuses("config.json: TypeError('x')"), _named).kind == "unclear"
    assert tried(lambda: str(1 // 0), _named).kind == "traceback"
    assert "MemoryError" in tried(_large, _named).message
    assert tried(lambda: str(os.kill(os.getpid(), signal.SIGKILL)), _named).kind == "crash"
    assert tried(_forever, _named, cpu_s=1).kind == "hang"
