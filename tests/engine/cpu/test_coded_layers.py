"""Codes in the one call of all layers: the bits of the operations one by one, and PEFT's answers."""

import warnings
from pathlib import Path

import peft
import pytest
import torch

from engine.backends.compiled.linear import PAIRED
from engine.backends.layers import experts
from engine.backends.layers.compiled_tables import compiled_table
from engine.backends.layers.linear import DenseLinear
from engine.backends.layers.packed import pack
from engine.backends.layers.quantised_linear import QuantizedGatedLinear, QuantizedLinear
from tests.engine.checkpoints import reference
from tests.engine.cpu.test_layers import Steps, save_checkpoint
from tests.engine.cpu.test_packed_adapters import saved
from tests.engine.models.test_gguf_weights import _quantised_llama
from tests.engine.quantization.test_kernel import random_codes
from tests.engine.quantization.test_models import in_int8

PROTECTS = ("engine/backends/compiled", "engine/backends/layers")


@pytest.fixture(scope="module")
def floats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("base"), "llama-mha-biased")


@pytest.fixture(scope="module")
def adapters(floats: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    kinds = [(7, None), (33, ["o_proj", "gate_proj"]), (2, ["k_proj", "up_proj", "down_proj"])]
    return saved(floats, tmp_path_factory.mktemp("adapters"), kinds)


@pytest.mark.parametrize(
    ("dtype", "to"),
    [
        ("float32", "int8"),
        pytest.param("bfloat16", "int8", marks=pytest.mark.proof),
        ("bfloat16", "int4"),
    ],
)
def test_bits_are_those_of_the_operations_one_by_one(
    dtype: str,
    to: str,
    level: str,
    floats: Path,
    adapters: list[Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Twelve rows, so that the codes of several blocks of eight are read, with and without adapters."""
    steps, count = Steps(monkeypatch, dtype), 12
    multiplied = dtype == "float32" or level in PAIRED
    mixed = [(None, *adapters)[n % 4] for n in range(count)]
    for asked in ([None] * count, mixed):
        steps.run(floats, asked, one_by_one=True, quantization=to)
        expected = steps.logits
        steps.run(floats, asked, quantization=to)
        assert steps.at_once == (8 if multiplied else 0)
        assert all(map(torch.equal, steps.logits, expected))


def test_experts_in_codes(level: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the one call, by operations, and one expert after the other (without its compiled form)."""
    checkpoint, steps = save_checkpoint(tmp_path, "mixtral"), Steps(monkeypatch, "float32")
    steps.run(checkpoint, quantization="int8")
    assert steps.at_once == 8
    found = steps.logits
    steps.run(checkpoint, one_by_one=True, quantization="int8")
    assert all(map(torch.equal, steps.logits, found))
    monkeypatch.setattr(experts, "_packed", lambda found: None)
    steps.run(checkpoint, quantization="int8")
    assert steps.at_once == 0
    for each, expected in zip(found, steps.logits, strict=True):
        torch.testing.assert_close(each, expected, rtol=1e-4, atol=1e-4)


def test_matrices_of_one_site_in_several_formats(
    level: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a file in which queries, keys and values differ, and the two halves of a gated product: whatever
    is one call has the bits of the operations."""
    path = tmp_path / "model.gguf"
    _quantised_llama(path)
    steps = Steps(monkeypatch, "float32")
    steps.run(path, one_by_one=True)
    expected = steps.logits
    steps.run(path)
    assert all(map(torch.equal, steps.logits, expected))


def test_parts_of_other_formats_beside_each_other(level: str) -> None:
    """The table has a row for each, and each part's adapter is added to its own outputs."""
    kinds = [(8, 32, False), (4, 32, True), (8, 16, False)]
    linear = QuantizedLinear([pack(random_codes(*kind, (32, 64))) for kind in kinds])
    table = compiled_table(linear)
    assert table is not None
    assert table.rows[:, 4:].tolist() == [[32, 1]] * 3
    gated = QuantizedGatedLinear(*(pack(random_codes(*kind, (32, 64))) for kind in kinds[:2]))
    assert compiled_table(gated) is None  # halves of two formats are computed one by one
    assert compiled_table(DenseLinear(torch.ones(32, 64))) is None


def test_answers_with_adapters_are_those_of_peft(
    level: str, floats: Path, adapters: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over weights and rows of 8 bits, as `transformers` computes with both rounded."""
    steps = Steps(monkeypatch, "float32")
    asked = [adapters[0], None, adapters[1], adapters[0]]
    sequences = steps.run(floats, asked, quantization="int8")
    assert steps.at_once == 8
    for sequence, path in zip(sequences, asked, strict=True):
        model = in_int8(reference(floats))
        if path is not None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)
                model = peft.PeftModel.from_pretrained(model, path).eval()
        with torch.no_grad():
            logits = model(torch.tensor([sequence.history[:-1]])).logits[0]
        answers = logits[sequence.prompt_len - 1 :].argmax(-1).tolist()
        assert sequence.output == answers


def test_a_matrix_of_another_width_is_refused(level: str) -> None:
    """The kernel would read beyond the rows: `product` checks what it is given."""
    product = QuantizedLinear([pack(random_codes(8, 32, False, (16, 64)))])
    matrix = product._parts[0]
    matrix.width = 32
    with pytest.raises(ValueError, match="another format or width"):
        matrix.into(torch.zeros(2, 32), torch.zeros(2, 16))
