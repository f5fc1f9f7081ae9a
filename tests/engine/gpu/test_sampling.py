"""The kernel that samples: the choice of its torch reference, bit for bit, and what `transformers`
keeps."""

import math
from typing import Any

import pytest
import torch
import transformers
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from engine.decoding.truncation import without_rare
from engine.protocol import SamplingParams
from tests.engine.gpu.device import DEVICE

launch = pytest.importorskip("engine.decoding.sampler.launch")
reference = pytest.importorskip("engine.decoding.sampler.reference")

INF = math.inf
LAST_UNIFORM = 1 - 2.0**-52


def random(rows: int, vocab: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def asked(**fields: Any) -> SamplingParams:
    return SamplingParams(max_tokens=9, **fields)


def sampled(
    logits: torch.Tensor, params: list[SamplingParams], uniforms: list[float], block: int = 64
) -> list[int]:
    """What the kernel chooses; what it keeps for the next step is checked."""
    count = len(params)
    last = launch.LastTokens(
        torch.full((count + 2,), 77, device=DEVICE),
        torch.arange(count, 0, -1, dtype=torch.int32, device=DEVICE),
    )
    tokens: list[int] = launch.sample(logits, params, uniforms, last, block).tolist()
    kept = last.tokens.tolist()
    assert kept == [77, *(max(0, token) for token in reversed(tokens)), 77]
    return tokens


@st.composite
def rows(draw: st.DrawFn) -> tuple[torch.Tensor, list[SamplingParams], list[float]]:
    """Rows with ties, excluded ids and logits that are not finite."""
    count = draw(st.integers(1, 2))
    vocab = draw(st.sampled_from([1, 2, 7, 63, 64, 65, 200]))
    logits = random(count, vocab, draw(st.integers(0, 99))) * draw(
        st.sampled_from([0.1, 3.0, 20.0])
    )
    step = draw(st.sampled_from([0.0, 0.5, 4.0]))
    if step:
        logits = (logits / step).round() * step
    for value in draw(
        st.lists(st.sampled_from([-INF, INF, math.nan, 1e30, -1e30, -0.0]), max_size=3)
    ):
        logits[draw(st.integers(0, count - 1)), draw(st.integers(0, vocab - 1))] = value
    logits = logits.to(draw(st.sampled_from([torch.float32, torch.bfloat16])))
    params = [
        asked(
            temperature=draw(st.sampled_from([0.0, 1e-6, 1e-4, 0.7, 1.0, 5.0])),
            top_k=draw(st.sampled_from([0, 0, 1, 2, 30, 1000])),
            top_p=draw(st.sampled_from([1.0, 1e-9, 0.25, 0.5, 0.9, 1 - 1e-9])),
            min_p=draw(st.sampled_from([0.0, 0.0, 0.05, 1.0])),
        )
        for _ in range(count)
    ]
    number = st.one_of(st.sampled_from([0.0, 0.5, LAST_UNIFORM]), st.floats(0, LAST_UNIFORM))
    return logits, params, [draw(number) for _ in range(count)]


@given(rows())
@settings(max_examples=25, deadline=None)
def test_the_choice_is_that_of_the_reference(
    given_rows: tuple[torch.Tensor, list[SamplingParams], list[float]],
) -> None:
    expected = reference.sample_reference(*given_rows).tolist()
    assert sampled(*given_rows) == expected


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"top_p": 0.9},
        {"top_k": 400, "top_p": 0.95, "min_p": 0.001},
    ],
    ids=str,
)
def test_the_vocabulary_of_a_large_model(fields: dict[str, Any]) -> None:
    """Of 128,001 ids, in bfloat16, of which many are equal."""
    logits = (random(2, 128_001, 3) * 3).bfloat16()
    given_rows = logits, [asked(**fields)] * 2, [0.3, 0.98]
    expected = reference.sample_reference(*given_rows).tolist()
    assert sampled(*given_rows, block=4096) == expected
    assert len(set(expected)) == 2


def warped(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """What `transformers` leaves, as probabilities in float64: [vocab]."""
    scores = transformers.TemperatureLogitsWarper(params.temperature)(None, logits[None].double())
    if params.min_p > 0:
        scores = transformers.MinPLogitsWarper(params.min_p)(None, scores)
    if params.top_k > 0:
        scores = transformers.TopKLogitsWarper(params.top_k)(None, scores)
    if params.top_p < 1:
        scores = transformers.TopPLogitsWarper(params.top_p)(None, scores)
    left: torch.Tensor = scores[0].softmax(-1)
    return left


@given(
    seed=st.integers(0, 999),
    temperature=st.floats(0.2, 3),
    top_k=st.sampled_from([0, 1, 7, 40]),
    top_p=st.sampled_from([1.0, 0.3, 0.77, 0.99]),
    min_p=st.sampled_from([0.0, 0.04, 0.5]),
    uniform=st.floats(0, 0.999),
)
@settings(max_examples=20, deadline=None)
def test_the_choice_is_one_of_what_transformers_leaves(
    seed: int, temperature: float, top_k: int, top_p: float, min_p: float, uniform: float
) -> None:
    """And it is the one at which the cumulated probabilities exceed the random number."""
    logits = random(1, 150, seed) * 2
    params = asked(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    sums = warped(logits[0].cpu(), params).cumsum(-1)
    assume(float((sums - uniform).abs().min()) > 1e-5)
    expected = int((sums <= uniform).sum())
    assert sampled(logits, [params], [uniform]) == [expected]


def support(logits: list[float], **fields: Any) -> set[int]:
    row = torch.tensor([logits], device=DEVICE)
    return {sampled(row, [asked(**fields)], [n / 4])[0] for n in range(4)}


def test_of_equal_logits_the_lower_ids_are_kept() -> None:
    equal = [1.0, 2.0, 1.0, 2.0, 1.0, 1.0]
    assert support(equal, top_k=1) == {1}
    assert support(equal, top_k=3) == {0, 1, 3}
    assert support([0.0] * 4, top_p=0.5) == {0, 1}
    assert support([0.0] * 4, top_p=0.51) == {0, 1, 2}
    assert support([0.0, -0.0, 0.0], top_k=2) == {0, 1}
    # Top-p is taken of what top-k leaves of equal ids.
    assert support([0.0] * 8, top_k=4, top_p=0.5) == {0, 1}


def test_a_row_that_is_not_finite_gives_no_id_and_its_neighbours_theirs() -> None:
    logits = torch.zeros(5, 9, device=DEVICE)
    logits[:, 4] = 50.0
    logits[0, 8], logits[1, 0], logits[2] = math.nan, INF, -INF
    logits[3, :4] = -INF
    for fields in ({"temperature": 0.0}, {}, {"top_p": 0.5}, {"top_k": 2, "min_p": 0.1}):
        assert sampled(logits, [asked(**fields)] * 5, [0.5] * 5) == [-1, -1, -1, 4, 4]


@pytest.mark.parametrize("fields", [{"typical_p": 0.4}, {"top_n_sigma": 0.7}], ids=str)
def test_rare_truncations_come_before_the_kernel(fields: dict[str, Any]) -> None:
    logits = random(1, 60, 5)
    params = asked(top_p=0.8, temperature=1.5, **fields)
    both = [logits, logits]
    greedy = asked(temperature=0.0, **fields)
    narrowed = without_rare(torch.cat(both), [greedy, params])
    assert torch.equal(narrowed[:1], logits) and narrowed[1].isinf().any()
    for n in range(12):
        expected = reference.sample_reference(logits, [params], [n / 12]).tolist()
        assert sampled(narrowed, [greedy, params], [0.0, n / 12])[1:] == expected


def test_the_exponential_is_exact_to_its_rounding() -> None:
    gaps = torch.linspace(-23.0, 0.0, 100_001)
    found, expected = reference.exponential_reference(gaps).double(), gaps.double().exp()
    # log2(e) is rounded by 2^-26 of itself, and its product by 2^-24.
    assert ((found - expected).abs() <= expected * (2e-7 + 8e-8 * gaps.abs())).all()
    at_ends = reference.exponential_reference(torch.tensor([0.0, -INF]))
    assert at_ends[0] == 1 and at_ends[1] < 2.0**-34
