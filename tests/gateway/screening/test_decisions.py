"""What the screen and the guard decided is recorded, each once; and who bears what they cut."""

import hashlib
import re
import time
from typing import Any

import httpx
import pytest
from prometheus_client import REGISTRY
from sqlalchemy import select

from billing.pricing.pricing import Component, counted
from gateway.screening.decisions import record_secret
from moderation.models import Decision
from moderation.records import fingerprint
from tests.gateway.deployment import MODEL, Deployment


def ask(deployment: Deployment, text: str, **more: Any) -> httpx.Response:
    messages = [{"role": "user", "content": text}]
    body = {"model": MODEL, "max_tokens": 24, "messages": messages, **more}
    url = f"{deployment.url}/v1/chat/completions"
    return httpx.post(url, json=body, headers=deployment.headers, timeout=30)


def decisions(deployment: Deployment, answer: httpx.Response, count: int) -> dict[str, Decision]:
    deadline = time.monotonic() + 60
    while True:
        with deployment.services.database.read() as session:
            wanted = Decision.request_id == answer.headers["x-request-id"]
            found = session.scalars(select(Decision).where(wanted)).all()
            session.expunge_all()
        if len(found) >= count:
            return {each.direction: each for each in found}
        assert time.monotonic() < deadline, f"{len(found)} decisions, {count} were expected"
        time.sleep(0.02)


def event(deployment: Deployment, answer: httpx.Response) -> dict[str, Any]:
    return deployment.event(answer.headers["x-request-id"])


@pytest.fixture
def put(deployment: Deployment) -> Any:
    def _put(document: dict[str, Any]) -> None:
        url = f"{deployment.url}/admin/v1/policies"
        answer = httpx.put(url, json=document, headers=deployment.headers, timeout=60)
        assert answer.status_code == 200, answer.text

    yield _put
    httpx.delete(f"{deployment.url}/admin/v1/policies", headers=deployment.headers, timeout=60)


def test_what_was_allowed_is_recorded_too_with_a_keyed_fingerprint(deployment: Deployment) -> None:
    text = "What do tolls pay for?"
    answer = ask(deployment, text)
    assert answer.status_code == 200
    found = decisions(deployment, answer, 2)
    assert {each.action for each in found.values()} == {"allow"}
    secret = record_secret(deployment.services.operator_token)
    assert found["input"].text_sha256 == fingerprint(text, secret)
    assert found["input"].text_sha256 != hashlib.sha256(text.encode()).hexdigest()
    said = answer.json()["choices"][0]["message"]["content"]
    assert found["output"].text_sha256 == fingerprint(said, secret)
    assert found["input"].policy_version == found["output"].policy_version
    for each in found.values():
        assert not {"tolls", "pay"} & set(str(vars(each)).split())


def test_a_request_of_many_choices_has_one_decision_a_direction(deployment: Deployment) -> None:
    answer = ask(deployment, "Count three apples.", n=3)
    assert answer.status_code == 200
    assert set(decisions(deployment, answer, 2)) == {"input", "output"}


def metric(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(name, labels) or 0.0


@pytest.mark.parametrize(("payer", "tenant_pays"), [("operator", False), ("tenant", True)])
def test_the_policy_says_who_pays_for_a_blocked_prompt(
    deployment: Deployment, put: Any, payer: str, tenant_pays: bool
) -> None:
    put({"input": {"deny": ["zeppelin"]}, "blocked_input_paid_by": payer})
    name = "tollhouse_moderation_flags_total"
    before = metric(name, category="deny_list", action="block")
    answer = ask(deployment, "Sell me a zeppelin.")
    assert answer.status_code == 400
    found = event(deployment, answer)
    assert (found["moderation"], found["paid_by"]) == ("block", payer)
    assert (found["finish_reason"], found["status"]) == ("content_filter", 400)
    assert (found["input_tokens"] > 0, found["quantity"] > 0) == (tenant_pays, tenant_pays)
    used = dict(
        counted(
            "generation",
            (found["input_tokens"], 0, 0, 0),
            answered=found["quantity"],
            adapter=False,
        )
    )
    assert (used[Component.INPUT] > 0, used[Component.REQUEST] > 0) == (tenant_pays, tenant_pays)
    assert decisions(deployment, answer, 1)["input"].action == "block"
    assert metric(name, category="deny_list", action="block") == before + 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("payer", "tenant_pays"), [("tenant", True), ("operator", False)])
def test_the_policy_says_who_pays_for_a_cut_answer(
    deployment: Deployment, put: Any, payer: str, tenant_pays: bool, stream: bool
) -> None:
    # The fake engine repeats the prompt, so its answer comes to the word at last.
    put({"output": {"deny": ["zeppelin"]}, "cut_output_paid_by": payer})
    text = "One two three four five six seven eight nine ten, a zeppelin and more."
    answer = ask(deployment, text, stream=stream, max_tokens=60)
    assert answer.status_code == 200
    said = "".join(re.findall(r'"content":"([^"]*)"', answer.text))  # a word in several events
    assert "content_filter" in answer.text and "zeppelin" not in said
    assert "seven" in said
    found = event(deployment, answer)
    assert (found["moderation"], found["paid_by"]) == ("block", payer)
    assert (found["output_tokens"] > 0) is tenant_pays
    assert found["waived_tokens"] > 0 and found["input_tokens"] > 0
    assert decisions(deployment, answer, 2)["output"].action == "block"


def test_an_answer_that_is_not_cut_has_no_payer(deployment: Deployment) -> None:
    assert event(deployment, ask(deployment, "What is a toll?"))["paid_by"] is None


def test_shadow_blocks_nothing_and_records_what_it_would_do(
    deployment: Deployment, put: Any
) -> None:
    put({"input": {"deny": ["zeppelin"]}, "shadow": True})
    answer = ask(deployment, "Sell me a zeppelin.")
    assert answer.status_code == 200
    found = decisions(deployment, answer, 2)["input"]
    assert (found.action, found.categories) == ("annotate", ["deny_list"])
