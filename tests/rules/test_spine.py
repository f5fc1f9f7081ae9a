"""The order of the strata, private names, parameters and untyped dictionaries."""

import ast
import tomllib
from collections.abc import Iterator

import pytest

from tests.rules.imports import PACKAGES, ROOT, functions_in, imports_of, modules

MOST_PARAMETERS = 6
# Functions with more parameters than that, outside kernels. The numbers only fall.
LONG = {"core": 14, "gateway": 13, "engine": 5, "billing": 18, "moderation": 2, "dashboards": 1}
# `dict[str, Any]` in the steps and in serving/, where values have types. The number only falls.
UNTYPED = 216
# Where JSON is read and written.
EDGES = (
    "gateway/formats/",
    "gateway/serving/api/",
    "gateway/admin/",
    "gateway/edge/",
    "gateway/engines/ports/",
    "gateway/cli/",
)
KERNELS = ("engine/backends/gpu/", "engine/decoding/sampler/")
NO_STRATUM = {"demo"}  # the paths of the files that ship


def layers_of(container: str) -> set[str]:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    for each in contracts["contracts"]:
        if each["type"] == "layers" and each.get("containers") == [container]:
            return {name.strip() for layer in each["layers"] for name in layer.split("|")}
    return set()


@pytest.mark.parametrize("container", ["gateway", "engine", "engine.backends"])
def test_every_part_has_its_stratum(container: str) -> None:
    folder = ROOT / container.replace(".", "/")
    parts = {path.relative_to(folder).with_suffix("").parts[0] for path in folder.rglob("*.py")}
    assert parts - {"__init__"} - NO_STRATUM == layers_of(container)


def test_no_private_name_crosses_folders() -> None:
    found = []
    for module in modules():
        for each in imports_of(module):
            source, _, name = each.name.rpartition(".")
            private = name.startswith("_") and not name.startswith("__") and each.top in PACKAGES
            if private and source.rpartition(".")[0] not in (module, module.rpartition(".")[0]):
                found.append(str(each))
    assert not [each for each in found if "_kernel" not in each]  # an extension, not a name


def functions(source: str) -> Iterator[tuple[str, int]]:
    """Name and number of parameters, keyword-only ones too, without self."""
    for node in functions_in(ast.parse(source)):
        names = [each.arg for each in node.args.posonlyargs + node.args.args]
        own = names[:1] in (["self"], ["cls"])
        yield node.name, len(names) + len(node.args.kwonlyargs) - own


@pytest.mark.parametrize("package", PACKAGES)
def test_functions_take_few_parameters(package: str) -> None:
    long = [
        f"{path.relative_to(ROOT)}: {name} takes {count}"
        for path in sorted((ROOT / package).rglob("*.py"))
        if not path.relative_to(ROOT).as_posix().startswith(KERNELS)
        for name, count in functions(path.read_text())
        if count > MOST_PARAMETERS
    ]
    assert len(long) <= LONG.get(package, 0), "\n".join(long)


def test_the_steps_have_types() -> None:
    count = sum(
        path.read_text().count("dict[str, Any]")
        for path in (ROOT / "gateway").rglob("*.py")
        if not path.relative_to(ROOT).as_posix().startswith(EDGES)
    )
    assert count <= UNTYPED, f"{count}: give the new values a type"


def test_a_keyword_counts_as_a_parameter() -> None:
    assert list(functions("def f(self, a, *, b=1): ...")) == [("f", 2)]
