"""A draft model changes no answer and no count, and is used only where it saves time."""

import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from engine.config import EngineConfig
from engine.demo.paths import MODEL_DIR
from engine.errors import ConfigError
from engine.loop import Engine
from engine.protocol import GenerateRequest
from engine.runners.cpu.runner import load_runner
from engine.scheduling import speculation
from engine.speculation.costs import StepCosts
from engine.speculation.draft_model import DraftModel
from engine.speculation.drafting import Acceptance, best_drafts
from tests.engine.checkpoints import VOCAB, reference, save_adapter, save_checkpoint
from tests.engine.decoding.test_grammars import constrained
from tests.engine.helpers import ask, run_until_idle


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def similar(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The served model with noise: right now and then."""
    path = tmp_path_factory.mktemp("similar")
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(noise * 0.1 * parameter.std())
    model.save_pretrained(path)
    return path


def engine_of(base: Path, draft: Path | None = None, **changes: object) -> Engine:
    fields = {"num_blocks": 120, "max_batch_tokens": 64, "threads": 1, "dtype": "float32"} | changes
    name = str(draft) if draft is not None else None
    config = EngineConfig(model=str(base), draft_model=name, **fields)  # type: ignore[arg-type]
    return Engine(config, load_runner(config))


def check_preempted(asks: list[GenerateRequest], engines: Iterable[Engine]) -> None:
    """The second engine drafts, also for sequences that were preempted, and answers as the first."""
    found = []
    for engine in engines:
        for one in asks:
            engine.submit(one, "g")
            engine.step()
        found.append(run_until_idle(engine))
        assert engine.metrics.counters["preemptions"] > 0
    assert found[0].tokens == found[1].tokens
    assert engine.metrics.counters["drafted_tokens"] > 0


def check_grammars(engines: Iterable[Engine]) -> None:
    """The second engine drafts under grammars, and answers as the first."""
    schema = '{"type":"array","items":{"type":"integer","maximum":99},"minItems":3,"maxItems":9}'
    asks = [
        constrained("a", "json_schema", schema, temperature=0.0),
        constrained("b", "regex", "(ab|ac){9}d"),
        ask("free", [5, 9, 30], 40),
    ]
    found = []
    for engine in engines:
        for one in asks:
            engine.submit(one, "g")
        found.append(run_until_idle(engine))
    assert found[0].tokens == found[1].tokens and found[0].reasons == found[1].reasons
    assert engine.metrics.counters["drafted_tokens"] > 20


def always(monkeypatch: pytest.MonkeyPatch, count: int = 4) -> None:
    """Every sequence drafts in every step, whatever it costs."""

    def _all(shares: list[float], *_: object) -> tuple[int, int]:
        return len(shares), count if shares else 0

    monkeypatch.setattr(speculation, "best_drafts", _all)


def in_given_times(monkeypatch: pytest.MonkeyPatch, drafter: type) -> None:
    """Steps and guesses take what they would on a machine that nobody else uses."""
    record = StepCosts.record

    def _record(costs: StepCosts, tokens: int, _: float) -> None:
        record(costs, tokens, 1e-3 + 2e-5 * tokens)

    def _measure(found: Any, _: float) -> None:
        found.step_s = 4e-4

    monkeypatch.setattr(StepCosts, "record", _record)
    monkeypatch.setattr(drafter, "_measure", _measure)


def mixed(digests: list[str]) -> list[GenerateRequest]:
    dice = random.Random(4)
    kinds: list[dict[str, object]] = [
        {}, {"temperature": 0.9, "seed": 5, "top_k": 20}, {"logprobs": 2},
        {"n": 2, "temperature": 1.0, "seed": 8, "typical_p": 0.9}, {"frequency_penalty": 0.5},
        {"bad_words": ((5, 6), (9,)), "lz_penalty": 0.3}, {"min_tokens": 9, "ignore_eos": False},
    ]  # fmt: skip
    return [
        ask(
            f"r{n}", [dice.randrange(3, VOCAB) for _ in range(dice.randrange(1, 30))],
            max_tokens=24, adapter=dice.choice([None, *digests]), **kind,
        )
        for n, kind in enumerate(kinds * 2)
    ]  # fmt: skip


def test_answers_and_counts_stay_the_same(
    base: Path, similar: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy and sampled, with log-probabilities, adapters, processors and several choices."""
    always(monkeypatch)
    paths = [str(save_adapter(base, tmp_path / f"a{r}", r, seed=r)) for r in (2, 5)]
    plain, drafting = engine_of(base, speculation="off"), engine_of(base, similar)
    found = []
    for engine in (plain, drafting):
        digests = [engine.load_adapter(path).digest for path in paths]
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


def test_a_model_that_is_always_right_saves_most_steps(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same model as its own draft: keys and values of guesses are in their places."""
    always(monkeypatch)
    engine = engine_of(base, base)
    for n in range(3):
        engine.submit(ask(f"r{n}", [7 + n] * (9 + 20 * n), max_tokens=50), "g")
    found = run_until_idle(engine)
    assert all(len(tokens) == 50 for tokens in found.tokens.values())
    # Few are wrong: of prompt look-up, which tries as often as the measured times advise, and where
    # nearly equal logits change places. With keys and values out of place nearly all would be.
    assert engine.metrics.counters["rejected_tokens"] <= 60
    assert engine.metrics.counters["steps"] < 30


def test_a_preempted_sequence_and_a_long_prompt_are_read_in_parts(
    base: Path, similar: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    always(monkeypatch)
    monkeypatch.setattr("engine.speculation.draft_model._READ", 7)
    asks = [
        ask(f"r{n}", [3 + (n * 17 + i) % 200 for i in range(60)], 40, priority=n) for n in range(4)
    ]
    small = {"num_blocks": 16, "max_running": 4, "prefix_cache": False}
    check_preempted(asks, (engine_of(base, draft, **small) for draft in (None, similar)))


def test_grammars_hold_with_a_draft_model(monkeypatch: pytest.MonkeyPatch) -> None:
    always(monkeypatch)
    changes = {"speculation": "auto", "max_batch_tokens": 256}
    check_grammars(engine_of(MODEL_DIR, draft, **changes) for draft in (None, MODEL_DIR))


def check_distribution(base: Path, prompt: list[int], answers: list[list[int]]) -> None:
    """Chi-square of three tokens, each of 20 to 24, over their distribution by `transformers`."""
    runs, counts = 1500, np.zeros((5, 5, 5))
    for first, second, third in answers:
        counts[first - 20, second - 20, third - 20] += 1
    assert counts.sum() == runs
    model, expected = reference(base), np.zeros_like(counts)
    with torch.inference_mode():
        for first, second in np.ndindex(5, 5):
            ids = torch.tensor([[*prompt, 20 + first, 20 + second]])
            rows = model(ids).logits[0, -3:, 20:25].double().softmax(-1).numpy()
            expected[first, second] = rows[0, first] * rows[1, second] * rows[2] * runs
    often = expected >= 5
    observed = np.append(counts[often], counts[~often].sum())
    wanted = np.append(expected[often], expected[~often].sum())
    statistic = ((observed - wanted) ** 2 / wanted).sum()
    degrees = len(wanted) - 1
    assert statistic < degrees + 4.5 * (2 * degrees) ** 0.5, (statistic, degrees)


def test_sampled_tokens_follow_the_models_distribution(
    base: Path, similar: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chi-square of the third token, which is drafted, over its distribution by `transformers`."""
    always(monkeypatch, 2)
    engine, prompt, runs = engine_of(base, similar, num_blocks=400), [11, 12, 13, 14], 1500
    biased = dict.fromkeys(range(20, 25), 100.0)  # of five tokens each
    for run in range(runs):
        one = ask(f"r{run}", prompt, 3, temperature=1.0, seed=run, logit_bias=biased)
        engine.submit(one, "g")
        if run % 50 == 49:
            found = run_until_idle(engine)
            if run == 49:
                tokens = dict(found.tokens)
            tokens |= found.tokens
    check_distribution(base, prompt, list(tokens.values()))
    counters = engine.metrics.counters
    assert counters["drafted_tokens"] > counters["rejected_tokens"] > 0


def test_a_draft_model_that_is_mostly_wrong_is_left_alone(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_given_times(monkeypatch, DraftModel)
    other = save_checkpoint(tmp_path, hidden_size=48, num_hidden_layers=2)
    model = transformers.AutoModelForCausalLM.from_pretrained(other, dtype=torch.float32)
    with torch.no_grad():
        model.lm_head.weight.copy_(model.lm_head.weight.flip(0))
    model.save_pretrained(other)
    engine = engine_of(base, other)
    for n in range(2):
        engine.submit(ask(f"r{n}", [7 + n] * 9, max_tokens=200, temperature=1.0, seed=n), "g")
    run_until_idle(engine)
    assert 0 < engine.metrics.counters["drafted_tokens"] < 100  # of 400 tokens


def test_drafting_pays_only_where_it_is_cheap_and_right() -> None:
    flat = [(1.0, 0.010), (8.0, 0.011), (1032.0, 0.5)]  # weights are read once for all rows
    steep = [(1.0, 0.010), (8.0, 0.080), (1032.0, 10.0)]  # every token costs the same
    assert best_drafts([0.9], 1, 16, flat, 0.001) == (1, 6)
    assert best_drafts([0.9], 1, 16, flat, 0.012) == (0, 0)
    assert best_drafts([0.05], 1, 16, flat, 0.001) == (0, 0)
    assert best_drafts([0.9], 1, 16, steep, 0.001) == (0, 0)
    assert best_drafts([0.9], 1, 0, flat, 0.001) == (0, 0)
    size, count = best_drafts([0.9, 0.9, 0.02, 0.01], 4, 16, flat, 0.0005)
    assert size == 2 and count > 1
    share = Acceptance()
    for _ in range(40):
        share.record(0, 4)
    assert share.share < 0.1
    for _ in range(2000):
        share.rest(1)
    assert share.share > 0.6


def test_another_vocabulary_is_refused_by_name(base: Path, tmp_path: Path) -> None:
    other = save_checkpoint(tmp_path / "other", vocab_size=VOCAB + 5)
    with pytest.raises(
        ConfigError, match=r"another vocabulary than the model \(216 tokens, .* 211"
    ):
        engine_of(base, other)
    with pytest.raises(ConfigError, match="another vocabulary"):
        engine_of(MODEL_DIR, base)
    same_size = save_checkpoint(tmp_path / "same")
    content = {"model": {"vocab": {"a": 0, "b": 1}}, "added_tokens": []}
    (same_size / "tokenizer.json").write_text(json.dumps(content))
    mine = save_checkpoint(tmp_path / "mine")
    content["model"] = {"vocab": {"a": 0, "c": 1}}
    (mine / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(ConfigError, match="use a smaller model of the same tokenizer"):
        engine_of(mine, same_size)
    with pytest.raises(ConfigError, match="speculation is off: leave one of them out"):
        engine_of(base, base, speculation="off")
