"""The playground: no key to paste, a conversation, two models, and the same request as code."""

import json
import re
import subprocess
import sys
from datetime import timedelta
from typing import Any

import pytest
from playwright.sync_api import Page, expect
from sqlalchemy import select

from core.tenants.models import ApiKey
from tests.browser.conftest import Visit
from tests.browser.page_checks import check_page
from tests.dashboards.browser_client import with_role
from tests.gateway.deployment import Deployment

pytestmark = pytest.mark.slow


def _ask(page: Page, words: str) -> None:
    page.locator('[name="prompt"]').fill(words)
    page.get_by_role("button", name="Send").click()
    expect(page.get_by_role("button", name="Send")).to_be_enabled(timeout=30_000)


def _key(deployment: Deployment) -> ApiKey:
    query = select(ApiKey).where(ApiKey.name == "playground page").order_by(ApiKey.id.desc())
    with deployment.services.database.read() as session:
        return session.scalars(query.limit(1)).one()


def test_it_streams_without_a_pasted_key(deployment: Deployment, page: Page) -> None:
    page.goto(f"{deployment.url}/dashboard/playground")
    _ask(page, "Hello there")
    pane = page.locator(".pane").first
    assert int(pane.locator('[data-figure="output"]').inner_text()) > 0
    assert pane.locator(".assistant").inner_text().strip()
    expect(pane.locator('[data-figure="cached"]')).to_contain_text("% cached")
    assert float(pane.locator('[data-figure="speed"]').inner_text()) > 0
    assert float(pane.locator('[data-figure="cost"]').inner_text().removesuffix(" USD")) > 0
    key = _key(deployment)
    assert deployment.last_event()["key_id"] == key.id
    assert key.expires_at is not None
    assert abs(key.expires_at - key.created_at - timedelta(hours=1)) < timedelta(minutes=1)
    assert key.scopes["routes"] == ["/v1/chat/completions"]
    check_page(page, page.url)


def test_a_conversation_goes_on_until_a_new_one(deployment: Deployment, page: Page) -> None:
    page.goto(f"{deployment.url}/dashboard/playground")
    sent: list[str] = []
    page.on("request", lambda r: sent.append(r.post_data or "") if "/v1/" in r.url else None)
    page.get_by_label("System prompt").fill("Be brief.")
    page.get_by_label("Temperature").fill("0.5")
    page.get_by_label("Maximum output tokens").fill("5")
    _ask(page, "First")
    _ask(page, "Second")
    roles = re.findall(r'"role":"(\w+)"', sent[-1])
    assert roles == ["system", "user", "assistant", "user"]
    assert '"temperature":0.5' in sent[-1]
    page.get_by_role("button", name="New conversation").click()
    _ask(page, "Third")
    assert re.findall(r'"role":"(\w+)"', sent[-1]) == ["system", "user"]


def test_two_models_answer_side_by_side(deployment: Deployment, page: Page) -> None:
    page.goto(f"{deployment.url}/dashboard/playground")
    page.get_by_label("Compare with").select_option(index=1)
    _ask(page, "Hello there")
    for pane in page.locator(".pane").all():
        expect(pane.locator(".assistant")).not_to_be_empty()
        expect(pane.locator('[data-figure="cost"]')).to_contain_text("USD")


def test_the_python_code_runs(deployment: Deployment, page: Page) -> None:
    page.goto(f"{deployment.url}/dashboard/playground")
    page.locator('[name="prompt"]').fill('It\'s "quoted"')
    page.get_by_label("Maximum output tokens").fill("5")
    page.get_by_text("As curl, Python and Node").click()
    for command in (
        [sys.executable, "-c", page.locator("#python").inner_text()],
        ["bash", "-c", page.locator("#curl").inner_text() + " -sf"],
    ):
        ran = subprocess.run(
            command,
            env={"TOLLHOUSE_KEY": deployment.key, "PATH": "/usr/bin:/bin"},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert ran.returncode == 0 and ran.stdout.strip(), ran.stderr


def test_a_schema_and_tools_are_sent_and_shown_in_the_code(
    deployment: Deployment, page: Page
) -> None:
    page.goto(f"{deployment.url}/dashboard/playground")
    sent: list[dict[str, Any]] = []
    page.on("request", lambda r: sent.append(r.post_data_json) if "/v1/" in r.url else None)
    page.get_by_text("JSON schema and tools").click()
    page.get_by_label("JSON schema").fill('{"type": "object", "additionalProperties": false}')
    page.get_by_label("Tools").fill("{}")
    assert page.get_by_label("Tools").evaluate("it => it.validationMessage") == (
        "This is not a list of tools."
    )
    tool = {"type": "function", "function": {"name": "weather", "parameters": {}}}
    page.get_by_label("Tools").fill(json.dumps([tool]))
    assert page.get_by_label("Tools").evaluate("it => it.validationMessage") == ""
    page.get_by_text("As curl, Python and Node").click()
    python = page.locator("#python").inner_text()
    assert '"additionalProperties": False' in python and compile(python, "sample", "exec")
    node = page.locator("#node").inner_text()
    assert node.startswith('import OpenAI from "openai";') and '"weather"' in node
    page.route("**/v1/chat/completions", lambda route: route.fulfill(body="data: [DONE]\n\n"))
    _ask(page, "Anything")
    assert sent[-1]["tools"] == [tool]
    schema = sent[-1]["response_format"]["json_schema"]["schema"]
    assert schema == {"type": "object", "additionalProperties": False}


def test_a_called_tool_is_shown(deployment: Deployment, page: Page) -> None:
    called = {"index": 0, "id": "call_1", "type": "function"}
    deltas = [
        {"tool_calls": [{**called, "function": {"name": "weather", "arguments": ""}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"city":'}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '"Bonn"}'}}]},
    ]
    lines = [json.dumps({"choices": [{"index": 0, "delta": each}]}) for each in deltas]
    body = "".join(f"data: {line}\n\n" for line in lines) + "data: [DONE]\n\n"
    page.goto(f"{deployment.url}/dashboard/playground")
    page.route("**/v1/chat/completions", lambda route: route.fulfill(body=body))
    _ask(page, "How is the weather?")
    expect(page.locator(".assistant")).to_contain_text('call weather {"city":"Bonn"}')


def test_a_role_that_makes_no_keys_pastes_one(deployment: Deployment, open_page: Visit) -> None:
    page = open_page(deployment, with_role(deployment, "viewer"))
    page.goto(f"{deployment.url}/dashboard/playground")
    expect(page.get_by_label("Key", exact=True)).to_be_visible()
    answer = page.request.post(
        f"{deployment.url}/dashboard/playground/key",
        form={"project_id": "x"},
        headers={"origin": deployment.url},
    )
    assert answer.status == 403
