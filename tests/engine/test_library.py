"""The library part of the engine does without the worker and its libraries."""

import ast
from pathlib import Path

import engine

ROOT = Path(engine.__file__).parent
WORKER = {path.stem for path in (ROOT / "worker").glob("[a-z]*.py")}
LIBRARY = [
    path
    for path in sorted(ROOT.rglob("*.py"))
    if "demo" not in path.relative_to(ROOT).parts and path.stem not in WORKER
]


def imported(source: str) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def test_the_library_does_without_the_worker() -> None:
    foreign = {"zmq", "msgspec", *(f"engine.worker.{name}" for name in WORKER)}
    for path in LIBRARY:
        assert not imported(path.read_text()) & foreign, path


def test_the_page_says_which_files_are_the_workers() -> None:
    page = (ROOT / "README.md").read_text()
    section = page.split("## The library and the worker")[1].split("\n## ")[0]
    assert all(f"`worker/{name}.py`" in section for name in WORKER)
