"""Every operation of the product's own OpenAPI document, with bodies and parameters drawn from it: no
server error, and every client error in the shape that the errors have, with an announced status."""

from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings

from tests.gateway.deployment import Deployment

EXAMPLES = 4
_METHODS = ("get", "post", "put", "patch", "delete")
_JSON_RPC = "/mcp"  # its errors have the shape of that protocol
_SHAPES = ({"error"}, {"type", "error", "request_id"})  # OpenAI's, Anthropic's


@pytest.mark.proof
def test_no_operation_has_a_server_error_or_an_error_of_another_shape(
    deployment: Deployment,
) -> None:
    document = httpx.get(f"{deployment.url}/openapi.json", timeout=60).json()
    schema = schemathesis.openapi.from_dict(document)
    found: list[str] = []
    sent = 0
    for path, operations in document["paths"].items():
        secret = deployment.key
        if path.startswith("/admin/"):
            secret = deployment.services.operator_token
        for method in sorted({*operations} & {*_METHODS}):
            operation = schema[path][method.upper()]
            answers = _answers(operation, deployment.url, {"authorization": f"Bearer {secret}"})
            found += [
                f"{method} {path}: {problem}" for each in answers for problem in _problem(each)
            ]
            announced = operations[method]["responses"].keys()
            statuses = {str(each.status_code) for each in answers if each.status_code >= 400}
            found += [f"{method} {path}: {each} is unannounced" for each in statuses - announced]
            sent += len(answers)
    assert not found, "\n".join(found)
    assert sent > EXAMPLES * 100


def _answers(operation: Any, url: str, headers: dict[str, str]) -> list[Any]:
    answers: list[Any] = []

    @settings(
        max_examples=EXAMPLES,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy())
    def _send(case: Any) -> None:
        answers.append(case.call(base_url=url, headers=headers, timeout=60))

    _send()
    return answers


def _problem(answer: Any) -> list[str]:
    shown = f"{answer.status_code} {answer.text[:300]} of {answer.request.body!r:.300}"
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
