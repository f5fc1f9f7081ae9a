"""Draft heads change no answer and no count, and are refused by name where they do not fit."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from engine.config import EngineConfig
from engine.demo.paths import ADAPTERS, MODEL_DIR
from engine.errors import CheckpointError, ConfigError
from engine.loop import Engine
from engine.models.checkpoint import DRAFT_HEADS, open_checkpoint
from engine.models.load import load_model
from engine.runners.cpu.runner import CpuRunner, load_runner
from engine.speculation.heads import DraftHeads
from engine.speculation.heads_file import FORMAT, vocabulary_digest
from tests.engine.checkpoints import VOCAB, save_checkpoint
from tests.engine.helpers import ask, run_until_idle
from tests.engine.speculation.test_draft_model import (
    always,
    check_distribution,
    check_grammars,
    check_preempted,
    in_given_times,
    mixed,
)
from training import draft_heads as trainer
from training.demo import settings


def engine_of(model: Path, heads: Path | str = "none", **changes: Any) -> Engine:
    fields = {"num_blocks": 120, "max_batch_tokens": 64, "threads": 1, "dtype": "float32"} | changes
    config = EngineConfig(model=str(model), draft_heads=str(heads), **fields)
    return Engine(config, load_runner(config))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def width(base: Path) -> int:
    return load_model(EngineConfig(model=str(base), dtype="float32")).spec.hidden


@pytest.fixture
def tensors(width: int) -> dict[str, torch.Tensor]:
    """Random heads, as of a training that has only begun."""
    draw = torch.Generator().manual_seed(2)
    shapes = {
        "merge.weight": (width, 2 * width), "gate_up.weight": (96, width),
        "down.weight": (width, 48),
    }  # fmt: skip
    return {n: torch.randn(shape, generator=draw) * shape[1] ** -0.5 for n, shape in shapes.items()}


def save_heads(folder: Path, model: Path, tensors: dict[str, torch.Tensor], **about: str) -> Path:
    spec = load_model(EngineConfig(model=str(model), dtype="float32")).spec
    metadata = {"format": FORMAT, "vocabulary": vocabulary_digest(spec, model)} | about
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / DRAFT_HEADS, metadata=metadata)
    return folder


def test_answers_and_counts_stay_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model and the heads that ship: greedy and sampled, with log-probabilities, adapters,
    processors and several choices, in turns of one process."""
    always(monkeypatch)
    plain = engine_of(MODEL_DIR, speculation="off", max_batch_tokens=256)
    drafting = engine_of(MODEL_DIR, "auto", max_batch_tokens=256)
    found = []
    for engine in (plain, drafting):
        digests = [engine.load_adapter(str(ADAPTERS[name])).digest for name in ("pirate", "json")]
        for one in mixed(digests):
            engine.submit(one, "g")
        found.append(run_until_idle(engine))
    assert found[1].tokens == found[0].tokens and found[1].reasons == found[0].reasons
    counters = drafting.metrics.counters
    assert counters["drafted_tokens"] > counters["rejected_tokens"] > 0
    assert counters["steps"] < plain.metrics.counters["steps"]
    for name, receipt in found[1].receipts.items():
        assert receipt.generated == found[0].receipts[name].generated
    rejected = sum(each.rejected for each in found[1].receipts.values())
    assert rejected == counters["rejected_tokens"]
    drafting.check_integrity()


def test_what_was_rejected_is_in_no_prefix_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers are continued from the cached blocks of an answer that was drafted."""
    always(monkeypatch)
    prompt = list(range(300, 340))
    found = []
    for heads in ("none", "auto"):
        engine = engine_of(MODEL_DIR, heads, max_batch_tokens=256)
        engine.submit(ask("first", prompt, 70, temperature=1.0, seed=3, ignore_eos=True), "g")
        said = run_until_idle(engine).tokens["first", 0]
        engine.submit(ask("second", prompt + said, 40, ignore_eos=True), "g")
        second = run_until_idle(engine)
        found.append((said, second.tokens["second", 0]))
        assert second.receipts["second"].cached >= 96
    assert engine.metrics.counters["rejected_tokens"] > 0
    assert found[0] == found[1]


def test_preempted_sequences_draft_on(monkeypatch: pytest.MonkeyPatch) -> None:
    always(monkeypatch)
    asks = [ask(f"r{n}", [300 + (n * 17 + i) % 200 for i in range(60)], 40, priority=n,
                ignore_eos=True) for n in range(4)]  # fmt: skip
    small = {"num_blocks": 16, "max_running": 4, "prefix_cache": False}
    check_preempted(asks, (engine_of(MODEL_DIR, heads, **small) for heads in ("none", "auto")))


def test_grammars_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    always(monkeypatch)
    check_grammars(engine_of(MODEL_DIR, heads, max_batch_tokens=256) for heads in ("none", "auto"))


def test_sampled_tokens_follow_the_models_distribution(
    base: Path, tensors: dict[str, torch.Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chi-square of three tokens, two of them drafted, over their distribution by `transformers`. The
    heads may guess five ids, which alone can be sampled."""
    always(monkeypatch, 2)
    ids = torch.arange(20, 25, dtype=torch.int32)
    own = load_file(base / "model.safetensors")
    tensors |= {"ids": ids, "head.weight": own["lm_head.weight"][20:25].clone()}
    engine = engine_of(base, save_heads(tmp_path / "h", base, tensors), num_blocks=400)
    prompt, runs = [11, 12, 13, 14], 1500
    biased = dict.fromkeys(ids.tolist(), 100.0)
    tokens = {}
    for run in range(runs):
        one = ask(f"r{run}", prompt, 3, temperature=1.0, seed=run, logit_bias=biased)
        engine.submit(one, "g")
        if run % 50 == 49:
            tokens |= run_until_idle(engine).tokens
    check_distribution(base, prompt, list(tokens.values()))
    counters = engine.metrics.counters
    assert counters["drafted_tokens"] > counters["rejected_tokens"] > 0


def test_heads_that_are_mostly_wrong_are_left_alone(
    base: Path,
    tensors: dict[str, torch.Tensor],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    in_given_times(monkeypatch, DraftHeads)
    engine = engine_of(base, save_heads(tmp_path / "h", base, tensors))
    for n in range(2):
        engine.submit(ask(f"r{n}", [7 + n] * 9, max_tokens=200, temperature=1.0, seed=n), "g")
    run_until_idle(engine)
    assert 0 < engine.metrics.counters["drafted_tokens"] < 100  # of 400 tokens


def test_guesses_start_from_the_state_of_the_last_token(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trained for a moment; then each guess of an engine is compared with the trained network's over
    states of a pass over the finished answer."""
    torch.manual_seed(1)
    model = load_model(EngineConfig(model=str(base), dtype="float32"))
    data = [([9, 8, 7 + n] + [(5 * n + i) % 90 for i in range(40)], 3) for n in range(6)]
    plan = replace(settings.HEADS, inner=48, steps=150, batch=64)
    network = trainer.Network(model, trainer.float_head(model), plan.inner)
    place = torch.arange(model.spec.vocab)
    share = trainer.train(network, trainer.collect(model, data), place, plan)
    assert share > 0.5
    trainer.save(network, None, model, tmp_path)
    always(monkeypatch, 3)
    engine = engine_of(base, tmp_path)
    kept: list[tuple[list[int], list[int]]] = []
    whole = DraftHeads.guesses

    def noted(self: DraftHeads, histories: dict[int, list[int]], count: int) -> Any:
        found = whole(self, histories, count)
        kept.extend((list(histories[number]), ids) for number, ids in found.items())
        return found

    monkeypatch.setattr(DraftHeads, "guesses", noted)
    for n in range(3):
        engine.submit(ask(f"r{n}", [9, 8, 7 + n, n, 5], max_tokens=30), "g")
    run_until_idle(engine)
    assert engine.metrics.counters["rejected_tokens"] > 20
    assert len(kept) > 40
    loaded, same = open_heads(tmp_path), 0
    for name, value in network.state_dict().items():
        assert torch.allclose(loaded[name].float(), value, atol=0.02)
        value.copy_(loaded[name].float())
    for history, ids in kept:
        states = trainer.collect(model, [(history, len(history) - 1)]).states
        tokens, state = torch.tensor(history[-1:]), states
        expected = []
        for _ in ids:
            with torch.no_grad():
                state = network(state, tokens)
            tokens = (state @ network.matrix.T).argmax(-1)
            expected.append(int(tokens))
        same += ids == expected
    assert same >= 0.95 * len(kept), (same, len(kept))  # nearly equal logits may change places


def open_heads(folder: Path) -> dict[str, torch.Tensor]:
    with safe_open(folder / DRAFT_HEADS, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def test_heads_beside_the_checkpoint_are_used_and_do_not_change_its_digest(
    base: Path, tensors: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    model = Path(shutil.copytree(base, tmp_path / "model"))
    save_heads(model, base, tensors)
    assert open_checkpoint(model).digest == open_checkpoint(base).digest
    runners = {name: runner_of(model, draft_heads=name) for name in ("auto", "none", str(model))}
    assert isinstance(runners["auto"].drafter, DraftHeads)
    assert isinstance(runners[str(model)].drafter, DraftHeads)
    assert runners["none"].drafter is None
    assert runner_of(model, speculation="off").drafter is None
    assert not isinstance(runner_of(model, draft_model=str(base)).drafter, DraftHeads)
    assert runner_of(base).drafter is None
    assert isinstance(runner_of(MODEL_DIR).drafter, DraftHeads)
    assert (MODEL_DIR / DRAFT_HEADS).stat().st_size < 2_000_000


def runner_of(model: Path, **changes: Any) -> CpuRunner:
    config = EngineConfig(model=str(model), num_blocks=8, threads=1, dtype="float32", **changes)
    runner = load_runner(config)
    assert isinstance(runner, CpuRunner)
    return runner


def test_heads_that_do_not_fit_are_refused_by_name_before_the_weights(
    base: Path, tensors: dict[str, torch.Tensor], width: int, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    about = {"format": FORMAT}
    head = {"ids": torch.tensor([1, VOCAB]), "head.weight": torch.zeros(2, width)}
    short = {"merge.weight": torch.zeros(width, width)}
    cases: list[tuple[dict[str, torch.Tensor], dict[str, str], str]] = [
        ({n: t for n, t in tensors.items() if n != "down.weight"}, about,
         "tensor gate_up.weight has shape|tensor down.weight is missing"),
        ({n: t for n, t in tensors.items() if n != "merge.weight"}, about,
         r"tensor merge.weight is missing"),
        (tensors | short, about,
         rf"tensor merge.weight has shape \[{width}, {width}\], the model asks for "
         rf"\[{width}, {2 * width}\]"),
        (tensors | {"extra": torch.zeros(1)}, about, "tensor extra is not known"),
        (tensors | {"ids": head["ids"]}, about, "tensor head.weight is missing"),
        (tensors | head, about, rf"ids has ids outside of 0 to {VOCAB - 1}"),
        (tensors, {"format": "medusa"}, "has the format 'medusa', this engine reads"),
        (tensors, {"vocabulary": "other"}, "trained for another vocabulary than that of"),
    ]  # fmt: skip
    folders = [
        save_heads(tmp_path / str(n), base, {k: t.contiguous() for k, t in parts.items()}, **said)
        for n, (parts, said, _) in enumerate(cases)
    ]

    def read(*_: object) -> None:
        raise AssertionError("the weights were read")

    monkeypatch.setattr("engine.models.load.Decoder", read)
    for folder, (_, _, message) in zip(folders, cases, strict=True):
        with pytest.raises(ConfigError, match=message):
            engine_of(base, folder)
    cut = tmp_path / "cut"
    cut.mkdir()
    (cut / DRAFT_HEADS).write_bytes((folders[0] / DRAFT_HEADS).read_bytes()[:500])
    with pytest.raises(ConfigError, match="is not a complete safetensors file"):
        engine_of(base, cut)
    with pytest.raises(ConfigError, match=r"there is no file .*; give a folder with"):
        engine_of(base, tmp_path / "nowhere")


def test_contradictions_and_values_that_are_not_finite_are_refused(
    base: Path, tensors: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    tensors["down.weight"][3, 4] = float("nan")
    folder = save_heads(tmp_path / "nan", base, tensors)
    with pytest.raises(CheckpointError, match=r"tensor down.weight holds NaN or infinite"):
        engine_of(base, folder)
    with pytest.raises(ConfigError, match="draft_heads is set and speculation is off"):
        engine_of(base, folder, speculation="off")
    with pytest.raises(ConfigError, match="draft_heads is set and so is draft_model"):
        engine_of(base, folder, draft_model=str(base))
