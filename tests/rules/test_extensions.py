"""A compiled extension of an earlier version is left unused: the plain code computes instead."""

import subprocess
import sys

# Of every package, and each version in a process that knows torch already: importing it takes longest.
STALE = """
import importlib, os, sys, types
import numpy, safetensors, torch
for VERSION in (None, 1, 999):
    child = os.fork()
    if not child:
        break
    if os.waitpid(child, 0)[1]:
        sys.exit(f"with the interface {VERSION}")
else:
    sys.exit()
for package in ("core", "moderation.classifiers", "engine.backends.compiled"):
    stale = types.ModuleType(package + "._kernel")
    stale.Kernel = stale.Matrix = None
    if VERSION: stale.INTERFACE = VERSION
    sys.modules[package + "._kernel"] = stale
for module, name in (
    ("core.compiled", "Bucket"),
    ("moderation.classifiers.ensemble", "Kernel"),
    ("engine.backends.compiled.linear", "kernel"),
):
    found = getattr(importlib.import_module(module), name)
    assert found is None, (module, found)
from moderation.classifiers.load import load_classifier
load_classifier().score(["x"])
for module in ("gateway.admission.headers", "gateway.catalog.codec.word_cache", "moderation.records"):
    importlib.import_module(module)
"""


def test_an_earlier_build_is_not_used() -> None:
    run = subprocess.run([sys.executable, "-c", STALE], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
