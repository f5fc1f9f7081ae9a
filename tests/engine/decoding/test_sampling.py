"""Sampling: each parameter does what it says, and a row never depends on its neighbours."""

import math
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.batch import Row
from engine.decoding.sampling import Sampler, best_ids, host_samples
from engine.protocol import SamplingParams

VOCAB = 40
EOS = (2,)
CPU = torch.device("cpu")


def row(seq: int, history: list[int], prompt_len: int, choice: int = 0, **params: Any) -> Row:
    asked = SamplingParams(**({"max_tokens": 50} | params))
    last = len(history) - 1
    return Row(seq, history[-1:], last, [0], None, True, asked, choice, history, prompt_len)


def random_logits(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


def sample(rows: list[Row], logits: torch.Tensor) -> list[int]:
    return Sampler(VOCAB, EOS, CPU)(rows, logits.clone()).tokens.tolist()


def support(logits: torch.Tensor, draws: int = 400, **params: Any) -> set[int]:
    """The ids that come up for one row of logits over many seeds."""
    rows = [row(n, [5, 6], 2, seed=n, **params) for n in range(draws)]
    return set(sample(rows, logits.expand(draws, -1)))


@given(
    st.integers(1, 4), st.sampled_from([7, 128, 256, 300]), st.integers(0, 5), st.integers(0, 99)
)
@settings(max_examples=60)
def test_the_two_stage_maximum_is_the_first_greatest(
    rows: int, vocab: int, values: int, seed: int
) -> None:
    random = torch.Generator().manual_seed(seed)
    logits = torch.randint(0, values + 1, (rows, vocab), generator=random).float()
    assert best_ids(logits).tolist() == logits.argmax(-1).tolist()


@given(st.integers(0, 2**63), st.integers(0, 3), st.integers(0, 30))
@settings(max_examples=40)
def test_a_seed_draws_the_same_whatever_else_is_in_the_batch(
    seed: int, choice: int, neighbours: int
) -> None:
    logits = random_logits(neighbours + 1, seed % 1000)
    mine = row(1, [3, 4, 5], 2, choice, seed=seed, top_p=0.9)
    others = [
        row(n + 2, [n, 7], 1, temperature=0.3 * (n % 3), top_k=n % 5, min_p=0.1 * (n % 2))
        for n in range(neighbours)
    ]
    alone = sample([mine], logits[:1])
    moved = torch.cat((logits[1:], logits[:1]))
    assert sample([*others, mine], moved)[-1] == alone[0]


def test_choices_and_positions_draw_apart_and_unseeded_runs_differ() -> None:
    flat = torch.zeros(1, VOCAB)
    choices = [sample([row(1, [3], 1, choice, seed=9)], flat)[0] for choice in range(12)]
    positions = [sample([row(1, [3] * n, 1, seed=9)], flat)[0] for n in range(1, 13)]
    unseeded = [sample([row(1, [3], 1)], flat)[0] for _ in range(12)]
    assert all(len(set(drawn)) > 4 for drawn in (choices, positions, unseeded))


def test_draws_follow_the_distribution() -> None:
    logits = torch.log(torch.tensor([[0.5, 0.25, 0.125, 0.125] + [0.0] * (VOCAB - 4)]))
    count = 4000
    drawn = sample([row(n, [5], 1, seed=n) for n in range(count)], logits.expand(count, -1))
    shares = torch.bincount(torch.tensor(drawn), minlength=VOCAB)[:4] / count
    torch.testing.assert_close(shares, torch.tensor([0.5, 0.25, 0.125, 0.125]), atol=0.03, rtol=0)


def _kept(warper: Any, logits: torch.Tensor) -> set[int]:
    warped = warper(torch.zeros(1, 1, dtype=torch.long), logits.clone())
    return set(torch.isfinite(warped[0]).nonzero()[:, 0].tolist())


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("params", "warper"),
    [
        ({"top_k": 3}, transformers.TopKLogitsWarper(3)),
        ({"top_p": 0.7}, transformers.TopPLogitsWarper(0.7)),
        ({"min_p": 0.2}, transformers.MinPLogitsWarper(0.2)),
    ],
)
def test_truncation_keeps_what_transformers_keeps(
    params: dict[str, Any], warper: Any, seed: int
) -> None:
    logits = random_logits(1, seed) / 3
    assert support(logits, **params) == _kept(warper, logits)


def test_top_p_is_taken_of_what_top_k_leaves() -> None:
    shares = torch.tensor([0.4, 0.3, 0.2, 0.1] + [0.0] * (VOCAB - 4))
    # Of the best two, the first holds 4/7: half of the mass needs no more than it.
    assert support(torch.log(shares)[None], top_k=2, top_p=0.5) == {0}
    assert support(torch.log(shares)[None], top_p=0.5) == {0, 1}


def test_of_equal_logits_the_lower_ids_are_kept() -> None:
    """Also where they are more than the candidates that are sorted first."""
    assert support(torch.zeros(1, VOCAB), draws=60, top_k=3) == {0, 1, 2}
    assert support(torch.zeros(1, VOCAB), draws=60, top_p=0.05) == {0, 1}
    rows = [row(n, [5], 1, seed=n, top_k=2) for n in range(30)]
    drawn = Sampler(1000, EOS, CPU)(rows, torch.zeros(30, 1000)).tokens
    assert set(drawn.tolist()) == {0, 1}


def test_a_wide_nucleus_looks_beyond_the_first_candidates() -> None:
    vocab = 2000
    rows = [row(n, [5], 1, seed=n, top_p=0.9) for n in range(300)]
    sampler = Sampler(vocab, EOS, CPU)
    drawn = sampler(rows, torch.zeros(300, vocab)).tokens
    assert len(set(drawn.tolist())) > 200


def test_top_n_sigma_keeps_what_is_near_the_best() -> None:
    logits = random_logits(1, 2)
    floor = logits.max() - 1.0 * logits.std()
    expected = set((logits[0] >= floor).nonzero()[:, 0].tolist())
    assert support(logits, top_n_sigma=1.0, temperature=4.0, draws=900) == expected


def test_temperature_comes_before_truncation() -> None:
    shares = torch.tensor([0.6, 0.3, 0.1] + [0.0] * (VOCAB - 3))
    assert support(torch.log(shares)[None], top_p=0.85) == {0, 1}
    assert support(torch.log(shares)[None], top_p=0.85, temperature=0.5) == {0, 1}
    assert support(torch.log(shares)[None], top_p=0.75, temperature=0.5) == {0}


def test_penalties_are_their_definitions() -> None:
    history, prompt_len = [4, 9, 9, 4, 7, 7, 7], 3
    logits = random_logits(1, 3)
    asked = row(
        1,
        history,
        prompt_len,
        temperature=0.0,
        logprobs=VOCAB,
        repetition_penalty=1.5,
        frequency_penalty=0.4,
        presence_penalty=0.7,
        logit_bias={11: 6.0, 12: -100.0},
    )
    expected = logits[0].tolist()
    for token in set(history):
        expected[token] *= 1.5 if expected[token] < 0 else 1 / 1.5
    for token in set(history[prompt_len:]):
        expected[token] -= 0.7 + 0.4 * history[prompt_len:].count(token)
    expected[11] += 6.0
    expected[12] -= 100.0
    normal = torch.tensor(expected).log_softmax(-1)
    choice = Sampler(VOCAB, EOS, CPU)([asked], logits.clone())
    (found,) = host_samples([asked], choice)
    assert found.logprobs is not None
    (logprob,) = found.logprobs
    assert found.tokens == [int(normal.argmax())]
    assert logprob.logprob == pytest.approx(float(normal.max()), abs=1e-5)
    for token, value in logprob.top:
        assert value == pytest.approx(float(normal[token]), abs=1e-4)
    assert [value for _, value in logprob.top] == sorted((v for _, v in logprob.top), reverse=True)


def test_counts_follow_what_was_sampled_and_are_remade_after_preemption() -> None:
    sampler = Sampler(VOCAB, EOS, CPU)
    history = [5, 6]
    logits = torch.zeros(1, VOCAB)
    logits[0, 8], logits[0, 9] = 2.0, 1.9
    for expected in (8, 9, 8, 9):
        asked = row(1, history, 2, temperature=0.0, frequency_penalty=0.5)
        assert sampler([asked], logits.clone()).tokens.tolist() == [expected]
        history = [*history, expected]
    fresh = Sampler(VOCAB, EOS, CPU)
    asked = row(1, history, 2, temperature=0.0, frequency_penalty=0.5)
    assert fresh([asked], logits.clone()).tokens.tolist() == [8]


def test_no_end_before_min_tokens() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 2], logits[0, 3] = 9.0, 8.0
    params: dict[str, Any] = {"temperature": 0.0, "min_tokens": 2, "stop_token_ids": (3,)}
    early = sample([row(1, [5, 6, 7], 2, **params)], logits)
    late = sample([row(1, [5, 6, 7, 8], 2, **params)], logits)
    assert early[0] not in (2, 3)
    assert late == [2]


def test_logprobs_come_only_to_rows_that_ask() -> None:
    logits = random_logits(3, 4)
    rows = [
        row(1, [5], 1, temperature=0.0),
        row(2, [5], 1, temperature=0.0, logprobs=0),
        row(3, [5], 1, temperature=0.0, logprobs=2),
    ]
    found = host_samples(rows, Sampler(VOCAB, EOS, CPU)(rows, logits.clone()))
    assert found[0].logprobs is None
    first, second = (each.logprobs[0] for each in found[1:] if each.logprobs)
    assert math.isfinite(first.logprob) and first.top == ()
    assert len(second.top) == 2 and second.top[0] == (second.token, second.logprob)


def test_logits_that_are_not_numbers_give_no_id() -> None:
    broken = torch.full((3, VOCAB), float("nan"))
    rows = [
        row(1, [5], 1, temperature=0.0),
        row(2, [5], 1, seed=1),
        row(3, [5], 1, seed=1, top_p=0.5, min_p=0.1),
    ]
    assert sample(rows, broken) == [-1, -1, -1]


def test_hardly_any_temperature_is_greedy_and_finite() -> None:
    logits = random_logits(1, 6)
    assert support(logits, draws=5, temperature=1e-30) == {int(logits.argmax())}
    assert support(logits, draws=5, temperature=1e-4) == {int(logits.argmax())}
    assert math.isfinite(float(logits.max()))


def edited(
    history: list[int], prompt_len: int, logits: torch.Tensor, **params: Any
) -> torch.Tensor:
    """The log-probabilities that the sampler reports for one row: [VOCAB]."""
    asked = row(1, history, prompt_len, temperature=0.0, logprobs=VOCAB, **params)
    (found,) = host_samples([asked], Sampler(VOCAB, EOS, CPU)([asked], logits.clone()))
    values = torch.full((VOCAB,), -math.inf)
    assert found.logprobs is not None
    for token, value in found.logprobs[0].top:
        values[token] = value
    return values


HISTORY = [4, 9, 5, 4, 9, 7, 4, 9]


@pytest.mark.parametrize(
    ("params", "processor"),
    [
        ({"repetition_penalty": 1.4}, transformers.RepetitionPenaltyLogitsProcessor(1.4)),
        (
            {"bad_words": ((3,), (9, 5), (4, 9, 7), (9, 9, 8))},
            transformers.NoBadWordsLogitsProcessor([[3], [9, 5], [4, 9, 7], [9, 9, 8]], [2]),
        ),
        (
            {"logit_bias": {3: 4.0, 8: -2.5}},
            transformers.SequenceBiasLogitsProcessor({(3,): 4.0, (8,): -2.5}),
        ),
        (
            {"min_tokens": 5},
            transformers.MinNewTokensLengthLogitsProcessor(4, 5, list(EOS), device="cpu"),
        ),
        (
            {"allowed_token_ids": (1, 6, 33)},
            transformers.PrefixConstrainedLogitsProcessor(lambda *_: [1, 6, 33], 1),
        ),
    ],
    ids=["repetition", "bad words", "bias", "min tokens", "allowed"],
)
def test_changes_of_logits_are_those_of_transformers(
    params: dict[str, Any], processor: Any
) -> None:
    logits = random_logits(1, 7)
    expected = processor(torch.tensor([HISTORY]), logits.clone()).log_softmax(-1)[0]
    found = edited(HISTORY, 4, logits, **params)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("mass", [0.2, 0.6, 0.95])
def test_typical_keeps_what_transformers_keeps(mass: float) -> None:
    logits = random_logits(1, 11) / 3
    kept = _kept(transformers.TypicalLogitsWarper(mass), logits)
    assert support(logits, typical_p=mass, draws=900) == kept


def longest_repeat(history: list[int], place: int) -> int:
    """How many ids before `place` equal the last ones, counted one by one."""
    count = 0
    while count < place and history[place - 1 - count] == history[-1 - count]:
        count += 1
    return count


@given(st.lists(st.integers(3, 6), min_size=1, max_size=30))
@settings(max_examples=60)
def test_dry_penalises_the_continuation_of_the_longest_repeat(history: list[int]) -> None:
    logits = torch.zeros(1, VOCAB)
    expected = torch.zeros(VOCAB)
    for token in set(history):
        repeats = [longest_repeat(history, n) for n, t in enumerate(history) if t == token]
        if max(repeats) >= 2:
            expected[token] = -0.8 * 1.75 ** (max(repeats) - 2)
    found = edited(history, 1, logits, dry_multiplier=0.8)
    torch.testing.assert_close(found, expected.log_softmax(-1), atol=1e-3, rtol=1e-4)


def test_dry_does_not_reach_across_breakers() -> None:
    history = [11, 5, 12, 13, 11, 5, 12]
    with_breaker = edited(history, 1, torch.zeros(1, VOCAB), dry_multiplier=1.0, dry_breakers=(5,))
    without = edited(history, 1, torch.zeros(1, VOCAB), dry_multiplier=1.0)
    assert int(without.argmin()) == 13 and without.unique().numel() == 2
    assert with_breaker.unique().numel() == 1


@given(st.lists(st.integers(3, 6), min_size=1, max_size=30))
@settings(max_examples=40)
def test_the_lz_penalty_is_what_the_code_saves(history: list[int]) -> None:
    expected = torch.zeros(VOCAB)
    for place, token in enumerate(history):
        length, distance = longest_repeat(history, place) + 1, len(history) - place
        cost = (math.log(distance) + math.log(length)) / length
        saved = max(0.0, math.log(VOCAB) - cost)
        expected[token] = min(float(expected[token]), -0.3 * saved)
    found = edited(history, 1, torch.zeros(1, VOCAB), lz_penalty=0.3)
    torch.testing.assert_close(found, expected.log_softmax(-1), atol=1e-4, rtol=1e-4)


def test_an_endless_repeat_ends_with_dry_or_lz() -> None:
    """A model that prefers to repeat 7 8 9 for ever."""
    for params in ({"dry_multiplier": 2.0}, {"lz_penalty": 2.0}):
        history = [7, 8, 9] * 3
        for _ in range(12):
            logits = torch.zeros(1, VOCAB)
            logits[0, 7 + (history[-1] - 6) % 3] = 4.0
            history.append(sample([row(1, history, 3, temperature=0.0, **params)], logits)[0])
        assert history[-6:] != [7, 8, 9] * 2


def test_rows_of_all_kinds_do_not_touch_each_other() -> None:
    kinds: list[dict[str, Any]] = [
        {"dry_multiplier": 1.0}, {"lz_penalty": 0.5}, {"bad_words": ((4, 9), (6,))},
        {"allowed_token_ids": (4, 8, 12)}, {"logit_bias": {9: 3.0}}, {"min_tokens": 9},
        {"repetition_penalty": 1.3, "presence_penalty": 0.4}, {"typical_p": 0.4}, {"top_k": 4}, {},
    ]  # fmt: skip
    rows = [row(n, HISTORY, 4, seed=n, **params) for n, params in enumerate(kinds)]
    logits = random_logits(len(rows), 12)
    alone = [sample([each], logits[n : n + 1])[0] for n, each in enumerate(rows)]
    assert sample(rows, logits) == alone
    assert sample(rows[::-1], logits.flip(0)) == alone[::-1]
