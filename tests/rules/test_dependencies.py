"""Whatever the packages import is declared: in the base, or in the extra that the code names."""

import sys
import tomllib
from collections.abc import Mapping
from functools import cache
from importlib.metadata import files, packages_distributions

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.rules.imports import PACKAGES, ROOT, Import, imports_of, modules, reachable, read

# Distributions that the development environment does not hold, by the module that they provide.
NOT_INSTALLED = {
    "nats": "nats-py",
    "confluent_kafka": "confluent-kafka",
    "clickhouse_connect": "clickhouse-connect",
    "presidio_analyzer": "presidio-analyzer",
    "google.auth": "google-auth",
}
# What each environment starts. `base` also serves every command; the rest trains the shipped models.
_OPTIONAL = {
    **{f"gateway.metering.streams.{each}": each for each in ("nats", "kafka")},
    "billing.archive.server": "clickhouse",
}
ENTRIES = {
    "base": [
        *(name for name in modules() if name.startswith("gateway.") and name not in _OPTIONAL),
        *(name for name in modules() if name.startswith(("core.", "dashboards."))),
        *(
            name
            for name in modules()
            if name.startswith("billing.") and "stripe" not in name and name not in _OPTIONAL
        ),
        *(name for name in modules() if name.startswith("migrations.")),
        *(
            "engine.worker.server",
            "engine.worker.client",
            "moderation.screener",
        ),
    ],
    "stripe": [name for name in modules() if name.startswith("billing.") and "stripe" in name],
    **{extra: [name] for name, extra in _OPTIONAL.items()},
    "engine": ["engine.runners.cpu.runner"],
    "gpu": ["engine.runners.gpu.runner"],
}


@cache
def project() -> dict[str, list[str]]:
    """Requirements as written: the base under `base`, and each extra."""
    found = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return {"base": found["dependencies"], **found["optional-dependencies"]}


@cache
def declared(extra: str) -> frozenset[str]:
    """Canonical names that an installation with the extra asks for by itself."""
    names: set[str] = set()
    for line in project()[extra]:
        requirement = Requirement(line)
        if canonicalize_name(requirement.name) == "tollhouse":
            names.update(*(declared(each) for each in requirement.extras))
        else:
            names.add(canonicalize_name(requirement.name))
    return frozenset(names) | (declared("base") if extra != "base" else frozenset())


@cache
def installed() -> Mapping[str, list[str]]:
    return packages_distributions()


@cache
def providers(each: Import) -> set[str]:
    found = installed().get(each.top, [])
    package = ".".join(each.name.split(".")[:2])  # of a namespace that other distributions share
    if package in NOT_INSTALLED:
        return {NOT_INSTALLED[package]}
    names = {canonicalize_name(name) for name in found} or {NOT_INSTALLED.get(each.top, "")}
    if len(names) == 1:
        return names
    return {name for name in names if _holds(name, each.name)} or names


def _holds(distribution: str, module: str) -> bool:
    """Which of the distributions of a namespace package (opentelemetry) it is."""
    paths = {str(path) for path in files(distribution) or []}
    base = module.replace(".", "/")
    outer = base.rpartition("/")[0]
    return any(f"{name}{end}" in paths for name in (base, outer) for end in (".py", "/__init__.py"))


def foreign(module: str) -> list[Import]:
    ours = {*PACKAGES, *sys.stdlib_module_names}
    return [each for each in imports_of(module) if each.top not in ours]


def undeclared(found: list[Import], extra: str) -> list[str]:
    return sorted(str(each) for each in found if not providers(each) & declared(extra))


@pytest.mark.parametrize("extra", ENTRIES)
def test_what_is_loaded_at_a_start_is_declared(extra: str) -> None:
    loaded = [each for name in reachable(ENTRIES[extra]) for each in foreign(name)]
    assert len(loaded) > 1
    assert not undeclared([each for each in loaded if not each.lazy], extra)


def test_the_rest_is_declared_for_training() -> None:
    started = set().union(*(reachable(entries) for entries in ENTRIES.values()))
    rest = [each for name in set(modules()) - started for each in foreign(name) if not each.lazy]
    assert {"torch", "sklearn"} <= {each.top for each in rest}
    assert not undeclared(rest, "train")


def test_a_lazy_import_is_of_the_base_or_of_an_extra() -> None:
    lazy = [each for name in modules() for each in foreign(name) if each.lazy]
    assert {"pyarrow", "weasyprint", "boto3"} <= {each.top for each in lazy}
    assert not undeclared(lazy, "all")


def test_a_cpu_engine_imports_no_triton() -> None:
    loaded = reachable(ENTRIES["engine"])
    assert not [str(e) for name in loaded for e in foreign(name) if e.top == "triton"]


def test_an_undeclared_import_is_found() -> None:
    source = "import flask\ndef serve():\n    from httpx import Client\n"
    found = list(read("gateway.fault", source))
    assert [(each.name, each.lazy) for each in found] == [("flask", False), ("httpx.Client", True)]
    assert len(undeclared(found, "base")) == 2 and len(undeclared(found, "all")) == 2


def test_the_base_is_without_what_the_extras_bring() -> None:
    heavy = {"torch", "triton", "pyarrow", "weasyprint", "boto3", "stripe", "opentelemetry-sdk"}
    assert not heavy & declared("base")
    assert heavy <= declared("all")
    assert "triton" not in declared("engine")
