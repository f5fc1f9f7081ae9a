"""Extensions in C, built by tests from their source, so that an old build cannot pass for it."""

import fcntl
import hashlib
import shutil
import subprocess
import sys
import sysconfig
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType

import pytest

# Compiling takes most of the time of the files that use a kernel: what was built of the same text by
# the same compiler is used again, by every worker.
BUILT = Path(__file__).parents[1] / "build" / "test-kernels"


def built_extension(source: Path, folder: Path) -> ModuleType:
    """The module `_kernel` of the source, with warnings as errors. Skips without a compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("no C compiler: apt-get install gcc")
    headers = f"-I{sysconfig.get_path('include')}"
    options = ["-O3", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", headers]
    if sys.platform == "darwin":
        options += ["-undefined", "dynamic_lookup"]
    # A copy of one's own: two modules of one file would share the library's variables.
    built = Path(shutil.copy(_compiled([compiler, *options, str(source)]), folder / "_kernel.so"))
    loader = ExtensionFileLoader("_kernel", str(built))
    spec = spec_from_loader("_kernel", loader)
    assert spec is not None
    module = module_from_spec(spec)
    loader.exec_module(module)
    return module


def _compiled(command: list[str]) -> Path:
    """What the command makes, kept under a hash of it, of the compiler's version and of the whole text
    with every header in it."""
    versions = subprocess.run([command[0], "--version"], check=True, capture_output=True).stdout
    text = subprocess.run([*command, "-E"], check=True, capture_output=True).stdout
    parts = (" ".join(command).encode(), versions, text)
    name = hashlib.sha256(b"".join(hashlib.sha256(each).digest() for each in parts)).hexdigest()
    BUILT.mkdir(parents=True, exist_ok=True)
    kept = BUILT / f"{name}.so"
    with (BUILT / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not kept.exists():
            unfinished = BUILT / f"{name}.unfinished"
            subprocess.run([*command, "-o", str(unfinished), "-lm"], check=True)
            unfinished.replace(kept)
    return kept
