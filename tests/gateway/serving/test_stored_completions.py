"""Stored chat completions with OpenAI's SDK: listed, read, labelled, deleted, encrypted, and off by a
setting."""

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI
from sqlalchemy import text

from core.clock import SystemClock
from core.responses import completions
from core.tenants import keys
from core.tenants.organisations import create_project
from core.tenants.scope import scope_of_operator
from tests.gateway.deployment import MODEL, Deployment

SECRET = "xylophone marmalade"


def create(client: OpenAI, prompt: Any, **more: Any) -> Any:
    messages = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
    return client.chat.completions.create(
        model=MODEL, messages=messages, max_tokens=4, store=True, **more
    )


@pytest.fixture(autouse=True)
def empty(deployment: Deployment) -> Iterator[None]:
    with deployment.services.database.transaction() as session:
        session.execute(text("delete from stored_completions"))
    yield


@pytest.mark.parametrize("stream", [False, True])
def test_a_stored_completion_is_what_the_client_got(
    deployment: Deployment, client: OpenAI, stream: bool
) -> None:
    labels = {"team": "tolls", "run": "7"}
    if stream:
        chunks = list(create(client, "Hi", metadata=labels, stream=True))
        name, words = chunks[0].id, "".join(c.choices[0].delta.content or "" for c in chunks)
    else:
        answer = create(client, "Hi", metadata=labels, temperature=0.5, user="ada")
        name, words = answer.id, answer.choices[0].message.content
    found = client.chat.completions.retrieve(name)
    assert found.choices[0].message.content == words and found.model == MODEL
    assert found.metadata == labels  # type: ignore[attr-defined]
    assert found.usage is not None and found.usage.completion_tokens == 4
    event = deployment.event(found.request_id)  # type: ignore[attr-defined]
    assert event["output_tokens"] == 4
    if not stream:
        assert found.usage == answer.usage and found.temperature == 0.5  # type: ignore[attr-defined]
    (message,) = client.chat.completions.messages.list(name).data
    assert (message.role, message.content) == ("user", "Hi") and message.id


def test_pages_by_model_label_and_order(client: OpenAI) -> None:
    made = [create(client, f"n{n}", metadata={"odd": str(n % 2)}).id for n in range(5)]
    create(client, "other", metadata={"odd": "x", "team": "b"})
    first = client.chat.completions.list(limit=2)
    assert [each.id for each in first.data] == made[:2] and first.has_more
    assert [each.id for each in client.chat.completions.list(limit=2)][:5] == made
    newest = client.chat.completions.list(limit=1, order="desc")
    assert newest.data[0].metadata == {"odd": "x", "team": "b"}  # type: ignore[attr-defined]
    odd = list(client.chat.completions.list(limit=1, metadata={"odd": "1"}))
    assert [each.id for each in odd] == [made[1], made[3]]
    assert client.chat.completions.list(model="another").data == []
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.list(after="chatcmpl-nothing")


def test_labels_change_and_a_deleted_completion_is_gone(client: OpenAI) -> None:
    made = create(client, "Hi", metadata={"a": "1"})
    changed = client.chat.completions.update(made.id, metadata={"b": "2"})
    assert changed.id == made.id and changed.metadata == {"b": "2"}  # type: ignore[attr-defined]
    deleted = client.chat.completions.delete(made.id)
    assert (deleted.id, deleted.deleted, deleted.object) == (
        made.id,
        True,
        "chat.completion.deleted",
    )
    for act in (
        lambda: client.chat.completions.retrieve(made.id),
        lambda: client.chat.completions.messages.list(made.id),
        lambda: client.chat.completions.delete(made.id),
        lambda: client.chat.completions.update(made.id, metadata={}),
    ):
        with pytest.raises(openai.NotFoundError) as gone:
            act()
        assert gone.value.code == "completion_not_found"


def test_nothing_is_stored_unless_it_is_asked_for(client: OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "Hi"}]
    client.chat.completions.create(model=MODEL, messages=messages, max_tokens=2)
    client.chat.completions.create(model=MODEL, messages=messages, max_tokens=2, store=False)
    assert client.chat.completions.list().data == []
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(
            model=MODEL, messages=messages, max_tokens=2, metadata={"a": "1"}
        )
    assert refused.value.param == "metadata"
    with pytest.raises(openai.BadRequestError) as refused:
        create(client, "Hi", metadata={"a": "x" * 513})
    assert "metadata" in str(refused.value)


def test_a_setting_of_the_organisation_forbids_it_before_anything_runs(
    deployment: Deployment, client: OpenAI
) -> None:
    def _set(value: bool | None) -> None:
        answer = httpx.patch(
            f"{deployment.url}/admin/v1/tenant",
            json={"settings": {"store_responses": value}},
            headers=deployment.headers,
        )
        assert answer.status_code == 200, answer.text
        deployment.services.key_cache.poll()

    _set(False)
    before = len(deployment.engine.submitted)
    try:
        with pytest.raises(openai.BadRequestError) as refused:
            create(client, "Hi")
        assert refused.value.code == "store_not_allowed"
        assert len(deployment.engine.submitted) == before
    finally:
        _set(None)


def test_texts_and_labels_are_encrypted_and_expire(deployment: Deployment, client: OpenAI) -> None:
    create(client, SECRET, metadata={"note": SECRET})
    database = deployment.services.database
    with database.transaction() as session:
        row = session.execute(text("select * from stored_completions")).one()
        assert not any(SECRET in str(value) for value in row)
        assert SECRET.encode() not in bytes(row.sealed)
        now = SystemClock().now()
        completions.drop_expired(session, now + timedelta(days=29))
        assert session.scalar(text("select count(*) from stored_completions")) == 1
        completions.drop_expired(session, now + timedelta(days=31))
        assert session.scalar(text("select count(*) from stored_completions")) == 0


def test_another_project_sees_nothing(deployment: Deployment, client: OpenAI) -> None:
    made = create(client, "Hi")
    scope = scope_of_operator(deployment.tenant_id)
    with deployment.services.database.transaction() as session:
        project = create_project(session, scope, SystemClock(), name="other")
        key = keys.issue(session, scope, SystemClock(), project_id=project.id, name="k").secret
    with OpenAI(base_url=f"{deployment.url}/v1", api_key=key or "", max_retries=0) as other:
        assert other.chat.completions.list().data == []
        with pytest.raises(openai.NotFoundError):
            other.chat.completions.retrieve(made.id)


def test_the_assistants_parts_are_read_and_shown(deployment: Deployment, client: OpenAI) -> None:
    parts = [{"type": "text", "text": "I cannot."}, {"type": "refusal", "refusal": "No tolls."}]
    history = [
        {"role": "user", "content": "Tell me."},
        {"role": "assistant", "content": parts},
        {"role": "user", "content": "Why?"},
    ]
    made = create(client, history)
    codec = deployment.services.catalog.first().codec
    assert codec is not None
    prompt = codec.decode(list(deployment.engine.submitted[-1].prompt), special=True)
    assert "I cannot." in prompt and "No tolls." in prompt
    listed: Any = client.chat.completions.messages.list(made.id, limit=2).data
    assert [each.role for each in listed] == ["user", "assistant"]
    assert [part.text for part in listed[1].content_parts] == ["I cannot.", "No tolls."]
