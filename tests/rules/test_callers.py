"""Nothing dead: every public function, class and method of the product has a caller in it."""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("core", "gateway", "engine", "billing", "moderation", "dashboards", "migrations")
MARKUP = {".html", ".jinja", ".toml", ".mako"}
SHORT_TEXT = (
    120  # a name in a short string may be a reference (getattr, an annotation); in prose not
)

# A comment, a string with its prefix, or a name: `tokenize` reads the same in four times the time.
TOKEN = re.compile(
    r"""\#[^\n]*
    |((?:\b[rbuf]{1,2})?(?:
        \"{3}(?:[^\\]|\\.)*?\"{3} | '{3}(?:[^\\]|\\.)*?'{3}
        | "(?:[^"\\\n]|\\.)*" | '(?:[^'\\\n]|\\.)*'
    ))
    |\b([^\W\d]\w*)""",
    re.VERBOSE | re.DOTALL | re.IGNORECASE,
)

# Called by a framework through its name alone.
HOOKS = {
    "load_dialect_impl": "sqlalchemy.types.TypeDecorator",
    "process_bind_param": "sqlalchemy.types.TypeDecorator",
    "process_result_value": "sqlalchemy.types.TypeDecorator",
    "visit_column": "sqlalchemy.sql.compiler.SQLCompiler",
    "render_literal_value": "sqlalchemy.sql.compiler.SQLCompiler",
    "_missing_": "enum.Enum",
    "on_header": "httptools.HttpResponseParser",
}
# The fake payment provider's controls, which only tests turn.
CONTROLS = ("billing/payments/fake_stripe/", "billing/payments/fake.py")


def _mentions() -> Counter[str]:
    words: Counter[str] = Counter()
    for top in (*PACKAGES, "benchmarks", "training"):
        for path in (ROOT / top).rglob("*"):
            if path.suffix == ".py":
                words.update(_names(path.read_text()))
            elif path.suffix in MARKUP:
                words.update(re.findall(r"\w+", path.read_text()))
    return words


def _names(source: str) -> Iterator[str]:
    for string, name in TOKEN.findall(source):
        if name:
            yield name
        elif string and (len(string) < SHORT_TEXT or string[0] in "fF"):
            yield from set(re.findall(r"\w+", string))


def _definitions(
    body: list[ast.stmt],
) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]:
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            decorators = " ".join(ast.unparse(each) for each in node.decorator_list)
            registered = any(each in decorators for each in (".", "validator(", "compiles("))
            if isinstance(node, ast.ClassDef):
                yield from _definitions(node.body)
            if not node.name.startswith("__") and not registered:
                yield node


def test_every_name_has_a_caller_outside_the_tests() -> None:
    mentions = _mentions()
    defined: dict[str, list[str]] = {}
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            place = path.relative_to(ROOT).as_posix()
            if place.startswith(CONTROLS):
                continue
            for node in _definitions(ast.parse(path.read_text()).body):
                defined.setdefault(node.name, []).append(f"{place}:{node.lineno}")
    dead = {
        name: places
        for name, places in defined.items()
        if mentions[name] <= len(places) and name not in HOOKS
    }
    assert not dead, f"without a caller: {dead}"
