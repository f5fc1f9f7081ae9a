"""The kernels' tests run on the device where there is one, and in Triton's interpreter otherwise: the
root `conftest` sets the switch before anything imports Triton.
"""

import os
from collections.abc import Iterator
from importlib.util import find_spec

import pytest


@pytest.fixture(scope="session", autouse=True)
def quick_interpreter() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton"):
            from tests.engine.gpu.quick_interpreter import install

            install(patch)
        yield
