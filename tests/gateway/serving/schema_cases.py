"""Sends every operation of the product's own OpenAPI document what schemathesis draws from it, and judges
each answer by the document:

    python -m tests.gateway.serving.schema_cases [--examples N] [--seed S] [--results FILE]

Half of the cases are valid, half break the document in one place. Each has the right key, and paths name
objects that were made for it. No answer may be a server error (503
with a code excepted); status, content type, headers and body must be as announced; an error has one of
two shapes. What differs is printed, and the command ends with 1.
"""

import argparse
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from schemathesis import GenerationMode
from schemathesis.checks import CHECKS

from tests.gateway.deployment import running_deployment

_METHODS = ("get", "post", "put", "patch", "delete")
Make = Callable[[], str]
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
    schema, found = schemathesis.openapi.from_dict(_without_keys(document)), Found()
    makers = object_makers(url, key) | tenant_makers(url, operator_token)
    tenant = makers["/admin/v1/tenants/{tenant}"]()
    checks = CHECKS.get_by_names(list(_BY_DOCUMENT))
    for path, operations in document["paths"].items():
        headers = {
            "authorization": f"Bearer {operator_token if path.startswith('/admin/') else key}"
        }
        for method in sorted({*operations} & {*_METHODS}):
            operation = schema[path][method.upper()]
            for mode in GenerationMode:
                for case in _cases(operation, mode, examples, drawn_by):
                    _name_objects(case, path, makers)
                    if isinstance(case.query, dict) and "tenant" in case.query:
                        case.query["tenant"] = tenant
                    answer = case.call(base_url=url, headers=headers, timeout=60)
                    found.statuses[answer.status_code] += 1
                    for problem in (*_problem(answer), *_differences(case, answer, checks)):
                        found.problems.append(f"{method} {path} ({mode.value}): {problem}")
    return found


def _without_keys(document: dict[str, Any]) -> dict[str, Any]:
    """Without the need of a key: what breaks the document in one place would else leave that out."""
    paths = {
        path: {
            name: {k: v for k, v in it.items() if k != "security"} if name in _METHODS else it
            for name, it in operations.items()
        }
        for path, operations in document["paths"].items()
    }
    return {k: v for k, v in document.items() if k != "security"} | {"paths": paths}


def object_makers(url: str, key: str) -> dict[str, Make]:
    """By the part of a path that ends in an object's name: makes one, and returns its name."""
    headers = {"authorization": f"Bearer {key}"}
    listed = httpx.get(f"{url}/v1/models", headers=headers, timeout=60)
    model = str(listed.json()["data"][0]["id"])
    said = [{"role": "user", "content": "Hi"}]

    def _made(path: str, **body: Any) -> str:
        answer = httpx.post(f"{url}{path}", headers=headers, timeout=60, **body)
        assert answer.status_code < 300, f"{path}: {answer.text}"
        return str(answer.json()["id"])

    def _file() -> str:
        line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions"}
        line["body"] = {"model": model, "messages": said}  # type: ignore[assignment]
        files = {"file": ("a.jsonl", json.dumps(line).encode())}
        return _made("/v1/files", data={"purpose": "batch"}, files=files)

    def _batch() -> str:
        asked = {"endpoint": "/v1/chat/completions", "completion_window": "24h"}
        return _made("/v1/batches", json=asked | {"input_file_id": _file()})

    def _messages() -> str:
        params = {"model": model, "max_tokens": 1, "messages": said}
        asked = {"requests": [{"custom_id": "a", "params": params}]}
        return _made("/v1/messages/batches", json=asked)

    return {
        "/v1/models/{model}": lambda: model,
        "/v1/files/{file_id}": _file,
        "/v1/batches/{batch_id}": _batch,
        "/v1/messages/batches/{batch_id}": _messages,
        "/v1/conversations/{conversation_id}": lambda: _made("/v1/conversations", json={}),
        "/v1/responses/{response_id}": lambda: _made(
            "/v1/responses", json={"model": model, "input": "Hi", "max_output_tokens": 16}
        ),
        "/v1/chat/completions/{completion_id}": lambda: _made(
            "/v1/chat/completions",
            json={"model": model, "messages": said, "store": True, "max_tokens": 2},
        ),
    }


def tenant_makers(url: str, operator_token: str) -> dict[str, Make]:
    """As `object_makers`, of what the operator makes."""
    headers = {"authorization": f"Bearer {operator_token}"}

    def _tenant() -> dict[str, str]:
        name = f"drawn-{uuid4().hex[:12]}"
        body = {"name": name, "plan": "free"}
        answer = httpx.post(f"{url}/admin/v1/tenants", headers=headers, json=body, timeout=60)
        assert answer.status_code < 300, answer.text
        return {"name": name, "project": answer.json()["project_id"]}

    def _key() -> str:
        made = _tenant()
        body = {"project_id": made["project"], "name": "k", "role": "owner"}
        answer = httpx.post(
            f"{url}/admin/v1/keys",
            headers=headers,
            params={"tenant": made["name"]},
            json=body,
            timeout=60,
        )
        assert answer.status_code < 300, answer.text
        return str(answer.json()["id"])

    return {
        "/admin/v1/tenants/{tenant}": lambda: _tenant()["name"],
        "/admin/v1/tenants/{name}": lambda: _tenant()["name"],
        "/admin/v1/projects/{project_id}": lambda: _tenant()["project"],
        "/admin/v1/keys/{key_id}": _key,
    }


def _name_objects(case: Any, path: str, makers: dict[str, Make]) -> None:
    for stem, make in makers.items():
        if path == stem or path.startswith(stem + "/"):
            case.path_parameters[stem.rpartition("{")[2].rstrip("}")] = make()


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
    text = answer.content[:300].decode(errors="replace")  # an archive is no text
    return f"{answer.status_code} {text} of {answer.request.body!r:.300}"


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
