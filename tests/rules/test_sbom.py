"""`.ci/sbom.py`: the bill of materials names what a release installs, at its version, and no more."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

ROOT = Path(__file__).parents[2]
RUNTIME = {
    "fastapi",
    "starlette",
    "sqlalchemy",
    "celery",
    "kombu",
    "pyzmq",
}  # the last two of theirs
DEVELOPMENT = {"pytest", "ruff", "mypy", "schemathesis"}


def run(*options: str, path: str = "") -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, str(ROOT / ".ci/sbom.py"), *options],
        capture_output=True, text=True, timeout=120, env={"PYTHONPATH": path, "PATH": ""},
    )  # fmt: skip


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    done = run("--extra", "engine")
    assert done.returncode == 0, done.stderr
    made: dict[str, Any] = json.loads(done.stdout)
    return made


def test_it_lists_the_dependencies_at_the_versions_of_the_lock(document: dict[str, Any]) -> None:
    found = {each["name"]: each["version"].partition("+")[0] for each in document["components"]}
    assert RUNTIME | {"torch"} <= {*found}
    assert not DEVELOPMENT & {*found} and "tollhouse" not in found
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = {name.lower().replace("_", "-").replace(".", "-"): pin for name, pin in
            (line.split("==") for line in lines)}  # fmt: skip
    assert found == {name: pins[name] for name in found}
    assert "torch" not in {each["name"] for each in json.loads(run().stdout)["components"]}


def test_it_has_the_form_of_cyclonedx(document: dict[str, Any]) -> None:
    assert (document["bomFormat"], document["specVersion"]) == ("CycloneDX", "1.5")
    assert document["metadata"]["component"]["name"] == "tollhouse"
    references = [each["bom-ref"] for each in document["components"]]
    assert len(references) == len({*references})
    for each in document["components"]:
        assert each["type"] == "library"
        assert unquote(each["purl"]) == f"pkg:pypi/{each['name']}@{each['version']}"
    own = document["metadata"]["component"]["bom-ref"]
    edges = {each["ref"]: each["dependsOn"] for each in document["dependencies"]}
    assert {*edges} == {*references, own}
    reached, waiting = {own}, [own]
    while waiting:
        more = {*edges[waiting.pop()]} - reached
        reached |= more
        waiting += more
    assert reached == {*edges}


def test_the_same_environment_gives_the_same_document(tmp_path: Path) -> None:
    assert run("--output", str(tmp_path / "sbom.json")).returncode == 0
    assert (tmp_path / "sbom.json").read_text() == run().stdout


def test_a_dependency_that_is_missing_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "tollhouse-0.1.0.dist-info"
    folder.mkdir()
    lines = ("Metadata-Version: 2.1", "Name: tollhouse", "Version: 0.1.0")
    asked = "Requires-Dist: a-distribution-that-nobody-has"
    (folder / "METADATA").write_text("\n".join([*lines, asked]) + "\n")
    done = run(path=str(tmp_path))
    assert done.returncode == 1 and not done.stdout
    assert "a-distribution-that-nobody-has is not installed (needed by: tollhouse)" in done.stderr
