"""Several residual streams by the kernels: each against plain torch, and Gemma 3n whole through the GPU's
runner against `transformers` and PEFT."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.backends.layers.linear import DenseLinear
from engine.backends.layers.norm import RmsNorm
from engine.backends.layers.streams import StreamLayer
from tests.engine.checkpoints import (
    VOCAB,
    adapted_reference,
    reference,
    reference_logits,
    save_adapter,
    save_checkpoint,
)
from tests.engine.driver import Driver, Sequence, greedy
from tests.engine.gpu.device import DEVICE, close
from tests.engine.models.test_family_parity import CASES
from tests.engine.quantization.agreement import some_ids
from tests.engine.quantization.test_kv import greedy_over

pytest.importorskip("triton")
from engine.backends.gpu.adapters.lora_chunks import sort_into_chunks
from engine.backends.gpu.altup import launch
from engine.backends.gpu.altup.sampled import of_sampled
from engine.backends.gpu.mixed import MixLimits
from engine.backends.gpu.step import HostStep, LoraRows, StepBuffer
from engine.runners.gpu import runner as gpu_runner
from tests.engine.gpu.formats.device_driver import assert_answers, device_driver, likely, stand_in
from tests.engine.gpu.frozen_graph import FrozenGraph

PROTECTS = ("engine/backends/gpu", "engine/runners/gpu")
pytestmark = pytest.mark.slow

SHAPE = CASES["gemma3n"][1]
# A window and a full layer with keys of their own, then both kinds that read theirs.
FEW = SHAPE | {
    "num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2, "activation_sparsity_pattern": [0.9, 0.0, 0.4, 0.95],
}  # fmt: skip
PROMPTS = [some_ids(33), some_ids(5)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("gemma3n"), "Gemma3n", **FEW)


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def layer_of(
    streams: int, active: int, width: int, dtype: torch.dtype, scaled: bool
) -> StreamLayer:
    def norm(seed: int) -> RmsNorm:
        return RmsNorm(random(width, seed=seed, dtype=dtype), 1e-3)

    none: Any = None
    return StreamLayer(
        active=active, router_norm=norm(1), router=3 * random(streams, width, seed=2, dtype=dtype),
        prediction=random(streams**2, streams, seed=3, dtype=dtype),
        correction=random(streams, streams, seed=4, dtype=dtype),
        scale=random(width, seed=5, dtype=dtype) if scaled else None,
        left=none, right=none, beside_norm=norm(6), gate=none, projection=none, input_norm=norm(7),
    )  # fmt: skip


def norm_by_hand(x: Tensor, norm: RmsNorm) -> Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + norm.eps).sqrt() * norm.weight.double()


def modes_by_hand(layer: StreamLayer, x: Tensor) -> Tensor:
    """[rows, streams]"""
    normed = norm_by_hand(x, layer.router_norm) / x.shape[-1]
    return torch.tanh(normed @ layer.router.double().t())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("streams", "active", "width"), [(3, 1, 66), (4, 0, 640), (2, 1, 33)])
def test_predicted_and_corrected(streams: int, active: int, width: int, dtype: torch.dtype) -> None:
    layer = layer_of(streams, active, width, dtype, scaled=active == 1)
    x, norm = random(5, streams, width, seed=8, dtype=dtype), layer.beside_norm
    added = random(5, width, seed=9, dtype=dtype)
    wide = x.double()
    wide[:, 1:] += norm_by_hand(added, layer.input_norm)[:, None]
    wide = wide.to(dtype).double()
    shares = modes_by_hand(layer, wide[:, active]) @ layer.prediction.double().t()
    want = wide + shares.view(5, streams, streams) @ wide
    predicted, normed = launch.predict(layer, x, norm, (added, layer.input_norm))
    close(predicted, want.to(dtype))
    close(normed, norm_by_hand(predicted[:, active], norm).to(dtype))
    plain, _ = launch.predict(layer, x, norm)
    assert (plain - predicted).abs().max() > 0.1

    joined, down = (random(5, width, seed=seed, dtype=dtype) for seed in (10, 11))
    computed = (joined.double() + norm_by_hand(down, norm)).to(dtype).double()
    change = computed - predicted[:, active].double()
    shares = modes_by_hand(layer, computed) @ layer.correction.double().t() + 1
    want = predicted.double() + shares[:, :, None] * change[:, None]
    found, gate = launch.correct(layer, down, norm, joined, predicted)
    close(found, want.to(dtype))
    scale = 1.0 if layer.scale is None else layer.scale.double()
    close(gate, (found[:, active].double() * scale).to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_joined(dtype: torch.dtype) -> None:
    norms = [RmsNorm(random(100, seed=seed, dtype=dtype), 1e-5) for seed in range(3)]
    product, x, beside = (random(3, 100, seed=seed, dtype=dtype) for seed in (4, 5, 6))
    active = random(3, 4, 100, seed=7, dtype=dtype)[:, 2]
    found, normed = launch.join(product, active, x, beside, tuple(norms))
    attended = active.double() + norm_by_hand(product, norms[0])
    want = (attended + x.double() + norm_by_hand(beside, norms[1])) / 2**0.5
    close(found, want.to(dtype))
    close(normed, norm_by_hand(found, norms[2]).to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ends(dtype: torch.dtype) -> None:
    """A product that is nearly 0 stays so."""
    x, others = random(5, 66, dtype=dtype), 3 * random(3, 5, 66, seed=1, dtype=dtype)
    others[1, 2] *= 1e-4
    length = x.double().square().mean(-1, keepdim=True)
    own = others.double().square().mean(-1, keepdim=True).clamp(min=1e-5)
    want = torch.stack([x.double(), *(others.double() * (length / own).sqrt())], 1)
    found = launch.spread(x, others)
    close(found, want.to(dtype))
    assert found[2, 2].abs().max() < 0.5 < found[2, 1].abs().max()
    close(launch.gather(x, others), want.mean(1).to(dtype))
    part = random(5, 4, 66, dtype=dtype)[:, 0]
    close(launch.gather(part, others), launch.gather(part.contiguous(), others))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("width", "cutoff"), [(112, 1.28), (5000, -0.3)])
def test_sparse_gates(width: int, cutoff: float, dtype: torch.dtype) -> None:
    both = random(3, 2 * width, dtype=dtype) + 0.5
    gate, up = both.double().chunk(2, -1)
    least = gate.mean(-1, keepdim=True) + cutoff * gate.std(-1, unbiased=False, keepdim=True)
    want = F.gelu((gate - least).relu(), approximate="tanh") * up
    found = launch.sparse_gated(both, cutoff, gelu=True)
    close(found, want.to(dtype))
    assert 0.05 < (found == 0).float().mean() < 0.95


@pytest.mark.parametrize("seed", range(4))
def test_the_sampled_rows_of_a_step(seed: int) -> None:
    """Each a sequence with the keys up to its own, and the adapter of its token; a graph's padding sees
    nothing and has no adapter."""
    dice = torch.Generator().manual_seed(seed)
    tokens, room = 90, 40
    slots = torch.randint(-1, 3, (tokens,), generator=dice).numpy()
    wanted = torch.randperm(tokens, generator=dice)[: 5 + 10 * seed].sort().values.numpy()
    positions = torch.randint(0, 500, (tokens,), generator=dice).numpy()
    order, chunks = sort_into_chunks(slots, 16)
    chunks = np.pad(chunks, ((0, 12 - len(chunks)), (0, 0)))
    sampled, of_sequences = (np.pad(each, (0, room - len(wanted))) for each in (wanted, wanted % 7))
    none = np.zeros(tokens, np.int32)
    given = HostStep(
        none, positions, none, none[:7], none[:7], np.arange(8), sampled, of_sequences, 0,
        LoraRows(np.pad(order, (0, tokens - len(order))), chunks, 16, 16), sequences=7,
    )  # fmt: skip
    tables = torch.zeros(8, 4, dtype=torch.int32, device=DEVICE)
    buffer = StepBuffer(tokens, room, torch.device(DEVICE))
    step = buffer.send(given, tables, 4, MixLimits(4, 9, 2, 8))
    found = of_sampled(step, 2)
    lengths = [int(positions[n]) + 1 for n in wanted]
    assert found.attention.seq_lens.tolist() == lengths + [0] * (room - len(wanted))
    assert found.attention.table_rows.tolist() == of_sequences.tolist()
    assert found.attention.decodes == room and found.attention.mix is None and found.splits == 2
    assert found.rotary.positions.tolist()[: len(wanted)] == [int(positions[n]) for n in wanted]
    assert found.lora is not None
    used: dict[int, int] = {}
    for slot, first, count in found.lora.chunks.tolist():
        assert count <= 16
        for row in found.lora.order[first : first + count].tolist():
            assert row not in used and row < len(wanted)
            used[row] = slot
    assert used == {n: slots[token] for n, token in enumerate(wanted) if slots[token] >= 0}


@pytest.mark.parametrize(
    ("case", "chunk"),
    [("gemma3n", 11), pytest.param("gemma3n-own-keys", 0, marks=pytest.mark.proof)],
)
def test_logits(case: str, chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts in chunks, mixed steps, windows, and decoding over split keys."""
    shape = FEW if case == "gemma3n" else CASES[case][1] | {"num_hidden_layers": 2}
    checkpoint = save_checkpoint(tmp_path, "Gemma3n", **shape)
    with stand_in(monkeypatch):
        driver = device_driver(checkpoint)
        assert not driver.runner._forward.fusable
        assert_answers(driver, reference(checkpoint), PROMPTS, 3, chunk=chunk)


def ask_all(driver: Driver, handles: list[Any], chunk: int, count: int) -> list[Sequence]:
    """The long prompt and the short one by turns, one for each handle."""
    asked = greedy(logprobs=VOCAB)
    sequences = [driver.sequence(PROMPTS[n % 2], asked, each) for n, each in enumerate(handles)]
    driver.run(sequences, chunk, count)
    return sequences


@pytest.mark.proof
@pytest.mark.parametrize("frozen", [False, True])
def test_adapters(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, frozen: bool
) -> None:
    """Two beside a row without one, in steps whose last layers have the sampled rows alone. `frozen`:
    through graphs that replay what was recorded of another step."""
    adapters = [
        save_adapter(checkpoint, tmp_path / str(n), rank, n, targets)
        for n, (rank, targets) in enumerate([(5, None), (3, ["q_proj", "v_proj", "down_proj"])])
    ]
    models = [adapted_reference(checkpoint, adapters[0]), reference(checkpoint)]
    models.append(adapted_reference(checkpoint, adapters[1]))
    with stand_in(monkeypatch):
        if frozen:
            monkeypatch.setattr(gpu_runner, "CudaGraph", FrozenGraph)
        driver = device_driver(checkpoint, blocks=400, max_batch_tokens=64)
        first, second = (driver.adapter(each, slot) for slot, each in enumerate(adapters))
        ask_all(driver, [second, None, None], 7, 2)
        sequences = ask_all(driver, [first, None, second], 7, 3)
        graphs = driver.runner._graphs._graphs
        assert {key.sequences > 0 for key in graphs} == {True, False}
    for model, sequence in zip(models, sequences, strict=True):
        logits = reference_logits(model, sequence.history[:-1])[sequence.prompt_len - 1 :]
        torch.testing.assert_close(likely(sequence), logits.log_softmax(-1), atol=3e-4, rtol=0)


def test_last_layers_compute_sampled_rows_alone(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step of 20 tokens of which none is sampled, then one in which one of 13 is, and one that
    decodes."""
    rows: list[int] = []
    with stand_in(monkeypatch):
        driver = device_driver(checkpoint, max_batch_tokens=16)
        join = launch.join

        def seen(product: Tensor, *given: Any) -> Any:
            rows.append(len(product))
            return join(product, *given)

        monkeypatch.setattr("engine.backends.gpu.altup.operations.join", seen)
        sequence = driver.sequence(PROMPTS[0], greedy(2))
        driver.step((sequence, 20))
        assert rows == [20]
        rows.clear()
        driver.step((sequence, 0))
        assert rows == [16, *[4] * 3], "of a graph for 16 tokens and 4 sequences"
        rows.clear()
        driver.step((sequence, 0))
        assert rows == [1] * 4
    ids = sequence.history[:-1]
    expected = reference_logits(reference(checkpoint), ids)[len(PROMPTS[0]) - 1 :].argmax(-1)
    assert sequence.output == expected.tolist()


@pytest.mark.parametrize("kv_dtype", [pytest.param("int8", marks=pytest.mark.proof), "fp8"])
def test_keys_and_values_in_8_bits(
    checkpoint: Path, kv_dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over a cache of `transformers` that rounds by the formula."""
    with stand_in(monkeypatch):
        driver = device_driver(checkpoint, kv_dtype=kv_dtype)
        assert driver.runner.pool.block_bytes == 2 * 16 * 2 * 3 * (14 + 2), "2 of 4 layers"
        sequence = driver.sequence(PROMPTS[0])
        driver.run([sequence], chunk=13, count=3)
    assert sequence.output == greedy_over(reference(checkpoint), kv_dtype, PROMPTS[0], 3)


@pytest.mark.proof
def test_weights_in_codes(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with stand_in(monkeypatch):
        found = []
        for quantization in ("none", "int8"):
            driver = device_driver(checkpoint, quantization=quantization)
            left = driver.runner._model.decoder.streams._layers[0].left
            assert isinstance(left, DenseLinear) == (quantization == "none")
            found.append(likely(ask_all(driver, [None], 0, 1)[0]))
    error = (found[1] - found[0]).abs().mean() / found[0].std()
    assert 0 < error < 0.15
