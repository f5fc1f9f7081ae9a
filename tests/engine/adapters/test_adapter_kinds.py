"""Adapters beyond sums of low rank at linear layers, compared with PEFT: DoRA, the token table, the
head, and whole matrices in their place; each kind beside the others in one batch."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.backends.layers.adapter_extras import Rescale, rescaled_sum
from engine.backends.layers.linear import DenseLinear
from engine.errors import AdapterError
from tests.engine.checkpoints import (
    ALL_LINEAR,
    adapted_reference,
    reference,
    reference_greedy,
    reference_logits,
    save_adapter,
    save_checkpoint,
)
from tests.engine.driver import Driver, LogitDriver, greedy

PROTECTS = ("engine/adapters", "engine/backends/layers")

PROMPT = [5, 9, 12, 40, 33, 71, 8]
OUTER = ["embed_tokens", "lm_head"]
KINDS: dict[str, dict[str, Any]] = {
    "dora": {"use_dora": True},
    "dora of some": {"use_dora": True, "targets": ["o_proj", "k_proj"], "rank_pattern": {"k_proj": 2}},
    "dora everywhere": {"use_dora": True, "use_rslora": True, "targets": [*ALL_LINEAR, *OUTER]},
    "table": {"targets": ["q_proj", "embed_tokens"], "rank_pattern": {"embed_tokens": 3}},
    "head": {"targets": ["down_proj", "lm_head"], "alpha_pattern": {"lm_head": 5}},
    "whole table": {"targets": ["v_proj"], "modules_to_save": ["embed_tokens"]},
    "whole head": {"targets": ["v_proj"], "modules_to_save": ["lm_head"]},
    "both whole": {"targets": ["v_proj"], "modules_to_save": OUTER},
    "biases": {"bias": "all", "targets": ["q_proj", "o_proj"]},
    "biases of dora": {"bias": "all", "use_dora": True},
    "biases of targets": {"bias": "lora_only"},
    "plain": {},
}  # fmt: skip


@pytest.fixture(
    scope="module",
    params=[
        "tied",
        "qwen2 biases",
        pytest.param("untied", marks=pytest.mark.proof),
        pytest.param("gemma scales", marks=pytest.mark.proof),
    ],
)
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    if request.param == "qwen2 biases":
        return save_checkpoint(folder, "Qwen2")
    if request.param == "gemma scales":
        return save_checkpoint(folder, "Gemma2", head_dim=16, query_pre_attn_scalar=16)
    return save_checkpoint(folder, tie_word_embeddings=request.param == "tied")


@pytest.fixture(scope="module")
def adapters(base: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("kinds")
    return [
        stirred(save_adapter(base, folder / str(n), rank=4, seed=n, **dict(changes)), n)
        for n, changes in enumerate(KINDS.values())
    ]


def stirred(adapter: Path, seed: int) -> Path:
    """Magnitudes and whole matrices that training has changed; PEFT begins with the base's own."""
    path, generator = adapter / "adapter_model.safetensors", torch.Generator().manual_seed(seed)
    tensors = load_file(path)
    for key, tensor in tensors.items():
        trained = key.endswith(("magnitude_vector", "lm_head.weight", "embed_tokens.weight"))
        if trained and "base_layer" not in key:
            tensor *= 1 + 0.3 * torch.randn(tensor.shape, generator=generator)
        if key.endswith(".bias"):
            tensor += torch.randn(tensor.shape, generator=generator)
    save_file(tensors, path, metadata={"format": "pt"})
    return adapter


class Counted(DenseLinear):
    """Counts its products."""

    products = 0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.products += 1
        return super().__call__(x)

    def plus(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return self(x) + other


@pytest.mark.parametrize(
    ("rows", "products"),
    [
        ([(0, 2), (2, 3), (3, 7)], 1),
        ([(1, 2), (4, 6)], 2),
        ([(0, 6)], 2),
        ([(0, 7)], 1),
    ],
)
def test_all_rows_of_dora_are_one_product(rows: list[tuple[int, int]], products: int) -> None:
    """Of the matrices whose outputs are added to the residual stream; the sums by their definition."""
    random = torch.Generator().manual_seed(3)
    weight, y, x = (torch.randn(*shape, generator=random) for shape in ((5, 4), (7, 4), (7, 5)))
    changed = [(slice(*each), Rescale(torch.rand(5, generator=random))) for each in rows]
    factors = torch.ones(7, 5)
    for each, rescale in changed:
        factors[each] = rescale.factor
    linear, before = Counted(weight), x.clone()
    found = rescaled_sum(linear, y, x, changed)
    torch.testing.assert_close(found, x + (y @ weight.t()) * factors)
    assert linear.products == products and torch.equal(x, before)


def test_every_kind_alone_and_beside_all_others(base: Path, adapters: list[Path]) -> None:
    """Logits of the prompt and greedy tokens; the tokens alone and in one batch are the same."""
    expected = [reference_greedy(reference(base), PROMPT, 6)]
    alone, slots = [], len(adapters)
    for adapter in adapters:
        model = adapted_reference(base, adapter)
        expected.append(reference_greedy(model, PROMPT, 6))
        driver = LogitDriver(base, dtype="float32")
        handle = driver.adapter(adapter, 0)
        logits = driver.logits(driver.sequence(PROMPT, adapter=handle), len(PROMPT))
        torch.testing.assert_close(logits, reference_logits(model, PROMPT), atol=2e-4, rtol=2e-4)
        sequence = driver.sequence(PROMPT, adapter=handle)
        driver.run([sequence], count=6)
        alone.append(sequence.output)
    assert alone == expected[1:]
    driver = Driver(base, blocks=400, dtype="float32", max_adapter_slots=slots)
    handles = [None, *(driver.adapter(adapter, slot) for slot, adapter in enumerate(adapters))]
    sequences = [driver.sequence(PROMPT, adapter=handle) for handle in [*handles, *handles]]
    driver.run(sequences, chunk=3, count=6)
    assert [each.output for each in sequences] == expected + expected
    assert len({tuple(each) for each in expected}) > 1


def test_nothing_of_an_adapter_stays_in_its_slot(base: Path, adapters: list[Path]) -> None:
    driver = Driver(base, dtype="float32")
    driver.runner.unload_adapter(driver.adapter(adapters[2], 0))
    driver.runner.unload_adapter(driver.adapter(adapters[7], 0))
    sequence = driver.sequence(PROMPT, adapter=driver.adapter(adapters[-1], 0))
    driver.run([sequence], count=6)
    assert sequence.output == reference_greedy(adapted_reference(base, adapters[-1]), PROMPT, 6)


def test_rounded_weights_serve_every_kind(base: Path, adapters: list[Path]) -> None:
    """The base in int8: near PEFT on the floats, and the same alone and in a batch."""
    settings: dict[str, Any] = {"dtype": "float32", "quantization": "int8"}
    alone = []
    for adapter in adapters[:5]:
        driver = LogitDriver(base, **settings)
        handle = driver.adapter(adapter, 0)
        logits = driver.logits(driver.sequence(PROMPT, adapter=handle), len(PROMPT))
        expected = reference_logits(adapted_reference(base, adapter), PROMPT)
        assert (logits - expected).abs().mean() < 0.08 * expected.std()
        alone.append(logits)
    together = LogitDriver(base, blocks=300, max_adapter_slots=5, **settings)
    for slot, adapter in enumerate(adapters[:5]):
        handle = together.adapter(adapter, slot)
        found = together.logits(together.sequence(PROMPT, adapter=handle), len(PROMPT))
        torch.testing.assert_close(found, alone[slot], atol=1e-5, rtol=1e-5)


def test_pooled_rows_beside_a_changed_head(base: Path, adapters: list[Path]) -> None:
    """An embedding request in the same step moves the rows of the logits."""
    driver = Driver(base, blocks=300, dtype="float32")
    head = driver.adapter(adapters[6], 0)
    embedded = driver.sequence(PROMPT, greedy(pooling="last"))
    sequences = [driver.sequence(PROMPT), embedded, driver.sequence(PROMPT, adapter=head)]
    driver.step(*((each, 0) for each in sequences[:2]), (sequences[2], 0))
    assert sequences[0].output == reference_greedy(reference(base), PROMPT, 1)
    assert sequences[2].output == reference_greedy(adapted_reference(base, adapters[6]), PROMPT, 1)


def test_host_memory_counts_whole_matrices(base: Path, adapters: list[Path]) -> None:
    driver = Driver(base, dtype="float32")
    sizes = [
        driver.runner.adapter_host_bytes(driver.runner.register_adapter(str(adapter)).digest)
        for adapter in (adapters[5], adapters[7])
    ]
    assert sizes[1] - sizes[0] == 211 * 64 * 4


@pytest.mark.parametrize("base", ["untied"], indirect=True)
@pytest.mark.parametrize(
    ("kind", "change", "told"),
    [
        ("dora layers.0.mlp.up_proj.lora_magnitude_vector", lambda t: t[:-1], "111"),
        ("dora layers.0.mlp.up_proj.lora_magnitude_vector", lambda t: t * float("nan"), "NaN"),
        ("dora layers.0.mlp.up_proj.lora_magnitude_vector", None, "no lora_magnitude_vector"),
        ("whole head lm_head.weight", lambda t: torch.cat((t, t)), "tokens of their own"),
        ("whole head lm_head.weight", lambda t: t * float("inf"), "NaN or infinite"),
        ("table embed_tokens.lora_embedding_B", None, "without the other half"),
        ("table embed_tokens.lora_embedding_A", lambda t: t[:, 1:], "another base"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_name(
    base: Path, adapters: list[Path], tmp_path: Path, kind: str, change: Any, told: str
) -> None:
    kind, _, key = kind.rpartition(" ")
    source = adapters[list(KINDS).index(kind)]
    tensors = load_file(source / "adapter_model.safetensors")
    name = next(each for each in tensors if each.endswith(key))
    tensor = tensors.pop(name)
    if change is not None:
        tensors[name] = change(tensor).contiguous()
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_bytes((source / "adapter_config.json").read_bytes())
    with pytest.raises(AdapterError, match=told) as caught:
        Driver(base).runner.register_adapter(str(tmp_path))
    assert key.split(".")[-2] in caught.value.message


@pytest.mark.parametrize("base", ["untied"], indirect=True)
def test_an_unused_magnitude_is_refused(base: Path, adapters: list[Path], tmp_path: Path) -> None:
    source = adapters[0]
    config = json.loads((source / "adapter_config.json").read_text()) | {"use_dora": False}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    weights = (source / "adapter_model.safetensors").read_bytes()
    (tmp_path / "adapter_model.safetensors").write_bytes(weights)
    with pytest.raises(AdapterError, match="has a lora_magnitude_vector, against use_dora"):
        Driver(base).runner.register_adapter(str(tmp_path))
