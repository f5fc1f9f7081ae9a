"""Guessed tokens change no answer and no count: right ones, wrong ones, with adapters, grammars and
sampling, in both loops. The guesses here come from the answers themselves, spoilt at random, so that
the engine meets every mixture of right and wrong ones."""

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.batch import Row
from engine.decoding.sampling import Sampler, host_samples
from engine.loop import Engine
from engine.protocol import GenerateRequest, SamplingParams
from engine.scheduling.sequence import Sequence
from engine.speculation.verify import sampled_rows, verified
from tests.engine.checkpoints import VOCAB, save_adapter, save_checkpoint
from tests.engine.decoding.test_grammars import constrained, make
from tests.engine.helpers import ask, make_config, make_engine, reference, run_until_idle
from tests.engine.models.test_engine_parity import make_real
from tests.engine.scheduling.test_overlap import overlapped
from tests.engine.scheduling.test_overlap import run as run_arrivals
from tests.engine.test_fuzz import Storm, check_answers, check_counts

Answer = Callable[[Sequence], list[int]]  # everything that the sequence will say


def guess_from(engine: Engine, answer: Answer, dice: random.Random, wrong: float = 0.3) -> None:
    """Replace the engine's guesses by the coming tokens of the answer, some of them wrong."""

    def guesses(decoding: list[Sequence], room: int, _: float | None) -> dict[int, list[int]]:
        found = {}
        for seq in decoding:
            at = seq.output_len + seq.pending
            params = seq.request.inputs.sampling
            left = min(
                params.max_tokens - at - 1, seq.request.limit - seq.prompt_len - at - 1, room
            )
            ids = answer(seq)[at : at + dice.randrange(0, 7)][: max(0, left)]
            ids = [(t + 1) % VOCAB if dice.random() < wrong else t for t in ids]
            room -= len(ids)
            if ids:
                found[seq.number] = ids
        return found

    engine.scheduler.speculation.guesses = guesses  # type: ignore[method-assign]


def reference_of(seq: Sequence) -> list[int]:
    return reference(seq.request.inputs, seq.choice, seq.request.inputs.sampling.max_tokens)


@pytest.mark.parametrize("seed", range(7))
def test_no_answer_or_count_changes_in_a_storm(seed: int, tmp_path: Path) -> None:
    """Under preemption, aborts, deadlines, forks, adapter churn and cache hits, in both loops."""
    storm = Storm(seed, tmp_path)
    guess_from(storm.engine, reference_of, storm.dice)
    storm.run(100)
    check_answers(storm)
    check_counts(storm)
    counters = storm.engine.metrics.counters
    assert seed or counters["drafted_tokens"] > counters["rejected_tokens"] > 0


def test_wrong_guesses_leave_nothing_in_the_prefix_cache() -> None:
    engine = make_engine(make_config(num_blocks=256))
    guess_from(engine, reference_of, random.Random(1), wrong=1.0)
    request = ask("first", [7] * 9, max_tokens=40)
    engine.submit(request, "g")
    found = run_until_idle(engine)
    said = found.tokens["first", 0]
    receipt = found.receipts["first"]
    assert said == reference(request, 0, 40)
    assert receipt.rejected == engine.metrics.counters["drafted_tokens"] > 40
    assert (receipt.generated, receipt.delivered, receipt.discarded) == (40, 40, 0)
    again = ask("again", [*request.prompt, *said[:30], 5], max_tokens=20)
    engine.submit(again, "g")
    found = run_until_idle(engine)
    assert found.receipts["again"].cached == 36  # every full block of what was said
    assert found.tokens["again", 0] == reference(again, 0, 20)


def test_right_guesses_save_steps_and_are_counted_once() -> None:
    engine = make_engine(make_config(num_blocks=256))
    guess_from(engine, reference_of, random.Random(2), wrong=0.0)
    engine.submit(ask("r", [7] * 9, max_tokens=60), "g")
    found = run_until_idle(engine)
    receipt = found.receipts["r"]
    assert (receipt.generated, receipt.rejected, receipt.discarded) == (60, 0, 0)
    assert engine.metrics.counters["steps"] == 60 - engine.metrics.counters["drafted_tokens"] < 40


def test_an_end_among_the_guesses_discards_the_rest() -> None:
    alone = reference(ask("r", [9] * 5), 0, 24)
    stop = alone[10]
    end = alone.index(stop) + 1
    engine = make_engine(make_config(num_blocks=256))
    guess_from(engine, lambda seq: alone, random.Random(2), wrong=0.0)
    engine.submit(ask("r", [9] * 5, max_tokens=24, stop_token_ids=(stop,)), "g")
    found = run_until_idle(engine)
    assert found.tokens["r", 0] == alone[:end]
    receipt = found.receipts["r"]
    assert receipt.generated == end
    counters = engine.metrics.counters
    assert counters["discarded_tokens"] == receipt.discarded


def test_the_others_have_a_row_in_every_step_of_the_overlapped_loop() -> None:
    engine, device = overlapped()
    requests = {at: ask(f"r{at}", [at + 3] * 6, max_tokens=30) for at in (0, 1)}
    dice = random.Random(5)
    guess_from(engine, lambda s: reference_of(s) if s.number == 1 else [], dice, wrong=0.1)
    found = run_arrivals(engine, requests)
    for request in requests.values():
        assert found.tokens[request.request_id, 0] == reference(request, 0, 30)
    other = [any(row.seq == 2 for row in batch.rows) for batch in device.batches]
    assert sum(other) == 30
    assert all(other[other.index(True) : other.index(True) + 30])
    assert device.idle_s == 0.0
    guessing = [any(row.seq == 1 for row in batch.rows) for batch in device.batches]
    assert sum(guessing) < 20


def test_a_real_model_says_the_same(tmp_path: Path) -> None:
    """Greedy and sampled tokens, their log-probabilities, adapters and processors."""
    checkpoint = save_checkpoint(tmp_path / "base")
    adapters = [save_adapter(checkpoint, tmp_path / f"a{r}", r, seed=r) for r in (2, 5)]
    settings = {"num_blocks": 120, "max_batch_tokens": 64, "speculation": "off"}
    plain, digests = make_real(checkpoint, adapters, **settings)
    dice = random.Random(4)
    kinds: list[dict[str, object]] = [
        {}, {"temperature": 0.9, "seed": 5, "top_k": 20}, {"logprobs": 2},
        {"dry_multiplier": 2.0, "temperature": 0.7, "seed": 6},
        {"bad_words": ((5, 6), (9,)), "lz_penalty": 0.3}, {"min_tokens": 9, "ignore_eos": False},
        {"n": 2, "temperature": 1.0, "seed": 8, "typical_p": 0.9},
        {"frequency_penalty": 0.5},
    ]  # fmt: skip
    asks: list[GenerateRequest] = [
        ask(
            f"r{n}", [dice.randrange(3, VOCAB) for _ in range(dice.randrange(1, 30))],
            max_tokens=24, adapter=dice.choice([None, *digests]), **kind,
        )
        for n, kind in enumerate(kinds * 2)
    ]  # fmt: skip
    for one in asks:
        plain.submit(one, "g")
    expected = run_until_idle(plain)
    guessing, _ = make_real(checkpoint, adapters, **settings)
    guess_from(
        guessing,
        lambda s: (
            expected.tokens[s.request.inputs.request_id, s.choice]
            if not s.request.inputs.sampling.frequency_penalty
            else []
        ),
        dice,
    )
    for one in asks:
        guessing.submit(one, "g")
    found = run_until_idle(guessing)
    assert found.tokens == expected.tokens
    assert found.reasons == expected.reasons
    counters = guessing.metrics.counters
    assert counters["drafted_tokens"] > counters["rejected_tokens"] > 0
    assert counters["steps"] < plain.metrics.counters["steps"]


@pytest.mark.parametrize("overlap", [False, True])
def test_grammars_end_where_they_end_without_guesses(overlap: bool) -> None:
    """Also where the grammar's last token is among the guesses, and a guess follows it."""
    schema = (
        '{"type":"array","items":{"type":"integer","minimum":0,"maximum":9},'
        '"minItems":3,"maxItems":5}'
    )
    asks = [
        constrained("a", "json_schema", schema, temperature=0.0),
        constrained("b", "regex", "(ab|ac){3}d"),
        constrained("c", "choice", ["red wine", "red water"]),
    ]
    plain = make(speculation="off", overlap=overlap)
    for one in asks:
        plain.submit(one, "g")
    expected = run_until_idle(plain)
    guessing = make(speculation="off", overlap=overlap)
    guess_from(
        guessing,
        lambda s: [*expected.tokens[s.request.inputs.request_id, 0], 7, 8, 9],
        random.Random(3),
        wrong=0.4,
    )
    for one in asks:
        guessing.submit(one, "g")
    found = run_until_idle(guessing)
    assert (found.tokens, found.reasons) == (expected.tokens, expected.reasons)
    counters = guessing.metrics.counters
    assert counters["drafted_tokens"] > counters["rejected_tokens"] > 0


def test_sampled_answers_follow_the_models_distribution() -> None:
    """Rejection sampling: chi-square of pairs of tokens over a known distribution, with a guess that is
    right now and then."""
    vocab, runs = 6, 8_000
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(2, vocab, generator=generator)
    first, second = np.asarray(torch.softmax(logits / 0.8, -1), np.float64)
    guess = int(first.argmax())
    sampler = Sampler(vocab, (), torch.device("cpu"))
    pairs = np.zeros((vocab, vocab))
    rejected = np.zeros(vocab)
    base = SamplingParams(max_tokens=9, temperature=0.8)
    for run in range(runs):
        row = Row(1, [4, guess], 3, [0], None, True, replace(base, seed=run), 0, [1] * 4, 3, 1)
        rows = sampled_rows(row, 4)
        [found] = verified([row], host_samples(rows, sampler(rows, logits.clone())))
        if len(found.tokens) == 2:
            pairs[found.tokens[0], found.tokens[1]] += 1
        else:
            rejected[found.tokens[0]] += 1
    assert pairs.sum() == pairs[guess].sum()
    observed = np.append(np.delete(rejected, guess), pairs[guess])
    expected = runs * np.append(np.delete(first, guess), first[guess] * second)
    statistic = ((observed - expected) ** 2 / expected).sum()
    assert (
        statistic < 31.3
    )  # 0.1 % of the chi-square distribution of 10 degrees of freedom is above
    assert rejected[guess] == 0
