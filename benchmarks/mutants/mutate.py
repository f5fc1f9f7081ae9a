"""Single-edit mutants of a Python source file.

The operators are the classical ones (DeMillo, Lipton and Sayward, 1978; Offutt's sufficient set):
relational, arithmetic and logical operators are replaced, constants move by one, conditions are
negated, statements are deleted and return values dropped. Annotations, docstrings, log calls and
error texts are left alone: no test should depend on their wording. So are `frozen` and `slots` of a
class, assertions, and blocks for type checkers: nothing that runs depends on them.
"""

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass

_COMPARE: dict[type[ast.cmpop], tuple[str, ...]] = {
    ast.Lt: ("<=", ">="),
    ast.LtE: ("<", ">"),
    ast.Gt: (">=", "<="),
    ast.GtE: (">", "<"),
    ast.Eq: ("!=",),
    ast.NotEq: ("==",),
    ast.Is: ("is not",),
    ast.IsNot: ("is",),
    ast.In: ("not in",),
    ast.NotIn: ("in",),
}
_ARITHMETIC: dict[type[ast.operator], str] = {
    ast.Add: "-",
    ast.Sub: "+",
    ast.Mult: "//",
    ast.FloorDiv: "*",
    ast.Div: "*",
    ast.Mod: "+",
}
_OF_TYPES = {"frozen", "slots"}
_LOGS = {"debug", "info", "warning", "error", "exception"}


@dataclass(frozen=True, slots=True)
class Mutant:
    path: str  # relative to the repository
    line: int  # 1-based
    before: str
    after: str
    start: int  # offsets in UTF-8 bytes
    end: int
    statement: int  # first line of the innermost statement around it
    statement_end: int  # its last line, or that of its header where it has a body

    def apply(self, source: bytes) -> bytes:
        return source[: self.start] + self.after.encode() + source[self.end :]


class _Finder(ast.NodeVisitor):
    def __init__(self, path: str, source: bytes) -> None:
        self.path = path
        self.source = source
        self.found: list[Mutant] = []
        self._statement = (1, 1)
        self._starts = [0]
        for line in source.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))

    def visit(self, node: ast.AST) -> None:
        outer = self._statement
        if isinstance(node, ast.stmt):
            self._statement = (node.lineno, _header_end(node))
        super().visit(node)
        self._statement = outer

    def _offset(self, line: int, column: int) -> int:
        return self._starts[line - 1] + column

    def _span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None and node.end_col_offset is not None
        return (
            self._offset(node.lineno, node.col_offset),
            self._offset(node.end_lineno, node.end_col_offset),
        )

    def _replace(self, node: ast.expr | ast.stmt, after: str) -> None:
        start, end = self._span(node)
        before = self.source[start:end].decode()
        if before != after:
            self.found.append(
                Mutant(self.path, node.lineno, before, after, start, end, *self._statement)
            )

    def _between(self, left: ast.expr, right: ast.expr, old: str, new: str) -> None:
        """Replace the operator between two operands, wherever white space puts it."""
        start, end = self._span(left)[1], self._span(right)[0]
        at = self.source.find(old.encode(), start, end)
        if at >= 0:
            self.found.append(
                Mutant(
                    self.path, right.lineno, old, new, at, at + len(old.encode()), *self._statement
                )
            )

    def visit_Compare(self, node: ast.Compare) -> None:
        operands = [node.left, *node.comparators]
        for left, operator, right in zip(operands, node.ops, operands[1:], strict=False):
            text = _text_of(operator)
            for other in _COMPARE.get(type(operator), ()):
                self._between(left, right, text, other)
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        other = _ARITHMETIC.get(type(node.op))
        if other is not None and not isinstance(node.left, ast.Constant | ast.JoinedStr):
            self._between(node.left, node.right, _text_of(node.op), other)
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        old, new = (" and ", " or ") if isinstance(node.op, ast.And) else (" or ", " and ")
        for left, right in zip(node.values, node.values[1:], strict=False):
            self._between(left, right, old.strip(), new.strip())
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not | ast.USub):
            self._replace(node, ast.unparse(node.operand))
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self._replace(node, str(not node.value))
        elif isinstance(node.value, int):
            self._replace(node, str(node.value + 1))

    def visit_keyword(self, node: ast.keyword) -> None:
        if node.arg not in _OF_TYPES:
            self.generic_visit(node)

    def visit_If(self, node: ast.If) -> None:
        if ast.unparse(node.test) in ("TYPE_CHECKING", "__name__ == '__main__'"):
            return
        self._negate(node.test)
        self.generic_visit(node)

    def visit_While(self, node: ast.While) -> None:
        self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self._negate(node.test)
        self.generic_visit(node)

    def _negate(self, test: ast.expr) -> None:
        if not isinstance(test, ast.Compare | ast.UnaryOp):
            self._replace(test, f"(not ({ast.unparse(test)}))")

    def visit_Return(self, node: ast.Return) -> None:
        if node.value is not None and not isinstance(node.value, ast.Constant):
            self._replace(node, "return None")
        self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Constant | ast.Yield | ast.YieldFrom):
            return
        if not _is_log(node.value):
            self._replace(node, "pass")
            self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self._replace(node, "pass")
        self.generic_visit(node)

    def visit_Raise(self, node: ast.Raise) -> None:
        self._replace(node, "pass")

    def visit_Assert(self, node: ast.Assert) -> None:
        """It narrows a type: no input makes it fail."""

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        for default in [*node.args.defaults, *node.args.kw_defaults]:
            if default is not None:
                self.visit(default)
        for statement in node.body:
            self.visit(statement)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        for statement in node.body:
            self.visit(statement)


def _header_end(node: ast.stmt) -> int:
    body = getattr(node, "body", None)
    if body:
        return max(node.lineno, int(body[0].lineno) - 1)
    return node.end_lineno or node.lineno


def _text_of(operator: ast.cmpop | ast.operator) -> str:
    texts = {
        ast.Lt: "<",
        ast.LtE: "<=",
        ast.Gt: ">",
        ast.GtE: ">=",
        ast.Eq: "==",
        ast.NotEq: "!=",
        ast.Is: "is",
        ast.IsNot: "is not",
        ast.In: "in",
        ast.NotIn: "not in",
        ast.Add: "+",
        ast.Sub: "-",
        ast.Mult: "*",
        ast.FloorDiv: "//",
        ast.Div: "/",
        ast.Mod: "%",
    }
    return texts.get(type(operator), "\0")


def _is_log(node: ast.expr) -> bool:
    call = node.value if isinstance(node, ast.Await) else node
    return (
        isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and call.func.attr in _LOGS
    )


def mutants_of(
    path: str, source: bytes, wanted: Callable[[Mutant], bool] = lambda _mutant: True
) -> Iterator[Mutant]:
    """Every mutant that is wanted and still parses, in the order of the file."""
    finder = _Finder(path, source)
    finder.visit(ast.parse(source))
    seen: set[tuple[int, int, str]] = set()
    for mutant in sorted(finder.found, key=lambda each: (each.start, each.end)):
        key = (mutant.start, mutant.end, mutant.after)
        if key in seen:
            continue
        seen.add(key)
        if not wanted(mutant):
            continue
        try:
            ast.parse(mutant.apply(source))
        except SyntaxError:
            continue
        yield mutant
