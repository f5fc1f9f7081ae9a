"""The compiled mixture of experts beside its formula in torch, and each row's bits as alone."""

from typing import Any

import pytest
import torch

from engine.backends.compiled import linear as dense
from engine.backends.layers.experts import Mixture, Mlp
from engine.backends.layers.routing import Router
from engine.model_spec import ExpertsSpec

_DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def drawn(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def spec_of(count: int, active: int, **changes: Any) -> ExpertsSpec:
    return ExpertsSpec(
        count=count, active=active, intermediate=50, layers=frozenset({0}), **changes
    )


def ranked(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, spec: ExpertsSpec
) -> tuple[torch.Tensor, torch.Tensor]:
    """Shares and numbers, by the formula of Mixtral and Qwen."""
    scores = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    shares, chosen = torch.softmax(scores, -1).float().topk(spec.active, -1)
    if spec.normed:
        shares = shares / shares.sum(-1, keepdim=True)
    return (shares * spec.factor).to(x.dtype), chosen


@_DTYPES
@pytest.mark.parametrize("hidden", [7, 64, 70])
@pytest.mark.parametrize("count, active", [(1, 1), (6, 2), (128, 8)])
@pytest.mark.parametrize("normed, factor, biased", [(True, 1.0, False), (False, 2.5, True)])
def test_a_router_ranks_by_its_formula(
    level: str, dtype: torch.dtype, *, hidden: int, count: int, active: int,
    normed: bool, factor: float, biased: bool,
) -> None:  # fmt: skip
    spec = spec_of(count, active, normed=normed, factor=factor)
    weight, bias = drawn(count, hidden), drawn(count, seed=3) if biased else None
    router, x = Router(spec, weight, bias), drawn(33, hidden, seed=2).to(dtype)
    assert router.compiled is not None
    shares, chosen = router(x)
    expected = ranked(x, weight, bias, spec)
    assert torch.equal(chosen, expected[1])
    torch.testing.assert_close(shares, expected[0])
    alone = [router(row) for row in x.split(1)]
    assert torch.equal(torch.cat([share for share, _ in alone]), shares)
    strided = torch.cat((x, x), 1)[:, :hidden]
    assert torch.equal(router(strided)[0], shares)


def test_of_equal_scores_the_first_expert_is_chosen(level: str) -> None:
    router = Router(spec_of(5, 3), torch.zeros(5, 8))
    shares, chosen = router(drawn(2, 8))
    assert chosen.tolist() == [[0, 1, 2]] * 2
    torch.testing.assert_close(shares, torch.full((2, 3), 1 / 3))


def test_a_row_that_is_not_a_number_has_experts_all_the_same(level: str) -> None:
    router, x = Router(spec_of(5, 2), drawn(5, 8)), drawn(3, 8, seed=2)
    good = router(x)[1]
    x[1, 3] = float("nan")
    shares, chosen = router(x)
    assert chosen[[0, 2]].tolist() == good[[0, 2]].tolist()
    assert shares[1].isnan().all() and len(set(chosen[1].tolist())) == 2
    assert all(0 <= number < 5 for number in chosen[1].tolist())


@_DTYPES
@pytest.mark.parametrize("rows", [1, 9, 100])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_mixture_adds_up_its_experts(
    level: str, dtype: torch.dtype, rows: int, threads: int
) -> None:
    """Beside each expert's products in float64; and one expert after the other, as beside adapters
    within experts, gives the same bits."""
    hidden, inner, spec = 96, 50, spec_of(7, 3)
    weights = [
        (drawn(2 * inner, hidden, seed=5 + n) / 10, drawn(hidden, inner, seed=50 + n) / 7)
        for n in range(spec.count)
    ]
    weights = [(one.to(dtype), two.to(dtype)) for one, two in weights]
    weight = drawn(spec.count, hidden)
    experts = [Mlp(dense.RowGatedLinear(one), dense.RowLinear(two)) for one, two in weights]
    mixture = Mixture(Router(spec, weight), experts, None, spec.active)
    assert mixture.compiled is not None
    x, before = drawn(rows, hidden, seed=2).to(dtype), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = mixture(x, "silu")
    finally:
        torch.set_num_threads(before)
    shares, chosen = ranked(x, weight, None, spec)
    expected = torch.zeros(rows, hidden, dtype=torch.float64)
    for row in range(rows):
        for share, number in zip(shares[row].double(), chosen[row].tolist(), strict=True):
            gate, up = (weights[number][0].double() @ x[row].double()).chunk(2)
            inside = torch.nn.functional.silu(gate) * up
            expected[row] += share * (weights[number][1].double() @ inside)
    near = {"rtol": 0.02, "atol": 0.03} if dtype is torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-4}
    torch.testing.assert_close(found.double(), expected, **near)
    assert list(mixture.rows) == torch.bincount(chosen.flatten(), minlength=7).tolist()
    assert torch.equal(torch.cat([mixture(row, "silu") for row in x.split(1)]), found)
    mixture.compiled = None
    assert torch.equal(mixture(x, "silu"), found)
