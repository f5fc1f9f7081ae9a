"""Each family on several ranks has the logits of one process within 1e-4 in float32, and its tokens."""

from pathlib import Path

import pytest
import torch

from engine.backends.compiled.group import Group
from engine.config import EngineConfig
from engine.runners.cpu.runner import load_rank
from tests.engine.checkpoints import VOCAB, save_checkpoint
from tests.engine.driver import LogitDriver
from tests.engine.models.test_family_parity import CASES
from tests.engine.parallel.local_ranks import on_ranks

PROTECTS = ("engine/parallel", "engine/backends/layers")

# Of each way to divide heads, matrices, experts and tables; the others differ in what no rank divides.
DIVIDED = {
    "llama-mha-biased",
    "llama-mqa-wide-heads",
    "qwen2-windows",
    "gemma3n",
    "command-r7b",
    "olmo2",
    "phi3",
    "mixtral",
    "qwen2-moe",
    "gpt-oss",
    "bloom",
    "mpt-clipped",
    "falcon",
    "falcon-new",
    "falcon-alibi",
    "deepseek-v2",
}


class RankDriver(LogitDriver):
    """One rank's. All ranks are driven alike."""

    def __init__(
        self, checkpoint: Path, group: Group, blocks: int = 96, **settings: object
    ) -> None:
        fields = {"model": str(checkpoint), "num_blocks": blocks, "threads": 1} | settings
        config = EngineConfig(tp=group.size, compare_ranks=True, **fields)  # type: ignore[arg-type]
        self.runner = load_rank(config, group)
        order = torch.randperm(blocks, generator=torch.Generator().manual_seed(3)).tolist()
        self.free: list[int] = order
        self._count = self._generation = 0


def prompt(length: int, seed: int) -> list[int]:
    random = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB, (length,), generator=random).tolist()


def logits_of(driver: LogitDriver) -> torch.Tensor:
    """Of 75 tokens, whose prompt comes in two chunks beside another sequence."""
    sequence, beside = driver.sequence(prompt(75, 1)), driver.sequence(prompt(90, 2))
    parts = [
        driver.logits(sequence, 21, (beside, 30)),
        driver.logits(sequence, 1, (beside, 1)),
        driver.logits(sequence, 52, (beside, 40)),
        driver.logits(sequence, 1, (beside, 1)),
    ]
    return torch.cat(parts)


def tokens_of(driver: LogitDriver) -> list[list[int]]:
    sequences = [driver.sequence(prompt(length, length)) for length in (5, 33)]
    driver.run(sequences, chunk=16, count=8)
    return [each.output for each in sequences]


@pytest.mark.parametrize(
    "case",
    [pytest.param(each, marks=() if each in DIVIDED else pytest.mark.proof) for each in CASES],
)
def test_two_ranks_have_the_logits_and_tokens_of_one_process(case: str, tmp_path: Path) -> None:
    family, changes = CASES[case]
    checkpoint = save_checkpoint(tmp_path, family, **changes)
    alone = LogitDriver(checkpoint, dtype="float32")
    expected, tokens = logits_of(alone), tokens_of(alone)

    def rank(group: Group) -> tuple[torch.Tensor, list[list[int]]]:
        driver = RankDriver(checkpoint, group, dtype="float32")
        return logits_of(driver), tokens_of(driver)

    found = on_ranks(2, rank)
    for logits, said in found:
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
        assert said == tokens
    assert torch.equal(found[0][0], found[1][0])


@pytest.mark.parametrize("case", ["llama-mha-biased", "llama-mqa-wide-heads", "deepseek-v3"])
def test_four_ranks_have_the_logits_of_one_process(case: str, tmp_path: Path) -> None:
    family, changes = CASES[case]
    checkpoint = save_checkpoint(tmp_path, family, **changes)
    expected = logits_of(LogitDriver(checkpoint, dtype="float32"))
    found = on_ranks(4, lambda group: logits_of(RankDriver(checkpoint, group, dtype="float32")))
    for logits in found:
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("bits", ["int8", "int4"])
def test_codes_are_cut_at_groups_and_summed_within_the_one_call(bits: str, tmp_path: Path) -> None:
    wide = {"intermediate_size": 128, "head_dim": 32, "num_key_value_heads": 4}
    checkpoint = save_checkpoint(tmp_path, "Llama", **wide)
    settings = {"dtype": "float32", "quantization": bits}
    alone = LogitDriver(checkpoint, **settings)
    expected = logits_of(alone)
    assert alone.runner._layers is not None

    def rank(group: Group) -> torch.Tensor:
        driver = RankDriver(checkpoint, group, **settings)
        assert driver.runner._layers is not None
        return logits_of(driver)

    first, second = on_ranks(2, rank)
    torch.testing.assert_close(first, expected, atol=1e-4, rtol=0)
    assert torch.equal(first, second)
