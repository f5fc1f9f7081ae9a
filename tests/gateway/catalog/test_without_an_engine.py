"""A gateway in an environment without torch: what it reads of a model that runs elsewhere."""

import json
import subprocess
import sys
from pathlib import Path

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

for entry in sys.argv[1:]:
    codec = build(Settings(upstreams=entry)).catalog.first().codec
    assert codec.decode(codec.encode("one two")) == "one two"
"""


def test_it_is_built_with_the_tokenizer_of_a_model(tmp_path: Path) -> None:
    """That of an upstream's entry, and that of an engine on another machine."""
    entries = (
        {"url": "http://127.0.0.1:9/v1", "model": "m", "tokenizer": str(MODEL_DIR)},
        {"url": "tcp://127.0.0.1:9"},
    )
    command = [sys.executable, "-c", _BUILT, *(json.dumps([each]) for each in entries)]
    variables = {"TOLLHOUSE_DATA_DIR": str(tmp_path), "TOLLHOUSE_MODEL": str(MODEL_DIR)}
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
