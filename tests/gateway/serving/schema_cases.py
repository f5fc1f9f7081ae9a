"""Sends every operation of the product's own OpenAPI document what schemathesis draws from it, and judges
each answer by the document:

    python -m tests.gateway.serving.schema_cases [--examples N] [--seed S] [--results FILE]

Half of the cases are valid, half break the document in one place. No answer may be a server error (503
with a code excepted); status, content type, headers and body must be as announced; an error has one of
two shapes. What differs is printed, and the command ends with 1.
"""

import argparse
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from schemathesis import GenerationMode
from schemathesis.checks import CHECKS

from tests.gateway.deployment import running_deployment

_METHODS = ("get", "post", "put", "patch", "delete")
_JSON_RPC = "/mcp"  # its errors have the shape of that protocol
_SHAPES = ({"error"}, {"type", "error", "request_id"})  # OpenAI's, Anthropic's
_BY_DOCUMENT = (
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
)


@dataclass
class Found:
    """`statuses`: how many answers had each."""

    problems: list[str] = field(default_factory=list)
    statuses: Counter[int] = field(default_factory=Counter)

    @property
    def sent(self) -> int:
        return sum(self.statuses.values())


def document_of(url: str) -> dict[str, Any]:
    found: dict[str, Any] = httpx.get(f"{url}/openapi.json", timeout=60).json()
    return found


def try_all(
    url: str, secrets: tuple[str, str], document: dict[str, Any], *, examples: int, drawn_by: int
) -> Found:
    """Every operation, `examples` times with valid cases and as often with others. secrets: a tenant's
    key and the operator's token."""
    key, operator_token = secrets
    schema, found = schemathesis.openapi.from_dict(document), Found()
    checks = CHECKS.get_by_names(list(_BY_DOCUMENT))
    for path, operations in document["paths"].items():
        headers = {
            "authorization": f"Bearer {operator_token if path.startswith('/admin/') else key}"
        }
        for method in sorted({*operations} & {*_METHODS}):
            operation = schema[path][method.upper()]
            for mode in GenerationMode:
                for case in _cases(operation, mode, examples, drawn_by):
                    answer = case.call(base_url=url, headers=headers, timeout=60)
                    found.statuses[answer.status_code] += 1
                    for problem in (*_problem(answer), *_differences(case, answer, checks)):
                        found.problems.append(f"{method} {path} ({mode.value}): {problem}")
    return found


def _cases(operation: Any, mode: GenerationMode, examples: int, drawn_by: int) -> list[Any]:
    cases: list[Any] = []

    @seed(drawn_by)
    @settings(
        max_examples=examples,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(mode))
    def _draw(case: Any) -> None:
        cases.append(case)

    try:
        _draw()
    except Exception as error:
        # Nothing of an operation without parameters and body can be wrong.
        if type(error).__name__ not in ("Unsatisfiable", "SkipTest", "Skipped"):
            raise
    return cases


def _differences(case: Any, answer: Any, checks: list[Any]) -> Iterator[str]:
    """From what the document announces."""
    for check in checks:
        try:
            case.validate_response(answer, checks=[check])
        except schemathesis.errors.SchemathesisError:
            raise
        except BaseException as error:  # a group of failures, which is an exception of its own kind
            if isinstance(error, KeyboardInterrupt | SystemExit):
                raise
            listed = getattr(error, "exceptions", (error,))
            for each in listed:
                yield f"{check.__name__}: {str(each)[:300]!r} in {_shown(answer)}"


def _shown(answer: Any) -> str:
    return f"{answer.status_code} {answer.text[:300]} of {answer.request.body!r:.300}"


def _problem(answer: Any) -> list[str]:
    shown = _shown(answer)
    if answer.status_code < 400:
        return []
    if answer.status_code >= 500 and answer.status_code != 503:
        return [shown]
    try:
        body = answer.json()
        error = body["error"]
    except (ValueError, KeyError, TypeError):
        return [shown]
    if answer.status_code == 503 and not error.get("code"):
        return [shown]
    if _JSON_RPC in answer.request.url:
        return [] if body.get("jsonrpc") == "2.0" or error.get("message") else [shown]
    right = {*body} in _SHAPES and error.get("message") and error.get("type")
    return [] if right else [shown]


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests.gateway.serving.schema_cases", description=__doc__)
    parser.add_argument("--examples", type=int, default=20, help="of each kind and operation")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--results", type=Path, help="a file of JSON lines to add the counts to")
    chosen = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as folder,
        running_deployment(Path(folder)) as deployment,
    ):
        found = try_all(
            deployment.url,
            (deployment.key, deployment.services.operator_token),
            document_of(deployment.url),
            examples=chosen.examples,
            drawn_by=chosen.seed,
        )
    for each in found.problems:
        sys.stdout.write(f"{each}\n")
    line = {
        "proof": "schema_cases",
        "seed": chosen.seed,
        "examples": chosen.examples,
        "sent": found.sent,
        "statuses": {str(status): n for status, n in sorted(found.statuses.items())},
        "problems": len(found.problems),
    }
    sys.stdout.write(f"{json.dumps(line)}\n")
    if chosen.results is not None:
        with chosen.results.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
    return int(bool(found.problems))


if __name__ == "__main__":
    sys.exit(main())
