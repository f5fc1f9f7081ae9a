"""Rows that may sample few ids are drawn from the logits of these alone: the ids are the same."""

import random
from typing import Any

import numpy as np
import pytest
import torch

from engine.decoding import few
from engine.decoding.few import few_ids
from engine.decoding.masks import exclude_, mask_of
from engine.decoding.truncation import draw
from engine.protocol import SamplingParams
from tests.engine.decoding.test_grammars import SCHEMAS, constrained, make
from tests.engine.helpers import ask, run_until_idle

KINDS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.6, "top_p": 0.7},
    {"top_k": 3},
    {"top_k": 40, "top_p": 0.5, "min_p": 0.05},
    {"temperature": 1.7, "min_p": 0.2},
]
OTHERS: list[dict[str, Any]] = [{"typical_p": 0.7}, {"top_n_sigma": 1.0}, {"temperature": 0.0}]


def sets_of_ids(vocab: int, seed: int) -> list[list[int]]:
    draws = random.Random(seed)
    sizes = [0, 1, 2, vocab // 16, vocab // 16 + 1, vocab // 2, vocab, 3, 7, 1]
    return [sorted(draws.sample(range(vocab), size)) for size in sizes]


@pytest.mark.parametrize("vocab", [64, 75, 1000, 2048])
def test_listed_ids_are_those_of_the_masks(vocab: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(few, "_WORTH", 1)
    allowed = sets_of_ids(vocab, 3)
    masks = np.stack([mask_of(ids, vocab) for ids in allowed])
    index = [2 * n + 1 for n in range(len(allowed))]
    found = few_ids(masks, index, vocab)
    assert found is not None
    expected = {2 * n + 1: ids for n, ids in enumerate(allowed) if 0 < len(ids) <= vocab // 16}
    listed = [ids[~out].tolist() for ids, out in zip(found.ids, found.filler, strict=True)]
    assert dict(zip(found.rows, listed, strict=True)) == expected
    assert few_ids(masks[:1], [0], vocab) is None  # no row allows few
    monkeypatch.setattr(few, "_WORTH", len(expected) * vocab + 1)
    assert few_ids(masks, index, vocab) is None


@pytest.mark.parametrize("seed", range(20))
def test_few_ids_are_drawn_as_from_the_whole_vocabulary(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where logits are equal, and beside rows that are left to the others."""
    monkeypatch.setattr(few, "_WORTH", 1)
    vocab, numbers = 512, random.Random(seed)
    allowed = sets_of_ids(vocab, seed)
    masks = np.stack([mask_of(ids, vocab) for ids in allowed])
    logits = torch.randn(len(allowed), vocab, generator=torch.Generator().manual_seed(seed)) * 4
    logits = logits.round() if seed % 2 else logits
    exclude_(logits, list(range(len(allowed))), masks)
    kinds = [numbers.choice(KINDS + OTHERS) for _ in allowed]
    params = [SamplingParams(max_tokens=5, **({"temperature": 1.0} | each)) for each in kinds]
    uniforms = [numbers.random() for _ in allowed]
    listed = few_ids(masks, list(range(len(allowed))), vocab)
    assert listed is not None
    rows, found = listed.drawn(logits, params, uniforms)
    assert rows == [n for n in listed.rows if kinds[n] not in OTHERS]
    for n, token in zip(rows, found.tolist(), strict=True):
        assert token == draw(logits[n : n + 1], [params[n]], [uniforms[n]])[0]
        assert token in allowed[n]


def test_rows_that_are_all_left_to_the_others_are_not_drawn() -> None:
    ids = torch.tensor([[3, 4]])
    listed = few.FewIds([0], ids, torch.zeros_like(ids, dtype=torch.bool))
    greedy = SamplingParams(max_tokens=5, temperature=0.0)
    rows, found = listed.drawn(torch.zeros(1, 64), [greedy], [0.5])
    assert rows == [] and found.tolist() == []


def test_answers_are_the_same_with_and_without_listed_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    answers, used, drawn = [], 0, few.FewIds.drawn

    def counted(self: few.FewIds, *given: Any) -> Any:
        nonlocal used
        rows, found = drawn(self, *given)
        used += len(rows)
        return rows, found

    monkeypatch.setattr(few.FewIds, "drawn", counted)
    for worth in (1 << 60, 1):
        monkeypatch.setattr(few, "_WORTH", worth)
        engine = make(speculation="off")
        engine._runner._patience_s = None
        for n, kind in enumerate(KINDS + OTHERS):
            changes = {"temperature": 1.0, "logprobs": 2 if n == 1 else None} | kind
            engine.submit(constrained(str(n), "json_schema", SCHEMAS[n % 6], 40, **changes), "g")
        engine.submit(ask("free", [5, 6, 7], 40), "g")
        found = run_until_idle(engine)
        answers.append(found.tokens)
        assert (used > 20) == (worth == 1)
    assert answers[0] == answers[1]


def test_a_row_whose_logits_are_not_finite_gets_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if those of the few ids are."""
    monkeypatch.setattr(few, "_WORTH", 1)
    engine = make(speculation="off")
    runner = engine._runner
    model = runner._model.decoder

    def spoiled(*given: Any) -> torch.Tensor:
        logits = model(*given)
        logits[:, 0] = float("nan")
        return logits

    runner._model = type(
        "Spoiled", (), {"decoder": staticmethod(spoiled), "spec": runner._model.spec}
    )()
    engine.submit(constrained("x", "choice", ["a", "b"], temperature=1.0), "g")
    found = run_until_idle(engine)
    assert found.receipts["x"].finish_reason == "error"
    assert "not finite" in found.receipts["x"].message
