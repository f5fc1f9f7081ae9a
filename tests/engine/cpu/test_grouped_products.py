"""Products grouped by expert: torch's of one expert after the other, and a row's bits as alone."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from engine.backends.compiled import linear as dense
from engine.backends.compiled.mixture import CompiledMixture
from engine.backends.layers.experts import Mixture, Mlp
from engine.backends.layers.linear import DenseGatedLinear, DenseLinear
from engine.backends.layers.routing import Router
from engine.model_spec import ExpertsSpec
from engine.models import linears
from tests.engine.driver import Driver
from tests.engine.models.test_experts import save_checkpoint, some_ids

_HIDDEN, _INNER, _EXPERTS, _ACTIVE = 70, 50, 6, 2


def both(dtype: torch.dtype) -> tuple[Mixture, Mixture]:
    """The same experts, over torch's products and over the compiled ones. One has no rows: its router
    never chooses it."""
    draw = torch.Generator().manual_seed(1)

    def _drawn(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=draw) * shape[-1] ** -0.5).to(dtype)

    pairs = [(_drawn(2 * _INNER, _HIDDEN), _drawn(_HIDDEN, _INNER)) for _ in range(_EXPERTS)]
    bias = torch.zeros(_EXPERTS)
    bias[3] = -100.0
    spec = ExpertsSpec(count=_EXPERTS, active=_ACTIVE, intermediate=_INNER, layers=frozenset({0}))
    router = Router(spec, _drawn(_EXPERTS, _HIDDEN).float(), bias)
    plain = [Mlp(DenseGatedLinear(one.clone()), DenseLinear(two.clone())) for one, two in pairs]
    grouped = [Mlp(dense.RowGatedLinear(one), dense.RowLinear(two)) for one, two in pairs]
    return Mixture(router, plain, None, _ACTIVE), Mixture(router, grouped, None, _ACTIVE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [1, 5, 90])
def test_groups_are_computed_as_one_expert_after_the_other(
    level: str, rows: int, dtype: torch.dtype
) -> None:
    plain, grouped = both(dtype)
    x = torch.randn(rows, _HIDDEN, generator=torch.Generator().manual_seed(2)).to(dtype)
    near = {"rtol": 0.03, "atol": 0.03} if dtype is torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-5}
    for activation in ("silu", "gelu_tanh"):
        found = grouped(x, activation)
        torch.testing.assert_close(found, plain(x, activation), **near)
        assert torch.equal(torch.cat([grouped(row, activation) for row in x.chunk(rows)]), found)
    assert grouped.rows[3] == 0 and sum(grouped.rows) == 4 * rows * _ACTIVE


def test_a_served_mixture_is_grouped_where_that_is_fast(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kernel: Any
) -> None:
    """In bfloat16, where the processor multiplies it; its logits are those of torch's products."""
    if kernel.instructions() not in dense.PAIRED:
        pytest.skip("this processor does not multiply bfloat16")
    checkpoint, ids = save_checkpoint(tmp_path), some_ids(40)
    calls: list[int] = []
    mixed = CompiledMixture.__call__

    def _counted(mixture: CompiledMixture, *given: Any) -> torch.Tensor:
        calls.append(1)
        return mixed(mixture, *given)

    monkeypatch.setattr(CompiledMixture, "__call__", _counted)
    tokens = []
    for fast in (dense.is_fast, lambda weight, few_rows: False):
        monkeypatch.setattr(linears, "is_fast", fast)
        driver = Driver(checkpoint, dtype="bfloat16")
        sequence = driver.sequence(ids)
        driver.run([sequence], count=1)
        tokens.append(sequence.output)
        assert calls, "the first of the two is grouped"
    layers = driver.runner._model.spec.layers
    assert len(calls) == layers
    assert tokens[0] == tokens[1]


def test_silu_of_large_values_is_finite(level: str) -> None:
    values = torch.tensor([[-1e4, -90.0, -1.0, 0.0, 1.0, 90.0, 1e4]])
    torch.testing.assert_close(
        dense.activate_(values.clone(), "silu"), F.silu(values), rtol=1e-6, atol=1e-6
    )
