"""Puts a mutant into a process: into the functions that are there, and into later imports."""

import ast
import gc
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

from benchmarks.mutants.mutate import Mutant

ROOT = Path(__file__).parents[2]


def is_inside_function(mutant: Mutant, source: bytes) -> bool:
    """Only such a mutant can be put into a module that is imported already."""
    return enclosing_function(mutant, source) is not None


def install(mutant: Mutant) -> bool:
    """False where the module is imported and its functions cannot be given the changed code."""
    path = ROOT / mutant.path
    source = path.read_bytes()
    changed = mutant.apply(source)
    _serve_to_imports(path, changed)
    if not any(getattr(m, "__file__", None) == str(path) for m in list(sys.modules.values())):
        return True
    name = enclosing_function(mutant, source)
    if name is None:
        return False
    old, new = (_codes(compile(text, str(path), "exec"), name) for text in (source, changed))
    return len(old) == len(new) and all(map(_replace, old, new))


def _serve_to_imports(path: Path, changed: bytes) -> None:
    plain = SourceFileLoader.get_code

    def _get_code(self: SourceFileLoader, fullname: str) -> Any:
        if self.path == str(path):
            return compile(changed, str(path), "exec", dont_inherit=True)
        return plain(self, fullname)

    setattr(SourceFileLoader, "get_code", _get_code)  # noqa: B010 - as mypy has it, a constant


def enclosing_function(mutant: Mutant, source: bytes) -> str | None:
    """The qualified name of the function or method whose body holds the mutant; what is inside it
    (closures, lambdas, comprehensions) is made anew whenever it runs."""
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def _search(body: list[ast.stmt], prefix: str) -> str | None:
        for node in body:
            if isinstance(node, ast.ClassDef):
                found = _search(node.body, f"{prefix}{node.name}.")
                if found is not None:
                    return found
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                first, last = node.body[0], node.body[-1]
                start = starts[first.lineno - 1] + first.col_offset
                end = starts[(last.end_lineno or 0) - 1] + (last.end_col_offset or 0)
                if start <= mutant.start and mutant.end <= end:
                    return f"{prefix}{node.name}"
        return None

    return _search(ast.parse(source).body, "")


def _codes(module: CodeType, name: str) -> list[CodeType]:
    """Every code of that qualified name, in the order of the file: a property has two or three."""
    found: list[CodeType] = []
    for each in module.co_consts:
        if isinstance(each, CodeType):
            found += [each] if each.co_qualname == name else _codes(each, name)
    return found


def _replace(old: CodeType, new: CodeType) -> bool:
    if old == new:
        return True
    gc.unfreeze()  # what the tests' collector leaves alone is not among its objects
    live = [each for each in gc.get_objects() if _runs(each, old)]
    try:
        for each in live:
            each.__code__ = new
    except ValueError:  # another number of free variables: `super()` is gone
        return False
    return bool(live)


def _runs(each: object, code: CodeType) -> bool:
    return (
        type(each) is FunctionType
        and each.__code__.co_filename == code.co_filename
        and each.__code__.co_qualname == code.co_qualname
        and each.__code__.co_firstlineno == code.co_firstlineno
    )
