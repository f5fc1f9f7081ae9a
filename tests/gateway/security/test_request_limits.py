"""Issue 14, parts 6b and 9: limits on requests are taken before what costs more than parsing.

Refused prompts count, and so do the routes that are not billed.
"""

from typing import Any

import httpx
import pytest

from core.clock import SystemClock
from core.ids import new_id
from core.tenants import keys, limits
from core.tenants.organisations import create_project, create_tenant
from core.tenants.plans import DAY, LimitRule, Scope, Unit
from core.tenants.scope import scope_of_operator
from tests.gateway.deployment import MODEL, Deployment

CLOCK = SystemClock()
TOO_LONG = "word " * 20_000
MESSAGES = [{"role": "user", "content": "hello"}]


def limited_key(deployment: Deployment, requests: int) -> str:
    with deployment.services.database.transaction() as session:
        tenant = create_tenant(session, CLOCK, name=new_id("limited").replace("_", "-"))
        scope = scope_of_operator(tenant.id)
        project = create_project(session, scope, CLOCK, name="default").id
        limits.set_rule(
            session, scope, CLOCK, LimitRule(Scope.TENANT, Unit.REQUESTS, requests, DAY)
        )
        return keys.issue(session, scope, CLOCK, project_id=project, name="k").secret


def post(deployment: Deployment, key: str, path: str, body: dict[str, Any]) -> httpx.Response:
    headers = {"authorization": f"Bearer {key}"}
    return httpx.post(deployment.url + path, json=body, headers=headers, timeout=60)


def test_prompts_that_are_refused_use_up_the_limit(deployment: Deployment) -> None:
    key = limited_key(deployment, 3)
    body = {"model": MODEL, "prompt": TOO_LONG}
    got = [post(deployment, key, "/v1/completions", body).status_code for _ in range(5)]
    assert got == [400, 400, 400, 429, 429]


def test_over_the_limit_no_prompt_is_encoded(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = limited_key(deployment, 1)
    body = {"model": MODEL, "prompt": TOO_LONG}
    assert post(deployment, key, "/v1/completions", body).status_code == 400
    codec = deployment.services.pipeline.catalog.served(MODEL).codec  # type: ignore[union-attr]
    monkeypatch.setattr(codec, "encode", None)  # calling it would fail
    refused = post(deployment, key, "/v1/completions", body)
    assert refused.status_code == 429 and int(refused.headers["retry-after"]) > 0


def test_a_large_prompt_that_is_served_counts_once(deployment: Deployment) -> None:
    key = limited_key(deployment, 2)
    # A large body with a short prompt.
    body = {"model": MODEL, "messages": MESSAGES, "max_tokens": 1}
    body |= {"bad_words": ["b" * 200] * 100}
    got = [post(deployment, key, "/v1/chat/completions", body).status_code for _ in range(3)]
    assert got == [200, 200, 429]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"prompt": "hello"}),
        ("/detokenize", {"tokens": [1, 2]}),
        ("/v1/messages/count_tokens", {"messages": MESSAGES}),
        ("/v1/responses/input_tokens", {"input": "hello"}),
    ],
)
def test_routes_that_are_not_billed_count_as_well(
    deployment: Deployment, path: str, body: dict[str, Any]
) -> None:
    key = limited_key(deployment, 2)
    got = [post(deployment, key, path, {"model": MODEL, **body}).status_code for _ in range(3)]
    assert got == [200, 200, 429]
