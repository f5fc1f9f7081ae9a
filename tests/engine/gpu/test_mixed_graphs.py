"""Steps with prompt chunks through graphs: the bits of the same step without a graph, whatever mix a
graph was recorded with and has replayed since. Where there is no GPU, a graph keeps its launches as a
CUDA graph does (`frozen_graph`)."""

import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from engine.backends.layers.step import order_rows
from engine.batch import LAST_SAMPLED, AdapterHandle, Row
from tests.engine.checkpoints import VOCAB, save_adapter, save_checkpoint
from tests.engine.driver import Driver, greedy
from tests.engine.gpu.device import DEVICE, close
from tests.engine.models.test_experts import save_checkpoint as save_experts

pytest.importorskip("triton")
from engine.backends.gpu import step as step_arrays
from engine.backends.gpu.attention_launch import choose_splits
from engine.runners.gpu import runner as gpu_runner
from engine.runners.gpu import warm_up as gpu_warm_up
from engine.runners.gpu.cuda_graphs import GraphKey
from tests.engine.gpu.formats.device_driver import device_driver, stand_in
from tests.engine.gpu.frozen_graph import FrozenGraph
from tests.engine.gpu.test_runner_gpu import GpuDriver

PROTECTS = ("engine/backends/gpu", "engine/runners/gpu")
SEQUENCES, RUNNING, MOST, POSITIONS = 7, 8, 32, 640
PER_SEQUENCE = -(-POSITIONS // 16)


class ProductsByRow(TorchFunctionMode):
    """A library's product of more rows may add in another order: here a row has the same bits in any."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func == torch.nn.functional.linear:
            return _by_row(*args, **kwargs)
        if func == torch.mm:
            return kwargs["out"].copy_(_by_row(args[0], args[1].t()))
        return func(*args, **kwargs)


def _by_row(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    y = (x[:, None] * weight).sum(-1)
    return y if bias is None else y + bias


@dataclass
class Drawn:
    """Steps of any mix, of sequences whose positions and adapters change as they like."""

    chance: random.Random
    blocks: list[list[int]]  # of each sequence
    handles: list[AdapterHandle | None]
    most: int = MOST  # tokens

    def step(self, decodes: int, chunks: int) -> list[Row]:
        """So many decoding sequences and chunks, some of which are guesses to be verified."""
        chance = self.chance
        lengths = [1] * decodes + [2] * chunks
        for _ in range(chance.randint(0, self.most - sum(lengths))):
            lengths[decodes + chance.randrange(chunks)] += 1
        sequences = chance.sample(range(SEQUENCES), decodes + chunks)
        rows = [self._row(seq, length) for seq, length in zip(sequences, lengths, strict=True)]
        room = RUNNING - len(rows)  # for guesses, as the scheduler has it
        for n, row in enumerate(rows):
            guesses = len(row.tokens) - 1
            if guesses <= room and chance.random() < 0.5:
                rows[n] = replace(row, drafts=guesses, sample=True)
                room -= guesses
        rows[0] = replace(rows[0], sample=True)
        return rows

    def _row(self, seq: int, length: int) -> Row:
        chance = self.chance
        tokens = [chance.randrange(VOCAB) for _ in range(length)]
        if length == 1 and chance.random() < 0.5:
            tokens = [LAST_SAMPLED]
        start = chance.choice((0, 5, 40, 150, 600)) + chance.randrange(5)
        return Row(
            seq, tokens, start, self.blocks[seq], chance.choice(self.handles),
            sample=length == 1 or chance.random() < 0.7, sampling=greedy(), choice=0, history=[],
            prompt_len=0,
        )  # fmt: skip


class Pair:
    """The same steps by a runner with graphs and by one without."""

    def __init__(self, make: Callable[[], Driver], adapters: list[Path]) -> None:
        drivers = [make(), make()]
        self.graphed, self.plain = (driver.runner for driver in drivers)
        spec = self.plain._model.spec
        self._shape = spec.kv_heads, spec.context, self.plain._processors
        self.keys: list[Any] = []
        run = self.graphed._graphs.run

        def noted(key: Any, *rest: Any) -> Tensor:
            self.keys.append(key)
            return run(key, *rest)

        self.graphed._graphs.run = noted
        self.plain._graphs.key_of = lambda step: None
        # Keys and values of every position that a step may read, and the last sampled tokens.
        noise = torch.Generator().manual_seed(1)
        data = torch.randn(self.plain.pool.data.shape, generator=noise)
        last = torch.randint(VOCAB, self.plain._choose.last.shape, generator=noise)
        for driver in drivers:
            if driver.runner.pool.data.is_floating_point():
                driver.runner.pool.data.copy_(data)
            driver.runner._choose.last.copy_(last)
        held = [[driver.adapter(path, n) for n, path in enumerate(adapters)] for driver in drivers]
        assert held[0] == held[1]
        free = drivers[0].free
        blocks = [[free.pop() for _ in range(PER_SEQUENCE)] for _ in range(SEQUENCES)]
        self.drawn = Drawn(random.Random(4), blocks, [None, *held[0]])

    @torch.inference_mode()
    def logits(self, rows: list[Row]) -> tuple[Tensor, Tensor]:
        """With a graph, and without."""
        (ours, places), (theirs, others) = (
            runner._run(*order_rows(rows)) for runner in (self.graphed, self.plain)
        )
        assert torch.equal(places, others)
        assert len(ours) == sum(row.sampled_tokens for row in rows)
        return ours, theirs

    def assert_same(self, rows: list[Row]) -> None:
        ours, theirs = self.logits(rows)
        assert theirs.float().std() > 0.1
        decodes = sum(len(row.tokens) == 1 for row in rows)
        splits = choose_splits(max(1, decodes), *self._shape)
        if splits in (1, 2, choose_splits(1, *self._shape)):
            assert_equal(ours, theirs)
        else:  # a sum of as many as the graph may have adds in another order
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)

    def record(self) -> None:
        """Every graph with prompt chunks, as at the start of an engine: over padding alone."""
        runner = self.graphed
        with torch.inference_mode():
            for key in runner._graphs.keys(runner.adapters.rank_sizes):
                step = runner._graphs.fit(gpu_warm_up.padding_step(key), key)
                if key.sequences:
                    runner._graphs.run(key, runner._send(step), runner._compute)
        self.keys.clear()

    def assert_same_pool(self) -> None:
        assert_equal(self.graphed.pool.data, self.plain.pool.data)


def assert_equal(ours: Tensor, theirs: Tensor) -> None:
    """To the bit, but for a GPU's library, whose products depend on the number of rows."""
    if DEVICE == "cpu":
        assert torch.equal(ours, theirs), (ours.float() - theirs.float()).abs().max()
    else:
        close(ours, theirs)


def gpu_driver(checkpoint: Path, **settings: Any) -> Driver:
    fields = {"max_running": RUNNING, "max_batch_tokens": MOST, "blocks": 500}
    driver = GpuDriver(checkpoint, **(fields | settings))
    if DEVICE == "cpu":
        driver.runner._graphs._record = FrozenGraph
    return driver


@pytest.fixture(autouse=DEVICE == "cpu")
def products_by_row() -> Iterator[None]:
    with ProductsByRow():
        yield


@pytest.fixture(scope="module")
def one_kv_head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of which few sequences have up to 8 splits of their keys."""
    return save_checkpoint(
        tmp_path_factory.mktemp("llama"), num_hidden_layers=1, num_key_value_heads=1,
        max_position_embeddings=1024,
    )  # fmt: skip


MIXES = [(0, 1), (5, 2), (1, 1), (0, 7), (2, 1), (3, 4), (0, 3), (6, 1)]


@pytest.mark.parametrize("recorded", [pytest.param(True, marks=pytest.mark.proof), False])
def test_any_mix_has_the_bits_of_the_step_without_a_graph(
    one_kv_head: Path, recorded: bool
) -> None:
    """`recorded`: over padding; otherwise over the first mix that needs a graph."""
    pair = Pair(lambda: gpu_driver(one_kv_head), [])
    if recorded:
        pair.record()
    for mix in [*MIXES, *MIXES[:2]]:
        pair.assert_same(pair.drawn.step(*mix))
    pair.assert_same_pool()
    used = Counter(pair.keys)
    assert used.keys() == {GraphKey(size, 0, 0, RUNNING) for size in (16, 32)}
    assert min(used.values()) > 2


@pytest.mark.proof
def test_adapters_come_and_go_in_the_same_graphs(one_kv_head: Path, tmp_path: Path) -> None:
    paths = [save_adapter(one_kv_head, tmp_path / f"r{rank}", rank, rank) for rank in (2, 20, 5)]
    pair = Pair(lambda: gpu_driver(one_kv_head, max_adapter_slots=3, max_lora_rank=20), paths)
    for mix in [*MIXES, *MIXES[:2]]:
        pair.assert_same(pair.drawn.step(*mix))
    pair.assert_same_pool()
    assert {(key.adapters, key.max_rank) for key in pair.keys} >= {(3, 16), (3, 32)}


@pytest.mark.parametrize(
    ("family", "changes", "settings"),
    [
        pytest.param(
            "Gemma2",
            {"head_dim": 16, "sliding_window": 40, "num_hidden_layers": 2},
            {},
            marks=pytest.mark.proof,
        ),
        pytest.param(
            "Qwen3",
            {"head_dim": 24, "num_hidden_layers": 1},
            {"kv_dtype": "int8"},
            marks=pytest.mark.proof,
        ),
        ("Cohere", {"num_hidden_layers": 1}, {"kv_window": 100}),
    ],
)
def test_other_families(
    family: str, changes: dict[str, Any], settings: dict[str, Any], tmp_path: Path
) -> None:
    """Windows, codes in the pool, and an MLP beside attention."""
    checkpoint = save_checkpoint(tmp_path, family, **({"max_position_embeddings": 1024} | changes))
    pair = Pair(lambda: gpu_driver(checkpoint, **settings), [])
    for mix in MIXES[:3]:
        pair.assert_same(pair.drawn.step(*mix))
    pair.assert_same_pool()
    assert len(pair.keys) == 3


@pytest.mark.proof
def test_experts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Padding has no expert, and is not counted."""
    checkpoint = save_experts(
        tmp_path, "mixtral", num_hidden_layers=1, max_position_embeddings=1024,
        num_local_experts=8, num_experts_per_tok=2,
    )  # fmt: skip
    with stand_in(monkeypatch):
        monkeypatch.setattr(gpu_runner, "CudaGraph", FrozenGraph)
        fields = {"max_running": RUNNING, "max_batch_tokens": 16, "blocks": 300}
        pair = Pair(lambda: device_driver(checkpoint, **fields), [])
        pair.drawn.most = 16
        pair.record()
        for mix in MIXES[1:3]:
            pair.assert_same(pair.drawn.step(*mix))
        assert len(pair.keys) == 2
        assert torch.equal(pair.graphed._loads.copied(), pair.plain._loads.copied())
        assert pair.plain._loads.copied().sum() > 0


def test_a_graph_that_keeps_the_mix_of_its_recording_is_found(
    one_kv_head: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fault: counts that lie elsewhere in each step."""
    kept: list[Tensor] = []
    mix = step_arrays.Mix

    def elsewhere(counts: Tensor, limits: Any) -> Any:
        kept.append(counts.clone())
        return mix(kept[-1], limits)

    monkeypatch.setattr(step_arrays, "Mix", elsewhere)
    pair = Pair(lambda: gpu_driver(one_kv_head), [])
    pair.drawn.most = 16

    def step(decodes: int, chunks: int) -> list[Row]:
        # From the beginning, so that what is read in error lies within the tables.
        return [replace(row, start=0) for row in pair.drawn.step(decodes, chunks)]

    pair.assert_same(step(2, 2))
    with pytest.raises(AssertionError):
        pair.assert_same(step(1, 3))
    assert len(pair.keys) == 2 and len(set(pair.keys)) == 1
