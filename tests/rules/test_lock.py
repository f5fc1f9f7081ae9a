"""constraints.txt pins whatever any extra installs: walked from the metadata of what is installed."""

import importlib.util
import tomllib
from collections.abc import Iterator
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
GPU_BUILD = ("nvidia-", "cuda-")  # of torch's GPU wheels, which pin them themselves
OURS = "tollhouse"


@cache
def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    assert all(line.count("==") == 1 for line in lines), "a line that pins no version"
    split = [line.split("==") for line in lines]
    return {canonicalize_name(name): version for name, version in split}


def direct() -> list[Requirement]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lists = [project["dependencies"], *project["optional-dependencies"].values()]
    found = [Requirement(line) for lines in lists for line in lines]
    return [each for each in found if each.name != OURS]


def applies(each: Requirement, extras: frozenset[str]) -> bool:
    marker = each.marker
    return marker is None or any(marker.evaluate({"extra": extra}) for extra in {"", *extras})


def needed(waiting: list[Requirement]) -> Iterator[Requirement]:
    """Each requirement of this platform, with those of what it installs."""
    seen: set[tuple[str, frozenset[str]]] = set()
    while waiting:
        each = waiting.pop()
        known = (canonicalize_name(each.name), frozenset(each.extras))
        yield each
        if known in seen:
            continue
        seen.add(known)
        try:
            own = distribution(each.name).requires or []
        except PackageNotFoundError:
            continue  # of an extra that this environment is without
        waiting += [one for one in map(Requirement, own) if applies(one, known[1])]


def missing(requirements: list[Requirement]) -> list[str]:
    names = {
        canonicalize_name(each.name)
        for each in needed([one for one in requirements if applies(one, frozenset())])
    }
    return sorted(name for name in names - {*pins()} if not name.startswith(GPU_BUILD))


def test_every_distribution_of_every_extra_is_pinned() -> None:
    assert len(list(needed(direct()))) > 300
    assert not missing(direct()), "run `make lock`"


def test_a_distribution_without_a_pin_is_found() -> None:
    lone = next(each for each in ("setuptools", "pip") if each not in pins())
    assert missing([*direct(), Requirement(lone)]) == [lone]


def test_a_pin_fits_what_the_project_asks_for() -> None:
    for each in direct():
        assert each.specifier.contains(pins()[canonicalize_name(each.name)], prereleases=True), each


def test_no_pin_is_of_a_gpu_build_or_of_a_local_version() -> None:
    assert not [name for name in pins() if name.startswith(GPU_BUILD)]
    assert not [version for version in pins().values() if "+" in version]


@pytest.fixture(scope="module")
def lock() -> Any:
    """The script `.ci/lock.py`, which is in no package."""
    spec = importlib.util.spec_from_file_location("lock", ROOT / ".ci" / "lock.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("line", "required"),
    [
        ('triton==3.7.1; platform_system == "Linux"', "triton==3.7.1"),  # torch 2.13
        ('triton~=3.9.0; platform_system == "Linux" and python_version < "3.16"', "triton~=3.9.0"),
        ("triton ~= 3.9.0", "triton~=3.9.0"),
        ("triton-windows==3.7.1", None),
        ("tritonclient", None),
    ],
)
def test_what_torch_requires_of_triton_is_read(lock: Any, line: str, required: str | None) -> None:
    assert lock.triton_in(["filelock", line, "networkx>=2.5.1"]) == required


@pytest.mark.parametrize("required", ["triton==3.7.1", "triton~=3.9.0"])
@pytest.mark.parametrize(
    "pinned", ["3.7.1", "3.7.0", "3.8.9", "3.9.0", "3.9.12", "3.90.0", "4.9.0"]
)
def test_a_pin_of_triton_stays_where_torch_takes_it(lock: Any, required: str, pinned: str) -> None:
    taken = Requirement(required).specifier.contains(pinned)
    assert lock.fits(f"triton=={pinned}", required) == taken


def test_pins_of_other_distributions_stay(lock: Any) -> None:
    assert lock.fits("tritonclient==2.0", "triton==3.7.1")
    assert lock.fits("torch==2.13.0", "triton==3.7.1")
