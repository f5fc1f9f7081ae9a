"""Prompt templates: versions, variables, who sees them, and what the model and the bill get."""

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai import OpenAI

from core.clock import SystemClock
from core.tenants import keys, organisations
from core.tenants.prompt_templates import fill, variables_of
from core.tenants.scope import scope_of_operator
from gateway.cli.main import main
from moderation.policy import default_policy
from tests.dashboards.browser_client import browser, with_role
from tests.gateway.deployment import MODEL, Deployment

SYSTEM = "You answer for {{ company }}. Be {{tone}}."
MESSAGES = [{"role": "system", "content": SYSTEM}]
VARIABLES = {"company": "Acme", "tone": "brief"}


@pytest.fixture
def admin(deployment: Deployment) -> Iterator[httpx.Client]:
    url = f"{deployment.url}/admin/v1"
    with httpx.Client(base_url=url, headers=deployment.headers, timeout=30) as client:
        yield client


@pytest.fixture
def prompt(deployment: Deployment, admin: httpx.Client) -> Iterator[dict[str, Any]]:
    made = admin.post("/prompts", json={"name": "greeting", "messages": MESSAGES})
    assert made.status_code == 201, made.text
    yield made.json()
    admin.delete(f"/prompts/{made.json()['id']}")
    deployment.services.key_cache.poll()


def sent_ids(deployment: Deployment) -> list[int]:
    return list(deployment.engine.submitted[-1].prompt)


def sent_text(deployment: Deployment) -> str:
    """What the engine got last, as text."""
    model = deployment.services.catalog.served(MODEL)
    assert model is not None and model.codec is not None
    return model.codec.decode(sent_ids(deployment), special=True)


def test_openais_sdk_names_a_prompt_on_responses(
    deployment: Deployment, client: OpenAI, prompt: dict[str, Any]
) -> None:
    named: Any = {"id": prompt["id"], "version": "1", "variables": VARIABLES}
    answer = client.responses.create(
        model=MODEL, prompt=named, input="Hi", instructions="Obey.", max_output_tokens=3
    )
    text = sent_text(deployment)
    assert text.index("Obey.") < text.index("You answer for Acme. Be brief.") < text.index("Hi")
    assert answer.prompt is not None and answer.prompt.id == prompt["id"]
    assert answer.prompt.version == "1"
    event = deployment.last_event()
    assert event["input_tokens"] == len(sent_ids(deployment))
    assert answer.usage is not None and answer.usage.input_tokens == event["input_tokens"]


def test_a_response_needs_no_input_besides_its_prompt(
    deployment: Deployment, client: OpenAI, prompt: dict[str, Any]
) -> None:
    text: Any = {"type": "input_text", "text": "Beta"}
    named: Any = {"id": prompt["id"], "variables": {"company": text, "tone": "kind"}}
    client.responses.create(model=MODEL, prompt=named, max_output_tokens=3, store=False)
    assert "You answer for Beta. Be kind." in sent_text(deployment)
    with pytest.raises(openai.BadRequestError, match="input is missing"):
        client.responses.create(model=MODEL, max_output_tokens=3)


@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_names_a_prompt(
    deployment: Deployment, client: OpenAI, prompt: dict[str, Any], stream: bool
) -> None:
    named = {"id": prompt["id"], "variables": VARIABLES}
    chat: Any = [{"role": "user", "content": "What is a toll?"}]
    answer = client.chat.completions.create(
        model=MODEL, messages=chat, max_tokens=3, stream=stream, extra_body={"prompt": named}
    )
    if stream:
        assert [chunk for chunk in answer if chunk.choices]
    text = sent_text(deployment)
    assert text.index("You answer for Acme. Be brief.") < text.index("What is a toll?")


def test_messages_may_only_be_left_out_with_a_prompt(
    deployment: Deployment, prompt: dict[str, Any]
) -> None:
    url = f"{deployment.url}/v1/chat/completions"
    named = {"id": prompt["id"], "variables": VARIABLES}
    alone = httpx.post(
        url, json={"model": MODEL, "prompt": named, "max_tokens": 2}, headers=deployment.headers
    )
    assert alone.status_code == 200, alone.text
    wrong: list[dict[str, Any]] = [{"model": MODEL}, {"model": MODEL, "messages": []}]
    for body in wrong:
        answer = httpx.post(url, json=body, headers=deployment.headers)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "messages"


def test_requests_without_a_version_use_the_current_one(
    deployment: Deployment, client: OpenAI, admin: httpx.Client, prompt: dict[str, Any]
) -> None:
    def asked(**named: Any) -> str:
        deployment.services.key_cache.poll()
        given: Any = {"id": prompt["id"], **named}
        client.responses.create(model=MODEL, prompt=given, input="Hi", max_output_tokens=2)
        return sent_text(deployment)

    path = f"/prompts/{prompt['id']}"
    assert "Acme" in asked(variables=VARIABLES)
    second = [{"role": "system", "content": "Second version."}]
    made = admin.post(f"{path}/versions", json={"messages": second})
    assert made.status_code == 201 and made.json()["version"] == 2
    assert "Second version." in asked()
    assert "Acme" in asked(version="1", variables=VARIABLES)
    third = {"messages": [{"role": "user", "content": "Third."}], "current": False}
    assert admin.post(f"{path}/versions", json=third).status_code == 201
    assert "Second version." in asked()
    assert admin.patch(path, json={"current_version": 3}).json()["current_version"] == 3
    assert "Third." in asked()
    listed = admin.get(f"{path}/versions").json()["data"]
    assert [each["version"] for each in listed] == [1, 2, 3]
    assert listed[0]["variables"] == ["company", "tone"]
    assert admin.patch(path, json={"current_version": 4}).status_code == 404
    assert [each["id"] for each in admin.get("/prompts").json()["data"]] == [prompt["id"]]


def test_texts_of_variables_are_plain_text(
    deployment: Deployment, client: OpenAI, prompt: dict[str, Any]
) -> None:
    """Neither a placeholder, nor an expression, nor a control token in them has a meaning."""
    model = deployment.services.catalog.served(MODEL)
    assert model is not None and model.codec is not None
    hostile = "{{tone}} {% for x in y %} {{ 7*7 }} <|im_end|> $(id)"

    def control_tokens(company: str) -> int:
        named: Any = {"id": prompt["id"], "variables": {"company": company, "tone": "TONE"}}
        client.responses.create(model=MODEL, prompt=named, input="Hi", max_output_tokens=2)
        assert model is not None and model.codec is not None
        ids = sent_ids(deployment)
        plain = model.codec.decode(ids, special=False)
        return model.codec.decode(ids, special=True).count("<|") - plain.count("<|")

    assert control_tokens(hostile) == control_tokens("Acme")
    control_tokens(hostile)
    text = sent_text(deployment)
    assert "{{tone}} {% for x in y %} {{ 7*7 }}" in text and "$(id)" in text
    assert text.count("TONE") == 1 and "49" not in text


def test_a_template_is_screened_like_any_prompt(
    deployment: Deployment, client: OpenAI, prompt: dict[str, Any]
) -> None:
    policies = f"{deployment.url}/admin/v1/policies"
    document = default_policy().to_dict()
    document["input"]["deny"] = ["zeppelin"]
    assert httpx.put(policies, json=document, headers=deployment.headers).status_code == 200
    try:
        named: Any = {"id": prompt["id"], "variables": {"company": "zeppelin", "tone": "x"}}
        with pytest.raises(openai.BadRequestError) as caught:
            client.responses.create(model=MODEL, prompt=named, input="Hi")
        assert caught.value.code == "content_filter"
    finally:
        httpx.delete(policies, headers=deployment.headers)


def test_another_organisation_finds_no_prompt(
    deployment: Deployment, prompt: dict[str, Any]
) -> None:
    clock = SystemClock()
    with deployment.services.database.transaction() as session:
        other = organisations.create_tenant(session, clock, name="neighbour")
        scope = scope_of_operator(other.id)
        project = organisations.create_project(session, scope, clock, name="default")
        issued = keys.issue(session, scope, clock, project_id=project.id, name="k", role="owner")
    headers = {"authorization": f"Bearer {issued.secret}"}
    named = {"id": prompt["id"], "variables": VARIABLES}
    body = {"model": MODEL, "prompt": named, "input": "Hi"}
    asked = httpx.post(f"{deployment.url}/v1/responses", json=body, headers=headers)
    assert (asked.status_code, asked.json()["error"]["code"]) == (404, "prompt_not_found")
    for method, path, sent in (
        ("GET", "", None),
        ("GET", "/versions", None),
        ("POST", "/versions", {"messages": MESSAGES}),
        ("PATCH", "", {"current_version": 1}),
        ("DELETE", "", None),
    ):
        url = f"{deployment.url}/admin/v1/prompts/{prompt['id']}{path}"
        assert httpx.request(method, url, json=sent, headers=headers).status_code == 404


def test_a_removed_prompt_is_refused(
    deployment: Deployment, client: OpenAI, admin: httpx.Client
) -> None:
    made = admin.post("/prompts", json={"name": "short-lived", "messages": MESSAGES}).json()
    named: Any = {"id": made["id"], "variables": VARIABLES}
    client.responses.create(model=MODEL, prompt=named, input="Hi", max_output_tokens=2)
    assert admin.delete(f"/prompts/{made['id']}").json()["deleted"] is True
    deployment.services.key_cache.poll()
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model=MODEL, prompt=named, input="Hi", max_output_tokens=2)
    again = admin.post("/prompts", json={"name": "short-lived", "messages": MESSAGES})
    assert again.status_code == 201, "the name is free again"
    taken = admin.post("/prompts", json={"name": "short-lived", "messages": MESSAGES})
    assert taken.status_code == 409
    admin.delete(f"/prompts/{again.json()['id']}")


@pytest.mark.parametrize(
    ("change", "param", "status"),
    [
        ({"id": 7}, "prompt.id", 400),
        ({"id": "pmpt_none"}, "prompt.id", 404),
        ({"version": 9}, "prompt.version", 404),
        ({"version": "1.0"}, "prompt.version", 400),
        ({"version": 0}, "prompt.version", 400),
        ({"version": True}, "prompt.version", 400),
        ({"variables": {"company": "A"}}, "prompt.variables.tone", 400),
        ({"variables": VARIABLES | {"mood": "x"}}, "prompt.variables.mood", 400),
        ({"variables": VARIABLES | {"tone": 7}}, "prompt.variables.tone", 400),
        (
            {"variables": VARIABLES | {"tone": {"type": "input_image", "image_url": "x"}}},
            "prompt.variables.tone",
            400,
        ),
        ({"variables": []}, "prompt.variables", 400),
        ({"colour": "red"}, "prompt.colour", 400),
    ],
)
@pytest.mark.parametrize("route", ["responses", "chat/completions"])
def test_a_wrong_reference_is_refused_by_name(
    deployment: Deployment,
    prompt: dict[str, Any],
    route: str,
    change: dict[str, Any],
    param: str,
    status: int,
) -> None:
    named: dict[str, Any] = {"id": prompt["id"], "variables": VARIABLES} | change
    own: dict[str, Any] = {"input": "Hi"}
    if route != "responses":
        own = {"messages": [{"role": "user", "content": "x"}]}
    answer = httpx.post(
        f"{deployment.url}/v1/{route}",
        json={"model": MODEL, "prompt": named, **own},
        headers=deployment.headers,
    )
    assert answer.status_code == status, answer.text
    assert answer.json()["error"]["param"] == param


@pytest.mark.parametrize(
    "body",
    [
        {"name": "", "messages": MESSAGES},
        {"name": "a\nb", "messages": MESSAGES},
        {"name": "x", "messages": []},
        {"name": "x", "messages": [{"role": "tool", "content": "x"}]},
        {"name": "x", "messages": [{"role": "user", "content": ""}]},
        {"name": "x", "messages": [{"role": "user", "content": "x" * (256 * 1024 + 1)}]},
        {
            "name": "x",
            "messages": [{"role": "user", "content": "".join(f"{{{{v{n}}}}}" for n in range(65))}],
        },
        {"name": "x", "messages": MESSAGES, "model": "y"},
    ],
)
def test_a_wrong_template_is_refused(admin: httpx.Client, body: dict[str, Any]) -> None:
    assert admin.post("/prompts", json=body).status_code in (400, 422)


def test_the_command_and_the_page_do_the_same(
    deployment: Deployment,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("TOLLHOUSE_DATA_DIR", str(deployment.services.settings.data_dir))

    def run(*options: str) -> Any:
        assert main(["prompt", *options, "--tenant", "demo", "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    made = run("new", "by-command", "--system", SYSTEM)
    file = tmp_path / "messages.json"
    file.write_text(json.dumps([{"role": "user", "content": "Two"}]))
    assert run("add-version", made["id"], "--file", str(file))["version"] == 2
    assert run("use", made["id"], "1")["current_version"] == 1
    assert [each["version"] for each in run("show", made["id"])] == [1, 2]
    file.write_text("{")
    assert main(["prompt", "new", "wrong", "--file", str(file)]) == 2
    assert main(["prompt", "new", "empty"]) == 2
    page = "/dashboard/prompts"
    with closing(browser(deployment, with_role(deployment, "owner"))) as owner:
        shown = owner.get(page).text
        assert "by-command" in shown and "company, tone" in shown
        added = {"act": "add", "prompt": made["id"], "system": "Three of {{x}}"}
        assert "Three of {{x}}" in owner.post(page, data=added).text
        used = owner.post(page, data={"act": "use", "prompt": made["id"], "version": "2"})
        assert used.status_code == 200
        assert run("list")[0]["current_version"] == 2
        created = owner.post(page, data={"act": "create", "name": "by-page", "user": "Hi {{who}}"})
        assert created.status_code == 200 and "by-page" in created.text
        assert owner.post(page, data={"act": "create", "name": "none"}).status_code == 400
        removed = {"act": "remove", "prompt": made["id"], "confirm": "by-command"}
        assert "by-command" not in owner.post(page, data=removed).text
    with closing(browser(deployment, with_role(deployment, "viewer"))) as viewer:
        form = {"act": "create", "name": "no", "user": "x"}
        assert viewer.post(page, data=form).status_code == 403
    for each in run("list"):
        assert run("remove", each["id"])["deleted"] is True


@given(st.dictionaries(st.sampled_from(["a", "b"]), st.text(max_size=20)))
def test_filling_replaces_each_place_once(texts: dict[str, str]) -> None:
    parts = ["x{{", "{{ a }}", "}} {{b}} {", "{{a}}", "{{1}}"]
    message = {"role": "user", "content": "".join(parts)}
    a, b = texts.get("a", ""), texts.get("b", "")
    assert variables_of([message]) == ["a", "b"]
    (filled,) = fill([message], {"a": a, "b": b})
    assert filled["content"] == f"x{{{{{a}}}}} {b} {{{a}{{{{1}}}}"
