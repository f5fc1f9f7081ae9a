"""Adapters on two ranks give the tokens of `peft`: of every family, and of every kind that is served."""

from pathlib import Path

import pytest
import torch

from engine.backends.compiled.group import Group
from tests.engine.checkpoints import (
    VOCAB,
    adapted_reference,
    reference,
    reference_greedy,
    save_adapter,
    save_checkpoint,
)
from tests.engine.models.test_family_parity import CASES, TARGETS
from tests.engine.parallel.local_ranks import on_ranks
from tests.engine.parallel.test_sharded_families import DIVIDED, RankDriver

PROTECTS = ("engine/parallel",)

PROMPT = torch.randint(3, VOCAB, (19,), generator=torch.Generator().manual_seed(1)).tolist()


def tokens_on_ranks(checkpoint: Path, adapter: Path) -> list[list[list[int]]]:
    """Of each rank: without and with the adapter, in one batch."""

    def rank(group: Group) -> list[list[int]]:
        driver = RankDriver(checkpoint, group, dtype="float32", max_adapter_slots=1)
        handle = driver.adapter(adapter, 0)
        sequences = [driver.sequence(PROMPT), driver.sequence(PROMPT, adapter=handle)]
        driver.run(sequences, chunk=11, count=8)
        return [sequence.output for sequence in sequences]

    return on_ranks(2, rank)


def expected_tokens(checkpoint: Path, adapter: Path) -> list[list[int]]:
    models = reference(checkpoint), adapted_reference(checkpoint, adapter)
    return [reference_greedy(model, PROMPT, 8) for model in models]


@pytest.mark.parametrize(
    "case",
    [pytest.param(each, marks=() if each in DIVIDED else pytest.mark.proof) for each in TARGETS],
)
def test_an_adapter_of_each_family(case: str, tmp_path: Path) -> None:
    family, changes = CASES[case]
    checkpoint = save_checkpoint(tmp_path / "base", family, **changes)
    adapter = save_adapter(checkpoint, tmp_path / "adapter", 3, 1, TARGETS[case])
    expected = expected_tokens(checkpoint, adapter)
    assert expected[0] != expected[1]
    assert tokens_on_ranks(checkpoint, adapter) == [expected, expected]


@pytest.mark.parametrize(
    ("case", "kind"),
    [
        ("llama-mha-biased", {"use_dora": True}),
        ("llama", {"modules_to_save": ["embed_tokens", "lm_head"]}),
        ("llama", {"targets": ["q_proj", "embed_tokens", "lm_head"]}),
        ("deepseek-v3", {"targets": ["q_a_proj", "q_b_proj", "kv_b_proj", "o_proj"]}),
        ("qwen2-moe", {"targets": r".*shared_expert\.(gate|up|down)_proj"}),
    ],
)
def test_an_adapter_of_each_kind(case: str, kind: dict[str, object], tmp_path: Path) -> None:
    family, changes = CASES[case]
    checkpoint = save_checkpoint(tmp_path / "base", family, **changes)
    given = {"targets": None} | kind
    adapter = save_adapter(checkpoint, tmp_path / "adapter", 3, 1, **given)  # type: ignore[arg-type]
    expected = expected_tokens(checkpoint, adapter)
    assert expected[0] != expected[1]
    assert tokens_on_ranks(checkpoint, adapter) == [expected, expected]
