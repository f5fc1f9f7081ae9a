"""The GPU's runner, whole: the same tokens as the CPU's, whatever the batch. Its kernels run in the
interpreter where there is no GPU, and a graph is then the same function over the same memory."""

import random
from pathlib import Path

import pytest
import torch

from engine.batch import LAST_SAMPLED, AdapterHandle, Row, StepBatch
from engine.config import EngineConfig
from engine.errors import AdapterError, IntegrityError
from engine.loop import Engine
from engine.models.load import load_model
from engine.protocol import GenerateRequest
from engine.runners.cpu.runner import CpuRunner
from engine.scheduling.sequence import Sequence as Running
from tests.engine.checkpoints import VOCAB, save_adapter, save_checkpoint
from tests.engine.driver import Driver, Sequence, greedy
from tests.engine.gpu.device import DEVICE
from tests.engine.helpers import ask, run_until_idle
from tests.engine.speculation.test_speculation import guess_from

PROTECTS = ("engine/backends/gpu", "engine/runners/gpu")

runner_gpu = pytest.importorskip("engine.runners.gpu.runner")
skinny_launch = pytest.importorskip("engine.backends.gpu.skinny_launch")

PROMPTS = [[3 + (n * i) % 200 for i in range(n)] for n in (3, 7, 11)]
SMALL = {"max_batch_tokens": 128, "max_running": 8, "max_adapter_slots": 3, "max_lora_rank": 20}


class GpuDriver(Driver):
    """The CPU driver's sequences and blocks, over the GPU's runner."""

    def __init__(self, checkpoint: Path, blocks: int = 96, **settings: object) -> None:
        super().__init__(checkpoint, blocks, dtype="float32", device="cpu", **settings)
        fields = {"model": str(checkpoint), "num_blocks": len(self.free), "dtype": "float32"}
        config = EngineConfig(**(fields | {"device": DEVICE} | SMALL | settings))
        self.runner = runner_gpu.GpuRunner(config, load_model(config))


def both(
    checkpoint: Path,
    adapters: list[Path],
    asked: list[int | None],
    chunk: int,
    count: int,
    **settings: object,
):
    """Outputs of the same sequences by either runner; `asked` is the adapter of each."""
    outputs = []
    for kind in (GpuDriver, Driver):
        fields = settings if kind is GpuDriver else settings | {"dtype": "float32"}
        driver = kind(checkpoint, **fields)
        handles = [driver.adapter(path, slot) for slot, path in enumerate(adapters)]
        sequences = [
            driver.sequence(PROMPTS[i % 3], greedy(logprobs=1 if i == 0 else None),
                            None if which is None else handles[which])
            for i, which in enumerate(asked)
        ]  # fmt: skip
        driver.run(sequences, chunk, count)
        outputs.append([sequence.output for sequence in sequences])
    return outputs


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("llama"), num_hidden_layers=1)


def test_the_same_tokens_as_on_a_cpu(llama: Path) -> None:
    ours, theirs = both(llama, [], [None] * 3, 8, 2)
    assert ours == theirs


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("Llama", {"mlp_bias": True, "attention_bias": True}),
        ("Granite", {"residual_multiplier": 0.3, "attention_multiplier": 0.3, "logits_scaling": 6}),
        ("Gemma3", {"num_hidden_layers": 2, "head_dim": 16, "sliding_window_pattern": 2}),
        *(
            pytest.param(*each, marks=pytest.mark.proof)
            for each in (
                ("Qwen2", {}),
                ("Qwen3", {}),
                ("Gemma2", {"head_dim": 16}),
                ("Olmo2", {"num_attention_heads": 6, "head_dim": 12}),
                ("Phi3", {}),
                ("SmolLM3", {"num_hidden_layers": 2, "no_rope_layers": [0, 1]}),
            )
        ),
    ],
)
def test_steps_of_few_rows_by_fused_linears(
    tmp_path: Path, family: str, changes: dict[str, object]
) -> None:
    """The same logits as on a CPU, whichever way a step of few rows runs."""
    checkpoint = save_checkpoint(tmp_path, family, **({"num_hidden_layers": 1} | changes))
    tiles = skinny_launch.SkinnyTiles(16, 32, 4, 2)
    likely = []
    for fused_tiles in (None, {}, {1: tiles, 2: tiles, 10: tiles}):
        driver = Driver(checkpoint, dtype="float32")
        if fused_tiles is not None:
            driver = GpuDriver(checkpoint)
            driver.runner._forward.fused_tiles = fused_tiles
        sequences = [driver.sequence(prompt, greedy(logprobs=VOCAB)) for prompt in PROMPTS[:2]]
        driver.run(sequences, count=2)
        tops = [
            dict((sample.logprobs or [])[0].top)
            for sequence in sequences
            for sample in sequence.samples
        ]
        likely.append(torch.tensor([[top[token] for token in range(VOCAB)] for top in tops]))
    torch.testing.assert_close(likely[1], likely[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(likely[2], likely[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        pytest.param("Mistral", {"sliding_window": 5}, marks=pytest.mark.proof),
        ("Qwen3", {"head_dim": 24, "num_attention_heads": 6}),
        pytest.param(
            "Gemma2",
            {"head_dim": 32, "sliding_window": 5, "num_hidden_layers": 2},
            marks=pytest.mark.proof,
        ),
        (
            "Gemma3",
            {
                "head_dim": 32,
                "sliding_window": 5,
                "sliding_window_pattern": 2,
                "num_hidden_layers": 2,
            },
        ),
    ],
)
def test_every_family(tmp_path: Path, family: str, changes: dict[str, object]) -> None:
    checkpoint = save_checkpoint(tmp_path, family, **({"num_hidden_layers": 1} | changes))
    ours, theirs = both(checkpoint, [], [None] * 3, 0, 2)
    assert ours == theirs


def test_adapters_of_other_ranks_share_a_batch_with_the_base(llama: Path, tmp_path: Path) -> None:
    paths = [save_adapter(llama, tmp_path / f"r{rank}", rank, rank) for rank in (2, 20)]
    paths.append(save_adapter(llama, tmp_path / "few", 5, 9, ["v_proj", "down_proj"]))
    ours, theirs = both(llama, paths, [0, 1, None, 2, 2], 8, 2)
    assert ours == theirs
    assert len({tuple(output) for output in ours}) == 5


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("Llama", {"num_hidden_layers": 2}),
        pytest.param("Gemma2", {"head_dim": 16}, marks=pytest.mark.proof),
        pytest.param("Olmo2", {"num_attention_heads": 6, "head_dim": 12}, marks=pytest.mark.proof),
        ("Qwen2", {}),
    ],
)
def test_adapters_in_steps_by_fused_linears(
    tmp_path: Path, family: str, changes: dict[str, object]
) -> None:
    """The logits of a CPU, of prompts and of decoding, for two adapters, one of them of few matrices,
    and none: through graphs that were recorded with padding alone."""
    checkpoint = save_checkpoint(tmp_path / "m", family, **({"num_hidden_layers": 1} | changes))
    paths = [save_adapter(checkpoint, tmp_path / "r20", 20, 1)]
    paths.append(save_adapter(checkpoint, tmp_path / "few", 5, 9, ["v_proj", "down_proj"]))
    likely = []
    for kind in (Driver, GpuDriver):
        driver = kind(checkpoint, **({"dtype": "float32"} if kind is Driver else {}))
        if kind is GpuDriver:
            tiles = skinny_launch.SkinnyTiles(16, 32, 4, 2)
            driver.runner._forward.fused_tiles = dict.fromkeys(range(1, 17), tiles)
        handles = [driver.adapter(path, slot) for slot, path in enumerate(paths)]
        sequences = [
            driver.sequence(PROMPTS[n % 2], greedy(logprobs=VOCAB), handle)
            for n, handle in enumerate((handles[0], None, handles[1]))
        ]
        driver.run(sequences, 4, count=3)
        tops = [dict((s.logprobs or [])[0].top) for each in sequences for s in each.samples]
        likely.append(torch.tensor([[top[token] for token in range(VOCAB)] for top in tops]))
    torch.testing.assert_close(likely[1], likely[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
def test_keys_and_values_in_8_bits(llama: Path, tmp_path: Path, kv_dtype: str) -> None:
    """With adapters in the pool's blocks, which do not begin where rows of weights do."""
    paths = [save_adapter(llama, tmp_path / f"r{rank}", rank, rank) for rank in (2, 20)]
    ours, theirs = both(llama, paths, [0, 1, None, 1], 8, 3, kv_dtype=kv_dtype, blocks=500)
    assert ours == theirs
    assert len({tuple(output) for output in ours}) == 4


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("Gemma2", {"head_dim": 12, "sliding_window": 5, "num_hidden_layers": 2}),
        pytest.param("Qwen3", {"head_dim": 24, "num_attention_heads": 6}, marks=pytest.mark.proof),
        pytest.param(
            "SmolLM3",
            {"num_hidden_layers": 2, "no_rope_layers": [0, 1]},
            marks=pytest.mark.proof,
        ),
    ],
)
def test_logits_over_8_bits(tmp_path: Path, family: str, changes: dict[str, object]) -> None:
    """Norms, windows and layers without a rotation before the codes; a seeded fault is found."""
    checkpoint = save_checkpoint(tmp_path, family, **({"num_hidden_layers": 1} | changes))
    found = {}
    for name in ("cpu", "gpu", "other"):
        kind, kv_dtype = (Driver if name == "cpu" else GpuDriver), ("fp8", "int8")[name == "other"]
        driver = kind(
            checkpoint, kv_dtype=kv_dtype, **({"dtype": "float32"} if name == "cpu" else {})
        )
        sequence = driver.sequence(PROMPTS[2], greedy(logprobs=VOCAB))
        driver.run([sequence], count=2)
        top = dict((sequence.samples[-1].logprobs or [])[0].top)
        found[name] = torch.tensor([top[token] for token in range(VOCAB)])
    torch.testing.assert_close(found["gpu"], found["cpu"], rtol=1e-4, atol=1e-4)
    assert (found["other"] - found["cpu"]).abs().max() > 1e-3


@pytest.mark.parametrize("kv_dtype", [pytest.param("int8", marks=pytest.mark.proof), "fp8"])
def test_prefixes_copies_and_guesses_over_8_bits(llama: Path, kv_dtype: str) -> None:
    """The engine over either runner: a cached prefix, choices that copy a block, guesses of which
    some are wrong and written over."""
    found, cached = {}, {}
    known: dict[tuple[str, int], list[int]] = {}

    def answer(seq: Running) -> list[int]:
        return known[seq.request.inputs.request_id, 0]

    for kind in ("cpu", "gpu"):
        fields = {"model": str(llama), "num_blocks": 64, "dtype": "float32", "kv_dtype": kv_dtype}
        fields |= SMALL | {"block_size": 4, "speculation": "off"}
        fields["device"] = DEVICE if kind == "gpu" else "cpu"
        config = EngineConfig(**fields)
        runner = runner_gpu.GpuRunner if kind == "gpu" else CpuRunner
        engine = Engine(config, runner(config, load_model(config)))
        if kind == "gpu":
            guess_from(engine, answer, random.Random(1), 0.2)
        for name, choices in (("first", 1), ("again", 2)):
            engine.submit(ask(name, [5, 9, 4, 7, 8, 6, 3, 11, 2, 40], 7, n=choices), "g")
            collected = run_until_idle(engine)
            known |= collected.tokens if kind == "cpu" else {}
            found[kind, name] = [collected.tokens[name, n] for n in range(choices)]
            cached[kind, name] = collected.receipts[name].cached
        engine.check_integrity()
    assert found["gpu", "first"] == found["cpu", "first"]
    assert found["gpu", "again"] == found["cpu", "again"] == found["cpu", "first"] * 2
    assert cached["gpu", "again"] == cached["cpu", "again"] == 8
    counters = engine.metrics.counters
    assert counters["drafted_tokens"] > counters["rejected_tokens"] > 0


def rows_of(sequence: Sequence, tokens: list[int], start: int) -> Row:
    return Row(
        sequence.number, tokens, start, sequence.blocks, sequence.adapter, True,
        sequence.sampling, 0, sequence.history, sequence.prompt_len,
    )  # fmt: skip


def test_a_step_is_launched_before_the_last_one_is_read(llama: Path) -> None:
    driver = GpuDriver(llama)
    alone = driver.sequence(PROMPTS[1])
    driver.run([alone], count=3)
    sequence = driver.sequence(PROMPTS[1])
    sequence.blocks.append(driver.free.pop())
    launch = driver.runner.launch
    tickets = [launch(StepBatch([rows_of(sequence, PROMPTS[1], 0)]))]
    for start in range(7, 9):
        tickets.append(launch(StepBatch([rows_of(sequence, [LAST_SAMPLED], start)])))
    tokens = [driver.runner.collect(ticket)[0].tokens[0] for ticket in tickets]
    assert tokens == alone.output


def test_copied_blocks_carry_their_keys(llama: Path) -> None:
    driver = GpuDriver(llama)
    first = driver.sequence(PROMPTS[2])
    driver.run([first], count=1)
    fork = driver.sequence(PROMPTS[2])
    fork.blocks = [driver.free.pop() for _ in first.blocks]
    copies = list(zip(first.blocks, fork.blocks, strict=True))
    row = rows_of(fork, PROMPTS[2][-1:], len(PROMPTS[2]) - 1)
    found = driver.runner.collect(driver.runner.launch(StepBatch([row], copies)))
    assert found[0].tokens[0] == first.output[0]


def test_a_stale_generation_stops_the_step(llama: Path, tmp_path: Path) -> None:
    driver = GpuDriver(llama)
    path = save_adapter(llama, tmp_path, 4, 0)
    handle = driver.adapter(path, 1)
    driver.run([driver.sequence(PROMPTS[0], adapter=handle)], count=2)
    driver.runner.unload_adapter(handle)
    blocks = [driver.free.pop() for _ in range(driver.runner.adapter_blocks(handle.digest))]
    driver.runner.load_adapter(AdapterHandle(handle.digest, 1, 99), blocks)
    with pytest.raises(IntegrityError, match=r"slot 1 does not hold adapter .* generation 1"):
        driver.run([driver.sequence(PROMPTS[0], adapter=handle)], count=2)


def test_a_slot_given_to_another_adapter_answers_with_the_new_weights(
    llama: Path, tmp_path: Path
) -> None:
    """Also through a graph that was recorded while the old one lay there."""
    paths = [save_adapter(llama, tmp_path / name, 4, seed) for seed, name in enumerate("ab")]
    driver = GpuDriver(llama)
    outputs = []
    for path in (paths[0], paths[1], paths[0]):
        handle = driver.adapter(path, 0)
        sequence = driver.sequence(PROMPTS[0], adapter=handle)
        driver.run([sequence], count=2)
        outputs.append(sequence.output)
        driver.runner.unload_adapter(handle)
    assert outputs[0] == outputs[2] != outputs[1]


def test_what_cannot_be_loaded_is_refused(llama: Path, tmp_path: Path) -> None:
    path = str(save_adapter(llama, tmp_path / "a", 4, 0))
    driver = GpuDriver(llama)
    with pytest.raises(AdapterError, match="register it first"):
        driver.runner.load_adapter(AdapterHandle("f" * 64, 0, 1), [0])
    state = driver.runner.register_adapter(path)
    with pytest.raises(IntegrityError, match="got 1 of "):
        driver.runner.load_adapter(AdapterHandle(state.digest, 0, 1), [0])
    without = GpuDriver(llama, enable_lora=False)
    with pytest.raises(AdapterError, match="LoRA disabled"):
        without.runner.register_adapter(path)


def test_all_graphs_are_recorded_at_the_start(llama: Path) -> None:
    driver = GpuDriver(llama, max_running=1, max_adapter_slots=1, max_batch_tokens=40)
    driver.runner.warm_up()
    ours = driver.sequence(PROMPTS[0])
    driver.run([ours], count=2)
    other = GpuDriver(llama)
    theirs = other.sequence(PROMPTS[0])
    other.run([theirs], count=2)
    assert ours.output == theirs.output


def test_guesses_are_verified_in_the_overlapped_loop(llama: Path) -> None:
    """Behind a token that is still on the device, with a processor that reads it, and sampled."""
    kinds = [greedy(12), greedy(12, dry_multiplier=1.0), greedy(12, temperature=0.9, seed=4)]
    asks = [
        GenerateRequest(f"r{n}", "t", prompt, kind)
        for n, (prompt, kind) in enumerate(zip(PROMPTS, kinds, strict=True))
    ]
    known: dict[tuple[str, int], list[int]] = {}

    def answer(seq: Running) -> list[int]:
        return known[seq.request.inputs.request_id, 0]

    for guessing in (False, True):
        fields = {"model": str(llama), "num_blocks": 64, "dtype": "float32", "device": DEVICE}
        config = EngineConfig(**(fields | SMALL | {"speculation": "off"}))
        engine = Engine(config, runner_gpu.GpuRunner(config, load_model(config)))
        if guessing:
            guess_from(engine, answer, random.Random(1), 0.2)
        for each in asks:
            engine.submit(each, "g")
        found = run_until_idle(engine).tokens
        known = known or found
        assert found == known
    counters = engine.metrics.counters
    assert counters["drafted_tokens"] > counters["rejected_tokens"] > 0
