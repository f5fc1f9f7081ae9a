"""How many kernels a layer launches, as `engine/backends/gpu/README.md` says: counted at the device's
boundary, as the difference between a model of three layers and one of two."""

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.gpu import models, sections
from engine.backends.gpu.skinny_launch import CANDIDATES
from engine.backends.gpu.step import HostStep
from engine.protocol import SamplingParams
from engine.runners.gpu.cuda_graphs import GraphKey
from engine.runners.gpu.runner import GpuRunner, GpuStep
from engine.runners.gpu.warm_up import padding_step, prompt_step
from tests.engine.gpu import cuda_stand_in
from tests.engine.gpu.cuda_stand_in import Launches, fake_device
from tests.engine.gpu.test_runner_strict import row

pytestmark = pytest.mark.slow

README = Path(__file__).parents[3] / "engine" / "backends" / "gpu" / "README.md"
RANK = 16
CONTEXT = models.LLAMA_8B["max_position_embeddings"]
# Of each row of the table: the step, and whether norms, gates and sums are fused into products.
STEPS: dict[str, tuple[Any, bool]] = {
    "1 row decodes, fused": (GraphKey(1, 0), True),
    "16 rows decode, fused": (GraphKey(16, 0), True),
    "16 rows decode": (GraphKey(16, 0), False),
    "64 rows decode": (GraphKey(64, 0), False),
    "16 rows decode, with adapters": (GraphKey(16, 4, RANK), False),
    "16 rows decode, with adapters, fused": (GraphKey(16, 4, RANK), True),
    "64 rows decode, with adapters": (GraphKey(64, 4, RANK), False),
    "a prompt of 512": ((512, 0, 0), False),
    "a prompt of 480 beside 32 rows": ((512, 32, 0), False),
    "a prompt of 512, with adapters": ((512, 0, RANK), False),
    "a prompt of 100 beside 16 rows, a graph of 128": (GraphKey(128, 0, 0, 64), False),
    "the same, with adapters": (GraphKey(128, 4, RANK, 64), False),
}


class Operations(TorchDispatchMode):
    """Counts torch's own kernels: what is neither a view nor memory alone."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        found = out if isinstance(out, tuple | list) else (out,)
        there = any(isinstance(each, torch.Tensor) and each.is_cuda for each in found)
        alone = func.is_view and not (name == "to" and out is not args[0])
        if there and not alone and "empty" not in name:
            self.names.append(name)
        return out


def runner_of(layers: int) -> GpuRunner:
    shape = models.LLAMA_8B | {"num_hidden_layers": layers}
    model = models.random_model(shape, torch.bfloat16, sections.DEVICE)
    return models.make_runner(model, 600, 64, slots=4, enable_lora=True, max_batch_tokens=512)


def host_step(runner: GpuRunner, size: Any) -> HostStep:
    if isinstance(size, GraphKey):
        return runner._graphs.fit(padding_step(size), size)
    tokens, decodes, rank = size
    return prompt_step(tokens, decodes, 1, CONTEXT, rank)


def launched(runner: GpuRunner, launches: Launches, size: Any, fused: bool) -> Counter[str]:
    """The kernels of a forward pass."""
    runner._forward.fused_tiles = dict.fromkeys(range(1, 17), CANDIDATES[0]) if fused else {}
    step = runner._send(host_step(runner, size))
    before = len(launches.kernels)
    with torch.inference_mode(), Operations() as operations:
        runner._compute(step)
    return Counter(launches.kernels[before:]) + Counter(operations.names)


SAMPLERS = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.8},
    "temperature and top-p": {"temperature": 0.8, "top_p": 0.9},
    "temperature, top-k, top-p and min-p": {
        "temperature": 0.8,
        "top_k": 50,
        "top_p": 0.9,
        "min_p": 0.02,
    },
    "temperature, top-p and a bias": {"temperature": 0.8, "top_p": 0.9, "logit_bias": {3: 1.0}},
    "temperature, top-p and typical": {"temperature": 0.8, "top_p": 0.9, "typical_p": 0.9},
}


def sampled(runner: GpuRunner, launches: Launches, fields: dict[str, Any]) -> Counter[str]:
    """The kernels that choose the tokens of four rows and keep them for the next step."""
    params = SamplingParams(max_tokens=9, **fields)
    rows = [row(n, [5], 20, params) for n in range(4)]
    logits = torch.zeros(4, runner.info.vocab_size, dtype=torch.bfloat16, device=sections.DEVICE)
    places = torch.zeros(4, dtype=torch.int32, device=sections.DEVICE)
    before = len(launches.kernels)
    with torch.inference_mode(), Operations() as operations:
        runner._sample(GpuStep(rows, logits=(logits, places)))
    for each in rows:
        runner.forget(each.seq)
    return Counter(launches.kernels[before:]) + Counter(operations.names)


@pytest.fixture(scope="module")
def by_step() -> Iterator[dict[str, Counter[str]]]:
    """The kernels of one layer, and of the samplers, by the row of the table."""
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        patch.setattr(cuda_stand_in, "PROCESSORS", 132)  # an H100's: they decide splits
        launches = stack.enter_context(fake_device(patch))
        two, three = runner_of(2), runner_of(3)
        yield {
            name: launched(three, launches, *given) - launched(two, launches, *given)
            for name, given in STEPS.items()
        } | {name: sampled(two, launches, fields) for name, fields in SAMPLERS.items()}


def test_the_table_has_a_row_for_each_step() -> None:
    assert table().keys() == {*STEPS, *SAMPLERS}


def table() -> dict[str, int]:
    lines = README.read_text(encoding="utf-8").splitlines()
    cells = [line.strip("| ").split(" | ") for line in lines if line.startswith("| ")]
    return {cell[0]: int(cell[1]) for cell in cells if cell[0] in {*STEPS, *SAMPLERS}}


@pytest.mark.parametrize("name", [*STEPS, *SAMPLERS])
def test_as_many_kernels_are_launched_as_the_table_says(
    name: str, by_step: dict[str, Counter[str]]
) -> None:
    found = by_step[name]
    assert found.total() == table()[name], dict(found)


def of_streams(layers: int, sharing: int) -> GpuRunner:
    """Of Gemma 3n's shape, sparse gates and full attention in every layer."""
    changes = {
        "num_hidden_layers": layers, "num_kv_shared_layers": sharing,
        "layer_types": ["full_attention"] * layers, "activation_sparsity_pattern": [0.95] * layers,
    }  # fmt: skip
    model = models.random_model(models.GEMMA3N | changes, torch.bfloat16, sections.DEVICE)
    return models.make_runner(model, 600, 64, slots=4, enable_lora=True, max_batch_tokens=512)


def test_as_many_kernels_are_launched_in_a_layer_of_several_streams(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With keys of its own, and without any."""
    monkeypatch.setattr(cuda_stand_in, "PROCESSORS", 132)
    keys = GraphKey(16, 0), GraphKey(16, 4, RANK), GraphKey(128, 0, 0, 64)
    with fake_device(monkeypatch) as launches:
        found = {}
        for layers, sharing in ((2, 0), (3, 0), (3, 1), (4, 2)):
            runner = of_streams(layers, sharing)
            found[layers, sharing] = [launched(runner, launches, key, False) for key in keys]
    own = [more - less for less, more in zip(found[2, 0], found[3, 0], strict=True)]
    sharing = [more - less for less, more in zip(found[3, 1], found[4, 2], strict=True)]
    plain, adapted, _ = (each.total() for each in own)
    assert [each.total() for each in sharing] == [plain, adapted, plain]
    assert (
        own[2].total() == plain + 1
    )  # attention of prompt chunks beside that of decoding sequences
    ends = found[2, 0][0].total() - 2 * plain
    text = README.read_text(encoding="utf-8")
    said = f"takes {plain} launches while it decodes, {adapted} with adapters, and a step {ends} beside"
    assert said in text


def test_as_many_kernels_are_launched_in_a_layer_of_latent_attention(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of DeepSeek V3, with a plain MLP: 4 of the launches are not those of attention."""
    monkeypatch.setattr(cuda_stand_in, "PROCESSORS", 132)
    with fake_device(monkeypatch) as launches:
        both = []
        for layers in (2, 3):
            shape = models.DEEPSEEK_V3 | {"num_hidden_layers": layers}
            model = models.random_model(shape, torch.bfloat16, sections.DEVICE)
            runner = models.make_runner(
                model, 600, 64, slots=4, enable_lora=True, max_batch_tokens=512
            )
            both.append(
                [
                    launched(runner, launches, key, False)
                    for key in (GraphKey(16, 0), GraphKey(16, 4, RANK))
                ]
            )
    plain, adapted = (more - less for less, more in zip(*both, strict=True))
    assert plain.total() == 15, dict(plain)
    assert (adapted - plain)["by_head_kernel"] == 2, dict(adapted)
    text = README.read_text(encoding="utf-8")
    assert f"takes {plain.total() - 4} launches while it decodes" in text
