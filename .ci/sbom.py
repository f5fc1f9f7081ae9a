"""Writes the bill of materials of a release: CycloneDX 1.5 in JSON, of what is installed.

    python .ci/sbom.py [--extra NAME …] [--output FILE]

Run it with the Python of an environment that has the release. The components are Tollhouse's
dependencies and theirs, with those of each `--extra`: what else the environment has is not listed. A
dependency that its marker asks for and that is not installed ends it with exit status 1, and no file.
The same environment gives the same document.
"""

import argparse
import hashlib
import json
import re
import sys
import uuid
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.parse import quote

from packaging.requirements import Requirement

PRODUCT = "tollhouse"


class Missing(Exception):
    """A dependency that is not installed."""


def main() -> int:
    parser = argparse.ArgumentParser(description="write a CycloneDX bill of materials")
    parser.add_argument("--extra", action="append", default=[], metavar="NAME")
    parser.add_argument("--output", type=Path, help="a file; without it, standard output")
    given = parser.parse_args()
    try:
        text = json.dumps(document(PRODUCT, given.extra), indent=2) + "\n"
    except Missing as missing:
        print(missing, file=sys.stderr)
        return 1
    if given.output:
        given.output.write_text(text)
    else:
        sys.stdout.write(text)
    return 0


def document(product: str, extras: list[str]) -> dict[str, Any]:
    graph = dependencies(product, extras)
    components = {name: component(name) for name in graph}
    references = {name: str(each["bom-ref"]) for name, each in components.items()}
    listed = [components[name] for name in sorted(graph) if name != product]
    content = json.dumps(listed, sort_keys=True)
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, content)}",
        "version": 1,
        "metadata": {"component": {**components[product], "type": "application"}},
        "components": listed,
        "dependencies": [
            {"ref": references[name], "dependsOn": sorted(references[each] for each in graph[name])}
            for name in sorted(graph)
        ],
    }


def dependencies(product: str, extras: list[str]) -> dict[str, set[str]]:
    """By canonical name: what each distribution needs here. Missing where one is not installed."""
    graph: dict[str, set[str]] = {}
    seen: set[tuple[str, str]] = set()
    waiting = [(canonical(product), extra) for extra in ("", *extras)]
    while waiting:
        name, extra = waiting.pop()
        if (name, extra) in seen:
            continue
        seen.add((name, extra))
        try:
            wanted = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            users = sorted(each for each, needs in graph.items() if name in needs)
            raise Missing(
                f"{name} is not installed (needed by: {', '.join(users) or 'this command'}). "
                "Install the release with its extras first."
            ) from None
        needs = graph.setdefault(name, set())
        for each in map(Requirement, wanted):
            if each.marker is not None and not each.marker.evaluate({"extra": extra}):
                continue
            other = canonical(each.name)
            if other != name:
                needs.add(other)
            waiting += [(other, "")] + [(other, more) for more in sorted(each.extras)]
    return graph


def component(name: str) -> dict[str, Any]:
    found = metadata.distribution(name)
    purl = f"pkg:pypi/{name}@{quote(found.version, safe='')}"
    made: dict[str, Any] = {
        "type": "library",
        "bom-ref": purl,
        "name": name,
        "version": found.version,
        "purl": purl,
    }
    if expression := found.metadata.get("License-Expression"):
        made["licenses"] = [{"expression": expression}]
    elif written := found.metadata.get("License"):
        made["licenses"] = [{"license": {"name": written.strip().splitlines()[0][:100]}}]
    if record := found.read_text("RECORD"):  # of the files as they were installed
        digest = hashlib.sha256(record.encode()).hexdigest()
        made["properties"] = [{"name": "tollhouse:record-sha256", "value": digest}]
    return made


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


if __name__ == "__main__":
    sys.exit(main())
