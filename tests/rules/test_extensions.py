"""A compiled extension of an earlier version is left unused: the plain code computes instead."""

import subprocess
import sys

import pytest

STALE = """
import sys, types
stale = types.ModuleType("{package}._kernel")
stale.Kernel = stale.Matrix = None
if {version}: stale.INTERFACE = {version}
sys.modules["{package}._kernel"] = stale
import {module} as module
assert module.{name} is None, module.{name}
{then}
"""
LOADS = "from moderation.classifiers.load import load_classifier; load_classifier().score(['x'])"


@pytest.mark.parametrize("version", [None, 1, 999])
@pytest.mark.parametrize(
    ("package", "module", "name", "then"),
    [
        ("moderation.classifiers", "moderation.classifiers.ensemble", "Kernel", LOADS),
        ("engine.dense", "engine.dense.linear", "kernel", ""),
    ],
)
def test_an_earlier_build_is_not_used(
    package: str, module: str, name: str, then: str, version: int | None
) -> None:
    code = STALE.format(package=package, module=module, name=name, then=then, version=version)
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
