"""The project speaks of the product alone: no paths of a machine, no secrets, no leftovers."""

import ast
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("core", "gateway", "engine", "billing", "moderation", "dashboards", "migrations")
TEXT = {
    ".py",
    ".md",
    ".toml",
    ".txt",
    ".html",
    ".css",
    ".js",
    ".json",
    ".yaml",
    ".yml",
    ".jinja",
    "",
}


def tracked() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
    ).stdout.split("\n")
    return [ROOT / name for name in listed if name and (ROOT / name).is_file()]


def _offences(pattern: str) -> list[str]:
    wanted = re.compile(pattern)
    found = []
    for path in tracked():
        if path.suffix not in TEXT or path == Path(__file__) or path.stat().st_size > 2_000_000:
            continue
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
            if wanted.search(line):
                found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()[:80]}")
    return found


def test_no_path_of_a_builder_s_machine() -> None:
    assert not _offences(r"/(work|opt/pypi|opt/wheels|root|home/\w+)/")


def test_no_secret_is_in_the_tree() -> None:
    keys = (
        r"(sk_live_[0-9A-Za-z]{16,}|AKIA(?!IOSFODNN7)[0-9A-Z]{16}|^-----BEGIN [A-Z ]*PRIVATE KEY)"
    )
    assert not _offences(keys)


def test_nothing_is_left_to_do_in_the_code() -> None:
    assert not _offences(r"\b(TODO|FIXME|XXX|HACK)\b")


def test_the_repository_stays_small() -> None:
    assert sum(path.stat().st_size for path in tracked()) < 40_000_000
    heavy = [str(path) for path in tracked() if path.stat().st_size > 12_000_000]
    assert not heavy


# Without one of these words, nothing that `_pickles` looks for can be in a file.
MAY_READ_PICKLES = re.compile(r"pickle|dill|joblib|shelve|torch")


def _pickles(source: str) -> list[int]:
    """Lines that can read a pickle: its modules, `torch.load`, and arrays of objects."""
    found: list[int] = []
    if not MAY_READ_PICKLES.search(source):
        return found  # most files: parsing them all takes seconds
    for node in ast.walk(ast.parse(source)):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        if {name.partition(".")[0] for name in names} & {"pickle", "dill", "joblib", "shelve"}:
            found.append(node.lineno)  # type: ignore[attr-defined]
        if isinstance(node, ast.Call):
            loads = ast.unparse(node.func) == "torch.load"
            objects = [
                each.arg == "allow_pickle" and ast.unparse(each.value) != "False"
                for each in node.keywords
            ]
            found += [node.lineno] if loads or any(objects) else []
    return found


def test_nothing_reads_a_pickle() -> None:
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            assert not _pickles(path.read_text()), path
    for line in ("import pickle", "torch.load(p)", "np.load(p, allow_pickle=True)"):
        assert _pickles(line) == [1]
    assert _pickles("safetensors.torch.load(p)\nnp.load(p, allow_pickle=False)") == []
