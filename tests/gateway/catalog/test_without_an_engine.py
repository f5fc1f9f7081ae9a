"""A gateway in an environment without torch: what it reads of a model that runs elsewhere."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from engine.demo.paths import MODEL_DIR

ROOT = Path(__file__).parents[3]
_BUILT = """
import importlib.abc, sys

class Refused(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "triton"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Refused())
from core.settings import Settings
from gateway.wiring import build

codec = build(Settings()).catalog.first().codec
assert codec.decode(codec.encode("one two")) == "one two"
"""


@pytest.mark.parametrize(
    "entry",
    [
        pytest.param(
            {"url": "http://127.0.0.1:9/v1", "model": "m", "tokenizer": str(MODEL_DIR)},
            id="an upstream with a tokenizer",
        ),
        pytest.param({"url": "tcp://127.0.0.1:9"}, id="an engine on another machine"),
    ],
)
def test_it_is_built_with_the_tokenizer_of_a_model(entry: dict[str, str], tmp_path: Path) -> None:
    variables = {
        "TOLLHOUSE_DATA_DIR": str(tmp_path),
        "TOLLHOUSE_UPSTREAMS": json.dumps([entry]),
        "TOLLHOUSE_MODEL": str(MODEL_DIR),
    }
    done = subprocess.run(
        [sys.executable, "-c", _BUILT], cwd=ROOT, env=variables, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
