"""The compiled kernel, by each kind of instructions."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.backends.compiled import linear
from tests.compiled import built_extension

LEVELS = ["avx512", "avx2", "plain", "torch"]


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Any:
    source = Path(linear.__file__).with_name("kernel.c")
    return built_extension(source, tmp_path_factory.mktemp("kernel"))


@pytest.fixture(params=LEVELS)
def level(request: pytest.FixtureRequest, kernel: Any) -> Iterator[str]:
    """The products by these instructions, or by torch."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linear, "kernel", None if request.param == "torch" else kernel)
        if request.param != "torch":
            try:
                kernel.instructions(request.param)
            except ValueError:
                pytest.skip(f"this processor has no {request.param}")
        yield request.param
