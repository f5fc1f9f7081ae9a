"""Which of vLLM's own server tests pass against the gateway with its demo model.

    python -m tests.vllm_suite PATH_OF_VLLM_SOURCE [--out FOLDER] [--instruct] [TEST_FILE …]

The source is that of a release (its source distribution, unpacked); nothing of it is kept here. Test
files that start a server run one after another, each with a time limit, and the counts are written as
a table. FOLDER gets a line of JSON for each test (default: a temporary folder). With --instruct, files
that need an instruct model run against a gateway before a stand-in for one (`instruct.py`).
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.vllm_suite import groups

_TESTS = "tests/entrypoints/openai"
# Checkpoints that cannot be here, or a schema of vLLM's own server.
_LEFT_OUT = ("test_lmeval", "test_tensorizer", "test_openai_schema")
# What these ask of a model is beyond the demo model: tool calls, reasoning, long conversations.
_INSTRUCT = ("test_completion_with_function_calling", "test_include_reasoning", "test_serving_chat",
             "test_harmony", "test_mcp_tools", "test_parsable_context", "test_simple")  # fmt: skip
_FILE_S, _TEST_S = 240, 60
PASSED, REFUSED, MODEL = "passed", "refused by name", "asks for another model or adapter"
ELSE, INTERNAL, SKIPPED = "answered, and another answer was expected", "no request", "skipped"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("source", type=Path)
    parser.add_argument("files", nargs="*")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--instruct", action="store_true")
    given = parser.parse_intermixed_args()
    out = given.out or Path(tempfile.mkdtemp(prefix="vllm-suite-"))
    out.mkdir(parents=True, exist_ok=True)
    found: list[dict[str, Any]] = []
    for each in given.files or _files(given.source):
        instruct = given.instruct and Path(each).stem in _INSTRUCT
        lines = run_file(given.source.resolve(), each, out.resolve(), instruct=instruct)
        sys.stdout.write(f"{each}: {dict(Counter(map(verdict, lines)))}\n")
        sys.stdout.flush()
        found += lines
    sys.stdout.write(table(found) + f"\nEach test's outcome is in {out}.\n")


def _files(source: Path) -> list[str]:
    if not (source / _TESTS).is_dir():
        raise SystemExit(f"{source} has no {_TESTS}. Name the folder of vLLM's unpacked source.")
    return sorted(
        str(path.relative_to(source))
        for path in (source / _TESTS).rglob("test_*.py")
        if "RemoteOpenAIServer" in path.read_text() and path.stem.startswith("test_")
        if not path.stem.startswith(_LEFT_OUT)
    )


def run_file(source: Path, name: str, out: Path, *, instruct: bool = False) -> list[dict[str, Any]]:
    """The lines that the plugin wrote. A file that takes too long is cut off; what it had done counts."""
    kept = out / (name.removesuffix(".py").replace("/", ".") + ".jsonl")
    kept.unlink(missing_ok=True)
    environment = os.environ | {
        "VLLM_SUITE_OUT": str(kept),
        "PYTHONPATH": str(Path(__file__).parents[1]),
        "VLLM_SUITE_INSTRUCT": "1" if instruct else "",
    }
    command = [sys.executable, "-m", "pytest", "-p", "vllm_suite.plugin", "--noconftest"]
    command += ["-c", os.devnull, "--rootdir", ".", "-q", "-W", "ignore", "-p", "no:cacheprovider"]
    command += ["--timeout", str(_TEST_S), "--continue-on-collection-errors", name]
    with kept.with_suffix(".log").open("w") as log:
        started = subprocess.Popen(
            command, cwd=source, env=environment, stdout=log, stderr=log, start_new_session=True
        )
        try:
            with suppress(subprocess.TimeoutExpired):
                started.wait(_FILE_S)
        finally:
            groups.end(started)  # with the gateway, which a file that is cut off does not end
    text = kept.read_text() if kept.exists() else ""
    return [json.loads(line) for line in text.splitlines()]


def verdict(line: dict[str, Any]) -> str:
    """Of one test. A test that sent nothing says nothing about the gateway, passed or not."""
    if line["outcome"] == "skipped":
        return SKIPPED
    if not line["requests"]:
        return INTERNAL
    if line["outcome"] == "passed":
        return PASSED
    if line["refusal"]:
        return MODEL if " model_not_found " in line["refusal"] else REFUSED
    return ELSE


def table(lines: list[dict[str, Any]]) -> str:
    counts = Counter(map(verdict, lines))
    rows = [
        f"| {name} | {counts[name]} |" for name in (PASSED, REFUSED, MODEL, ELSE, INTERNAL, SKIPPED)
    ]
    refusals = Counter(
        line["refusal"].partition(": ")[2] for line in lines if verdict(line) == REFUSED
    )
    told = [f"{count:4} {refusal}" for refusal, count in refusals.most_common()]
    return "\n".join(["| outcome | tests |", "|---|---|", *rows, "", *told])


if __name__ == "__main__":
    main()
