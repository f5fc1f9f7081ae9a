"""The compiled float products, by each kind of instructions."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.backends.compiled import linear as dense
from tests.compiled import built_extension

LEVELS = ["amx", "avx512wide", "avx512bf16", "avx512", "avx2", "plain"]


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Any:
    source = Path(dense.__file__).with_name("kernel.c")
    return built_extension(source, tmp_path_factory.mktemp("kernel"))


@pytest.fixture(autouse=True)
def compiled(kernel: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dense, "kernel", kernel)


@pytest.fixture(params=LEVELS)
def level(request: pytest.FixtureRequest, kernel: Any) -> Iterator[str]:
    best = kernel.instructions()
    try:
        kernel.instructions(request.param)
    except ValueError:
        pytest.skip(f"this processor has no {request.param}")
    yield request.param
    kernel.instructions(best)
