"""Runs a module as on a machine that has torch, triton, numpy, safetensors and tokenizers alone: whatever
else is installed cannot be imported. `python -m tests.engine.few_packages MODULE [ARGUMENT...]`"""

import re
import runpy
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import PackageNotFoundError, distribution, packages_distributions
from pathlib import Path
from types import ModuleType
from typing import Any

PACKAGES = ("torch", "triton", "numpy", "safetensors")
# Its own requirements serve the hub alone.
ALONE = ("tokenizers",)


def installed_with(packages: Sequence[str]) -> set[str]:
    """Normalised names of the packages and of what they need."""
    found: set[str] = set()
    left = list(packages)
    while left:
        name = re.sub(r"[-_.]+", "-", left.pop()).lower()
        if name in found:
            continue
        found.add(name)
        try:
            requires = distribution(name).requires or []
        except PackageNotFoundError:  # of another platform
            continue
        left += [re.split(r"[^\w.-]", each)[0] for each in requires if "extra ==" not in each]
    return found


class Present(MetaPathFinder):
    """A finder that finds nothing of other distributions than these."""

    def __init__(self, finder: Any) -> None:
        self._finder = finder
        kept = installed_with(PACKAGES) | set(ALONE)
        self._absent = {
            module
            for module, owners in packages_distributions().items()
            if not {re.sub(r"[-_.]+", "-", each).lower() for each in owners} & kept
        }

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        found: ModuleSpec | None = self._finder.find_spec(fullname, path, target)
        if found is None or path is not None or fullname not in self._absent:
            return found
        places = [found.origin or "", *(found.submodule_search_locations or ())]
        hidden = any("site-packages" in Path(place).parts for place in places)
        return None if hidden else found  # of this checkout


def hide_others() -> None:
    """From now on, in this process; what is imported already stays."""
    sys.meta_path[:] = [Present(finder) for finder in sys.meta_path]


if __name__ == "__main__":
    hide_others()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
