"""Every operation of the product's own OpenAPI document, with cases drawn from it, valid and not: no
server error, and every answer as the document announces it."""

from typing import Any

import pytest

from tests.gateway.deployment import Deployment
from tests.gateway.serving.schema_cases import document_of, try_all

EXAMPLES = 3  # of valid cases, and of others


@pytest.mark.proof
def test_no_operation_has_a_server_error_or_an_answer_of_another_shape(
    deployment: Deployment,
) -> None:
    secrets = deployment.key, deployment.services.operator_token
    document = document_of(deployment.url)
    found = try_all(deployment.url, secrets, document, examples=EXAMPLES, drawn_by=1)
    assert not found.problems, "\n".join(found.problems)
    assert found.sent > EXAMPLES * 200
    assert found.statuses[200] > 20 and found.statuses[400] > 100


@pytest.mark.parametrize(
    ("responses", "found"),
    [
        ({"404": {"description": "none"}}, "status_code_conformance"),
        ({"200": {"description": "text", "content": {"text/csv": {}}}}, "content_type"),
        (
            {
                "200": {
                    "description": "ids",
                    "content": {"application/json": {"schema": {"required": ["no_such_field"]}}},
                }
            },
            "response_schema_conformance",
        ),
    ],
)
def test_answers_that_the_document_does_not_announce_are_found(
    responses: dict[str, Any], found: str, deployment: Deployment
) -> None:
    document = document_of(deployment.url)
    operation = document["paths"]["/v1/models"]["get"] | {"responses": responses}
    document["paths"] = {"/v1/models": {"get": operation}}
    secrets = deployment.key, deployment.services.operator_token
    answers = try_all(deployment.url, secrets, document, examples=1, drawn_by=1)
    assert answers.statuses[200] and any(found in each for each in answers.problems)
