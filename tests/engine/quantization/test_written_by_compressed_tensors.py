"""Checkpoints that compressed-tensors 0.20 wrote are read as it reads them itself.

`written_by_peers/write_compressed_tensors.py` made them, and the logits that `transformers` computes from
the weights that the library dequantises.
"""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from engine.models.checkpoint import open_checkpoint
from tests.engine.driver import LogitDriver
from tests.engine.quantization.test_models import needs_kernel

HERE = Path(__file__).parent / "written_by_peers"
# Bits, and inputs that share a scale.
CODES = {
    "int4-group": (4, 32),
    "int4-group-zeros": (4, 64),
    "int8-channel": (8, 64),
    "w8a8": (8, 64),
}


def checkpoint(scheme: str) -> tuple[Path, list[int], torch.Tensor]:
    """And ids with their logits."""
    directory = HERE / f"compressed-tensors-{scheme}"
    expected = load_file(directory / "expected.safetensors")
    return directory, expected["ids"].tolist(), expected["logits"]


@pytest.mark.parametrize("scheme", [*CODES, "fp8-channel"])
def test_logits_are_those_of_its_own_dequantised_weights(scheme: str) -> None:
    directory, ids, expected = checkpoint(scheme)
    assert expected.std() > 0.1
    driver = LogitDriver(directory, dtype="float32", quantization="none")
    found = driver.logits(driver.sequence(ids), len(ids))
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


@needs_kernel
@pytest.mark.parametrize("scheme", CODES)
def test_integers_stay_in_their_codes(scheme: str) -> None:
    """The products round their rows too, so logits are near those of its own weights."""
    directory, ids, expected = checkpoint(scheme)
    source = open_checkpoint(directory).source
    codes = source.codes("model.layers.0.mlp.down_proj.weight")
    source.close()
    assert codes is not None
    assert (codes.bits, codes.group) == CODES[scheme]
    driver = LogitDriver(directory, dtype="float32")
    found = driver.logits(driver.sequence(ids), len(ids))
    assert (found - expected).abs().mean() < 0.06 * expected.std()
