"""The engine can be read part by part: each part is small, and the library does without the worker."""

import ast
import io
import tokenize
from pathlib import Path

import engine

ROOT = Path(engine.__file__).parent
WORKER = {path.stem for path in (ROOT / "worker").glob("[a-z]*.py")}
LIBRARY = [
    path
    for path in sorted(ROOT.rglob("*.py"))
    if "demo" not in path.relative_to(ROOT).parts and path.stem not in WORKER
]
# Code lines that each part may have: what somebody reads to understand it. `""` is the top level.
# `models/families` is one short file for each family, read one at a time; `layers` has mixtures of
# experts, layer norms beside RMS norms, and attention with sinks, ALiBi or latent vectors;
# and what adapters change beside sums of low rank, there and inside of these. `cache` has blocks in two
# parts, for layers with a window and for the others. The top level has the file of receipts, which goes
# on where a disk is full. `layers` and `scheduling` have positions that stay where others are dropped.
# `decoding/grammar` bounds what grammars cost, and follows them in a thread beside the model; `decoding`
# draws few allowed ids from their logits alone. `dense` has all layers in one call, mixtures of experts
# among them, and `layers` masks that are made where they are read. `kernels` and `execution` have graphs
# of any mix of decoding sequences and prompt chunks, and `execution` those of adapters with DoRA.
# `streams` says what a device does there, as a CPU does it; `kernels/altup` is how a GPU does.
# `execution`, `kernels` and `scheduling` have answers on a GPU that see a part of their prompt.
# `dense` has packed adapters, which `layers` asks for a product with the base's and `execution` chooses.
# `cache`, `execution`, `kernels` and `layers` have blocks in two parts on a GPU, too, as pages.
LIMITS = {
    "": 1345,
    "cache": 620,
    "decoding": 730,
    "decoding/grammar": 1085,
    "dense": 570,
    "execution": 1300,
    "kernels": 2075,
    "kernels/adapters": 880,
    "kernels/altup": 370,
    "kernels/formats": 420,
    "kernels/latent": 260,
    "kernels/sampler": 260,
    "layers": 1845,
    "lora": 1010,
    "lora/peft": 600,
    "models": 1415,
    "models/families": 640,
    "models/formats": 450,
    "models/gguf": 950,
    "quantization": 615,
    "quantization/device": 210,
    "scheduling": 1240,
    "search": 300,
    "speculation": 755,
    "streams": 255,
    "tiers": 740,
}
NO_CODE = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
    tokenize.ENDMARKER,
}  # fmt: skip


def code_lines(source: str) -> int:
    """Lines with something on them that is neither a comment nor a docstring."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NO_CODE:
            lines |= set(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(
            node
        ):
            lines -= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    return len(lines)


def imported(source: str) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def test_lines_are_counted_as_said() -> None:
    assert code_lines('"""Doc\nover two."""\n\n# why\nx = (\n    1,  # one\n)\n') == 3


def part_of(path: Path) -> str:
    """The folder with a limit of its own, the innermost one."""
    folders = [str(each) for each in path.relative_to(ROOT).parents]
    return next((each for each in folders if each in LIMITS), "")


def test_each_part_of_the_library_stays_small() -> None:
    lines = dict.fromkeys(LIMITS, 0)
    for path in LIBRARY:
        lines[part_of(path)] += code_lines(path.read_text())
    assert not {part: n for part, n in lines.items() if n > LIMITS[part]}
    assert all(lines.values()), "a limit without a part"


def test_the_library_does_without_the_worker() -> None:
    foreign = {"zmq", "msgspec", *(f"engine.worker.{name}" for name in WORKER)}
    for path in LIBRARY:
        assert not imported(path.read_text()) & foreign, path


def test_the_page_says_which_files_are_the_workers() -> None:
    page = (ROOT / "README.md").read_text()
    section = page.split("## The library and the worker")[1].split("\n## ")[0]
    assert all(f"`worker/{name}.py`" in section for name in WORKER)
