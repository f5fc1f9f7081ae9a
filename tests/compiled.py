"""Extensions in C, built by tests from their source, so that an old build cannot pass for it."""

import shutil
import subprocess
import sys
import sysconfig
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType

import pytest


def built_extension(source: Path, folder: Path) -> ModuleType:
    """The module `_kernel` of the source, with warnings as errors. Skips without a compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("no C compiler: apt-get install gcc")
    built = folder / "_kernel.so"
    headers = f"-I{sysconfig.get_path('include')}"
    options = ["-O3", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", headers]
    if sys.platform == "darwin":
        options += ["-undefined", "dynamic_lookup"]
    subprocess.run([compiler, *options, str(source), "-o", str(built), "-lm"], check=True)
    loader = ExtensionFileLoader("_kernel", str(built))
    spec = spec_from_loader("_kernel", loader)
    assert spec is not None
    module = module_from_spec(spec)
    loader.exec_module(module)
    return module
