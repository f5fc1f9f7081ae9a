"""Every test can fail: it asserts, or calls something that does."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
Function = ast.FunctionDef | ast.AsyncFunctionDef
# Functions of libraries that raise if what they check is wrong.
CHECKS = ("assert_", "expect", "raises", "warns", "fail")


def functions(tree: ast.AST) -> Iterator[Function]:
    for node in ast.walk(tree):
        if isinstance(node, Function):
            yield node


def names_in(node: ast.AST) -> set[str]:
    nodes = list(ast.walk(node))
    attributes = {each.attr for each in nodes if isinstance(each, ast.Attribute)}
    return attributes | {each.id for each in nodes if isinstance(each, ast.Name)}


def checks_itself(node: ast.AST) -> bool:
    """It has an assertion, raises one, calls a library's check, or runs a process that must succeed."""
    for each in ast.walk(node):
        if isinstance(each, ast.Assert):
            return True
        if isinstance(each, ast.Raise) and "AssertionError" in ast.unparse(each):
            return True
        if isinstance(each, ast.Call):
            name = getattr(each.func, "attr", getattr(each.func, "id", ""))
            if name.startswith(CHECKS) or any(
                keyword.arg == "check" and getattr(keyword.value, "value", False) is True
                for keyword in each.keywords
            ):
                return True
    return False


@cache
def parsed() -> dict[Path, ast.Module]:
    return {path: ast.parse(path.read_text()) for path in sorted(ROOT.glob("tests/**/*.py"))}


@cache
def helpers(path: Path) -> list[tuple[str, set[str], bool]]:
    """Of each function or class of a file: its name, the names in it, and whether it checks something."""
    return [
        (each.name, names_in(each), checks_itself(each))
        for each in ast.walk(parsed()[path])
        if isinstance(each, Function | ast.ClassDef) and not each.name.startswith("test_")
    ]


@cache
def reach(path: Path) -> frozenset[Path]:
    """The test files whose helpers a file can call: its own, its conftests' and the imported ones'."""
    found = {path, *(folder / "conftest.py" for folder in path.parents)}
    for node in ast.walk(parsed()[path]):
        if isinstance(node, ast.ImportFrom) and (node.level or str(node.module)[:6] == "tests."):
            base = path.parents[node.level - 1] if node.level else ROOT
            module = base / str(node.module or "").replace(".", "/")
            found |= {module.with_suffix(".py"), *(module / f"{a.name}.py" for a in node.names)}
    return frozenset(found & parsed().keys())


@cache
def checking() -> dict[Path, set[str]]:
    """By file, the helpers that check something, by themselves or by what they call."""
    found = {path: {name for name, _, own in helpers(path) if own} for path in parsed()}
    grown = True
    while grown:
        grown = False
        for path in parsed():
            known = set().union(*(found[each] for each in reach(path)))
            more = {name for name, names, _ in helpers(path) if names & known} - found[path]
            found[path] |= more
            grown = grown or bool(more)
    return found


def without_assertion(tree: ast.AST, known: set[str]) -> list[str]:
    return [
        each.name
        for each in functions(tree)
        if each.name.startswith("test_") and not checks_itself(each) and not names_in(each) & known
    ]


def test_every_test_asserts() -> None:
    found = []
    for path, tree in parsed().items():
        if path.name.startswith("test_"):
            known = set().union(*(checking()[each] for each in reach(path)))
            name = path.relative_to(ROOT).as_posix()
            found += [f"{name}: {each}" for each in without_assertion(tree, known)]
    assert not found, "these tests cannot fail; assert what their names say:\n" + "\n".join(found)


def test_a_test_without_an_assertion_is_found() -> None:
    right = "def test_a():\n assert 1\ndef test_b():\n with pytest.raises(E):\n  f()\n"
    right += "def test_e():\n helper(1)\n"
    assert not without_assertion(ast.parse(right), {"helper"})
    wrong = "def test_c():\n f(2)\ndef test_d():\n run(['x'], check=False)\n"
    assert without_assertion(ast.parse(wrong), {"helper"}) == ["test_c", "test_d"]
