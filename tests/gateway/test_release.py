"""The version that is said everywhere, and packages that another distribution put in the way."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import httpx
import pytest

from tests.gateway.deployment import Deployment

ROOT = Path(__file__).parents[2]


def test_the_command_and_the_document_say_the_version(deployment: Deployment) -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    said = subprocess.run(
        [sys.executable, "-m", "gateway.cli.start", "--version"],
        cwd=ROOT, capture_output=True, text=True, check=True, timeout=200,
    )  # fmt: skip
    assert said.stdout == f"tollhouse {version}\n"
    assert httpx.get(f"{deployment.url}/openapi.json").json()["info"]["version"] == version


@pytest.mark.parametrize("name", ["core", "engine", "migrations"])
def test_a_package_of_another_distribution_is_named_at_the_start(tmp_path: Path, name: str) -> None:
    other = tmp_path / name
    other.mkdir()
    (other / "__init__.py").write_text("raise RuntimeError('another distribution')")
    paths = f"{tmp_path}{os.pathsep}{ROOT}"
    done = subprocess.run(
        [sys.executable, "-c", "from gateway.cli.start import main; raise SystemExit(main())"],
        cwd=tmp_path.parent, env=os.environ | {"PYTHONPATH": paths},
        capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert done.returncode == 1
    assert repr(name) in done.stderr and str(other) in done.stderr
    assert "virtual environment" in done.stderr and "Traceback" not in done.stderr
