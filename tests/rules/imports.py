"""What the sources import, read from their syntax trees: nothing is executed."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = (
    "core",
    "gateway",
    "engine",
    "billing",
    "moderation",
    "dashboards",
    "migrations",
    "training",
)
_LOADERS = ("import_module", "importlib.import_module", "__import__", "find_spec", "require")


@dataclass(frozen=True, slots=True)
class Import:
    module: str  # the importing one
    line: int
    name: str  # the imported one, dotted
    lazy: bool  # within a function, a guard or TYPE_CHECKING

    @property
    def top(self) -> str:
        return self.name.partition(".")[0]

    def __str__(self) -> str:
        return f"{self.module}:{self.line} imports {self.name}"


@cache
def modules() -> dict[str, Path]:
    found = {}
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def imports_of(module: str) -> tuple[Import, ...]:
    return tuple(read(module, modules()[module].read_text(encoding="utf-8")))


def read(module: str, source: str) -> Iterator[Import]:
    yield from _below(ast.parse(source), module, lazy=False)


def dotted(node: ast.expr) -> str:
    """Such as `importlib.import_module`; what is neither a name nor an attribute is `()`."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    parts.append(node.id if isinstance(node, ast.Name) else "()")
    return ".".join(reversed(parts))


def functions_in(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Every function, nested ones and methods too. Expressions, which hold none, are not walked."""
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield child
        if isinstance(child, ast.stmt | ast.ExceptHandler | ast.match_case):
            yield from functions_in(child)


def reachable(entries: list[str]) -> set[str]:
    """Our modules that are loaded when the entries are imported."""
    seen: set[str] = set()
    waiting = list(entries)
    while waiting:
        name = waiting.pop()
        while name and name not in modules():
            name = name.rpartition(".")[0]  # an attribute of a module
        if not name or name in seen:
            continue
        seen.add(name)
        waiting.append(name.rpartition(".")[0])  # a package is loaded before its modules
        waiting += [each.name for each in imports_of(name) if not each.lazy]
    return seen


def _below(node: ast.AST, module: str, *, lazy: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        yield from _names(child, module, lazy=lazy)
        deferred = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        guarded = isinstance(child, ast.If | ast.Try | ast.With)
        yield from _below(child, module, lazy=lazy or deferred or guarded)


def _names(node: ast.AST, module: str, *, lazy: bool) -> Iterator[Import]:
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield Import(module, node.lineno, alias.name, lazy)
    elif isinstance(node, ast.ImportFrom):
        assert node.level == 0 and node.module, f"{module}:{node.lineno}: a relative import"
        for alias in node.names:
            yield Import(module, node.lineno, f"{node.module}.{alias.name}", lazy)
    elif isinstance(node, ast.Call) and dotted(node.func) in _LOADERS and node.args:
        given = node.args[0]
        if isinstance(given, ast.Constant) and isinstance(given.value, str):
            yield Import(module, node.lineno, given.value, lazy)
