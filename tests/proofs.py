"""Runs the proofs whose code has changed since they last passed: `python -m tests.proofs [--all]`.

A proof is a file of tests with the mark `proof`. Its digest covers every file of the project that it
imports, directly or through others, the modules that it names in strings (processes that it starts),
the other files of their folders (C sources, SQL, templates) and the pinned versions. `proofs.json`
holds the digests of the proofs as they last passed; commit it with the change that they were run for.
One that fails keeps its entry, and is due until it passes. One without an entry is not known to have
passed anywhere: its failure is shown, and is no regression.

A proof that starts the product imports nearly all of it, and protects little of it. It names the folders
and files that it protects in `PROTECTS`, a tuple of paths: its digest covers these and what they import
instead of all that it starts. `--all` runs it whatever has changed, as one does before a release.
"""

import ast
import hashlib
import json
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests import second_run

PASSED = Path("tests/proofs.json")
_FIXTURES = Path("tests/conftest.py")
_PINS = Path("constraints.txt")
_MARK = "mark.proof"
_DECLARED = "PROTECTS"
_COMMAND = Path("gateway/cli/main.py")
_SHIPPED = ("core", "billing", "moderation", "engine", "dashboards", "gateway", "migrations")


@cache
def tracked() -> frozenset[Path]:
    """The files of the project, those that are not committed yet included."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    lines = subprocess.check_output(command, text=True).splitlines()
    return frozenset(path for path in map(Path, lines) if path.exists())


def proofs() -> list[Path]:
    files = (path for path in tracked() if path.parts[0] == "tests" and path.match("test_*.py"))
    return sorted(path for path in files if _MARK in path.read_text())


@cache
def file_of(module: str) -> Path | None:
    """The project's file of a dotted name, or of the module that a dotted name lies in."""
    parts = module.split(".")
    if not all(part.isidentifier() for part in parts):
        return None
    for count in range(len(parts), 0, -1):
        folder = Path(*parts[:count])
        for path in (folder.with_suffix(".py"), folder / "__init__.py"):
            if path in tracked():
                return path
    return None


@cache
def imported(path: Path) -> frozenset[Path]:
    """Files that one file imports, or names as a module in a string; with the packages that hold it."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names.add(node.value)
    found = {each for each in map(file_of, names) if each is not None} - {path}
    for folder in path.parents:
        found |= {folder / name for name in ("__init__.py", "conftest.py")} & tracked()
    return frozenset(found)


def protected(proof: Path) -> tuple[str, ...]:
    """The paths in the file's `PROTECTS`; none where it has no such constant."""
    for node in ast.parse(proof.read_bytes()).body:
        if isinstance(node, ast.Assign) and any(
            isinstance(target, ast.Name) and target.id == _DECLARED for target in node.targets
        ):
            paths: tuple[str, ...] = ast.literal_eval(node.value)
            return paths
    return ()


def below(path: str) -> set[Path]:
    """The one file, or the files of a folder and its folders but for prose."""
    folder = f"{path}/"
    return {
        Path(each)
        for each in _names()
        if each == path or (each.startswith(folder) and not each.endswith(".md"))
    }


@cache
def _names() -> tuple[str, ...]:
    return tuple(each.as_posix() for each in tracked())


def reached(roots: set[Path], *, through_product: bool = True) -> set[Path]:
    """Files that the roots import, directly or through others; with `through_product` false, others are
    those of tests alone."""
    files, waiting = {*roots}, [each for each in roots if each.suffix == ".py"]
    while waiting:
        for each in imported(waiting.pop()) - files:
            files.add(each)
            if each == _FIXTURES:  # of databases: who uses them imports what it stores
                continue
            if through_product or each.parts[0] == "tests":
                waiting.append(each)
    return files


@cache
def covered(proof: Path) -> frozenset[Path]:
    """Every file that the proof depends on."""
    declared = protected(proof)
    files = reached({proof}, through_product=not declared)
    for each in declared:
        files |= reached(below(each))
    if _COMMAND in files and not declared:  # it finds its commands by their names
        files |= {path for path in tracked() if path.parts[0] in _SHIPPED and path.suffix != ".md"}
    return frozenset((*files, *_data(files), _PINS))


def _data(files: set[Path]) -> Iterator[Path]:
    folders = {path.parent for path in files if path.parent.parts[:1] != ("tests",)}
    return (
        path for path in tracked() if path.parent in folders and path.suffix not in (".py", ".md")
    )


@cache
def content_digest(path: Path) -> bytes:
    return hashlib.sha256(path.read_bytes()).digest()


def digest(proof: Path) -> str:
    """Changes whenever a file does that the proof depends on."""
    lines = (path.as_posix().encode() + content_digest(path) for path in sorted(covered(proof)))
    return hashlib.sha256(b"".join(lines)).hexdigest()[:16]


def passed() -> dict[str, str]:
    return json.loads(PASSED.read_text()) if PASSED.exists() else {}


def due(digests: dict[str, str]) -> list[str]:
    """The proofs that have not passed as their code is now."""
    known = passed()
    return [each for each in digests if known.get(each) != digests[each]]


def failed_files() -> set[str]:
    """Files with a test that failed, or that could not be collected, in the run that ended last."""
    failed = json.loads(second_run.FAILURES.read_text()) if second_run.FAILURES.exists() else {}
    return {node.partition("::")[0] for node in failed}


def main(arguments: list[str]) -> int:
    """1 if a proof that has passed before fails, or pytest's exit status if it could not run them. The
    digests of those that pass are written to `proofs.json`."""
    digests = {proof.as_posix(): digest(proof) for proof in proofs()}
    chosen = [*digests] if "--all" in arguments else due(digests)
    say = second_run.say
    say(f"{len(chosen)} of {len(digests)} proofs: the code of the others has not changed")
    options = [each for each in arguments if each != "--all"]
    status = second_run.main([*options, "-m", "proof", *chosen]) if chosen else 0
    if status not in (0, second_run.FAILED):
        return status
    failed = failed_files() if status else set()
    if status and not failed:
        return status
    known = {each: value for each, value in passed().items() if each in digests}
    known |= {each: digests[each] for each in chosen if each not in failed}
    PASSED.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")
    if new := sorted(failed - known.keys()):
        say("\n".join(("== FAILED, and not known to have passed before: mend ==", *new)))
    if broken := sorted(failed & known.keys()):
        say("\n".join(("== FAILED, though they passed before ==", *broken)))
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
