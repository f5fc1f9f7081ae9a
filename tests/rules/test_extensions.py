"""A compiled extension of an earlier version is left unused: the plain code computes instead."""

import subprocess
import sys

import pytest

# Of every package in one process: most of the time goes into importing torch.
STALE = """
import importlib, sys, types
VERSION = {version}
for package in ("moderation.classifiers", "engine.backends.compiled"):
    stale = types.ModuleType(package + "._kernel")
    stale.Kernel = stale.Matrix = None
    if VERSION: stale.INTERFACE = VERSION
    sys.modules[package + "._kernel"] = stale
for module, name in (
    ("moderation.classifiers.ensemble", "Kernel"),
    ("engine.backends.compiled.linear", "kernel"),
):
    found = getattr(importlib.import_module(module), name)
    assert found is None, (module, found)
from moderation.classifiers.load import load_classifier
load_classifier().score(["x"])
"""


@pytest.mark.parametrize("version", [None, 1, 999])
def test_an_earlier_build_is_not_used(version: int | None) -> None:
    code = STALE.format(version=version)
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
