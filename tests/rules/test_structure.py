"""The project's own rules, read from the tree: one direction, one noun a file, and who may make what."""

import ast
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

from tests.rules.imports import dotted, functions_in

ROOT = Path(__file__).parents[2]
PACKAGES = ("core", "gateway", "engine", "billing", "moderation", "dashboards", "migrations")
MOST_LINES = 700
MOST_POSITIONAL = 6
# Up to a parenthesis that ends it; files without a long one are not parsed.
SIGNATURE = re.compile(r"\bdef \w+\((.*?)\)\s*(?:->|:)", re.DOTALL)
PIPELINE_LINES = 160  # `gateway/serving/pipeline.py` is read as the path of a request


def sources() -> list[Path]:
    found = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    return [path for path in found if "versions" not in path.parts]


def lines_of(path: Path) -> int:
    return len(path.read_text().splitlines())


def test_no_source_file_is_over_the_cap() -> None:
    long = {str(p.relative_to(ROOT)): lines_of(p) for p in sources() if lines_of(p) > MOST_LINES}
    assert not long, f"two nouns in one file? {long}"


def test_the_pipeline_is_read_on_one_screen() -> None:
    assert lines_of(ROOT / "gateway" / "serving" / "pipeline.py") < PIPELINE_LINES


def test_an_init_file_holds_no_logic() -> None:
    for path in sources():
        if path.name != "__init__.py":
            continue
        for node in _tree(path).body:
            allowed = isinstance(node, ast.Import | ast.ImportFrom) or (
                isinstance(node, ast.Expr | ast.Assign) and "__all__" in ast.unparse(node)
            )
            docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            assert allowed or docstring, f"{path}: {ast.unparse(node)[:60]}"


def test_the_layers_hold() -> None:
    tool = Path(sys.executable).with_name("lint-imports")
    result = subprocess.run(
        [tool, "--no-cache"], cwd=ROOT, capture_output=True, text=True, timeout=100
    )
    assert result.returncode == 0, result.stdout + result.stderr


WITHOUT_TORCH = (
    "engine",
    "engine.models.registry",
    "engine.worker.server",
    "billing.tasks",
    "dashboards.app",
    "gateway.app",
    "gateway.cli.main",
)


def test_importing_them_loads_no_torch() -> None:
    """In one process: who loads it first is named."""
    code = "import importlib, sys\nfor name in sys.argv[1:]:\n    importlib.import_module(name)\n"
    code += "    if 'torch' in sys.modules: sys.exit(f'{name} imports torch')"
    command = [sys.executable, "-c", code, *WITHOUT_TORCH]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def _calls(path: Path) -> list[tuple[str, int]]:
    """Functions that are called by a name, with their lines."""
    found = []
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.Call) and (name := dotted(node.func)):
            found.append((name, node.lineno))
    return found


def _positional(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    names = [argument.arg for argument in node.args.posonlyargs + node.args.args]
    return len(names) - (names[:1] in (["self"], ["cls"]))


def too_many_positional(tree: ast.AST) -> list[str]:
    """Functions with more than six positional parameters. Triton's kernels are exempt: a launch takes
    flat scalars, and its compiler knows no keyword-only parameters."""
    return [
        f"{node.name} takes {_positional(node)}"
        for node in functions_in(tree)
        if _positional(node) > MOST_POSITIONAL
        and not any("triton.jit" in ast.unparse(each) for each in node.decorator_list)
    ]


def test_no_function_takes_more_than_six_positional_arguments() -> None:
    paths = [
        path
        for top in (*PACKAGES, "benchmarks", "tests")
        for path in (ROOT / top).rglob("*.py")
        if any(
            signature.count(",") >= MOST_POSITIONAL
            for signature in SIGNATURE.findall(path.read_text())
        )
    ]
    assert len(paths) > 100
    found = {str(path.relative_to(ROOT)): too_many_positional(_tree(path)) for path in paths}
    assert not {name: functions for name, functions in found.items() if functions}


def _found(source: str) -> list[str]:
    return too_many_positional(ast.parse(source))


def test_a_seventh_positional_argument_is_found() -> None:
    assert _found("def f(a, b, c, d, e, f, g): ...") == ["f takes 7"]
    assert _found("class A:\n    def f(self, a, b, c, d, e, f): ...") == []
    assert _found("def f(a, b, c, d, e, f, *, g=1): ...") == []
    seven = "def f(a, b, c, d, e, f, g): ..."
    for within in (
        "if a:\n {}",
        "if a:\n pass\nelse:\n {}",
        "try:\n {}\nexcept E:\n pass",
        "try:\n pass\nexcept E:\n {}",
        "def g():\n async {}",
        "match a:\n case 1:\n  {}",
        "with a:\n {}",
    ):
        assert _found(within.format(seven)) == ["f takes 7"], within


def test_only_the_scope_file_makes_a_tenant_scope() -> None:
    for path in sources():
        if path.relative_to(ROOT).as_posix() == "core/tenants/scope.py":
            continue
        makers = [line for name, line in _calls(path) if name.endswith("TenantScope")]
        assert not makers, f"{path}:{makers} makes a TenantScope"


def test_only_the_composition_sees_all_services() -> None:
    """Routes and pages receive what they use; they are not handed a locator of everything."""
    composition = {
        "gateway/app.py",
        "gateway/admin/dashboard.py",
        "gateway/wiring.py",
        "gateway/serving/api/dependencies.py",
    }
    users = {
        path.relative_to(ROOT).as_posix()
        for path in sources()
        if "from gateway.serving.services import" in path.read_text()
    }
    assert users == composition


def test_the_composition_root_builds_in_three_functions() -> None:
    tree = ast.parse((ROOT / "gateway" / "wiring.py").read_text())
    build = next(n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == "build")
    names = [ast.unparse(n.func) for n in ast.walk(build) if isinstance(n, ast.Call)]
    assert len({name for name in names if name.startswith("_build_")}) == 3


def test_only_the_clock_reads_the_system_time() -> None:
    forbidden = {"datetime.now", "datetime.utcnow", "time.time", "date.today"}
    for path in sources():
        parts = path.relative_to(ROOT).parts
        if parts[0] == "engine" or path.name in ("clock.py", "ids.py"):
            continue  # the engine has no calendar; ids only sort
        found = [(name, line) for name, line in _calls(path) if name in forbidden]
        assert not found, f"{path} reads the clock itself: {found}"


def test_pydantic_stays_at_the_edges() -> None:
    for path in sources():
        where = path.relative_to(ROOT).as_posix()
        if where.startswith(
            ("gateway/formats/", "gateway/serving/api/", "gateway/admin/", "gateway/app")
        ) or where in ("core/settings.py",):
            continue
        assert (
            "import pydantic" not in path.read_text() and "from pydantic" not in path.read_text()
        ), f"{where} uses pydantic away from the edges"


def test_across_packages_there_are_only_ids() -> None:
    for path in (*(ROOT / "billing").glob("*/tables.py"), ROOT / "moderation" / "models.py"):
        text = path.read_text()
        assert "relationship(" not in text
        assert 'ForeignKey("tenants.' not in text
