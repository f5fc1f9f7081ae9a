"""Conversations with OpenAI's SDK: created, built on, listed, changed, encrypted, erased."""

from datetime import timedelta
from typing import Any

import openai
import pytest
from openai import OpenAI
from sqlalchemy import text

from core.responses import conversations
from tests.gateway.deployment import Deployment
from tests.gateway.serving.test_stored_responses import create, prompt_of

SECRET = "xylophone marmalade"


def said(role: str, words: str) -> Any:
    return {"type": "message", "role": role, "content": words}


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_builds_on_its_conversation_and_appends_to_it(
    deployment: Deployment, client: OpenAI, stream: bool
) -> None:
    made = client.conversations.create(
        items=[said("user", "My name is Ada.")], metadata={"topic": "names"}
    )
    assert made.object == "conversation" and made.metadata == {"topic": "names"}
    if stream:
        events = list(create(client, "Who am I?", conversation=made.id, stream=True))
        first = events[-1].response
        assert events[0].response.conversation.id == made.id
    else:
        first = create(client, "Who am I?", conversation={"id": made.id})
    assert first.conversation is not None and first.conversation.id == made.id
    create(client, [said("user", "Say it.")], conversation=made.id)
    prompt = prompt_of(deployment)
    expected = ["My name is Ada.", "Who am I?", first.output_text, "Say it."]
    places = [prompt.index(expected[each]) for each in (0, 1, 3)]
    assert places == sorted(places)
    listed: list[Any] = list(client.conversations.items.list(made.id, order="asc"))
    texts: list[Any] = [each.content[0].text for each in listed]
    assert texts[:4] == expected and len(texts) == 5
    assert [each.role for each in listed][:3] == [
        "user",
        "user",
        "assistant",
    ]


def test_items_are_added_listed_by_page_and_removed(client: OpenAI) -> None:
    made = client.conversations.create()
    words = [str(number) for number in range(5)]
    added: Any = client.conversations.items.create(
        made.id, items=[said("user", each) for each in words]
    )
    assert [each.id[:4] for each in added.data] == ["msg_"] * 5
    pages: Any = client.conversations.items.list(made.id, limit=2)
    assert [each.content[0].text for each in pages] == words[::-1]
    middle = added.data[2].id
    read: Any = client.conversations.items.retrieve(middle, conversation_id=made.id)
    assert read.content[0].text == "2"
    assert client.conversations.items.delete(middle, conversation_id=made.id).id == made.id
    left = list(client.conversations.items.list(made.id, order="asc"))
    assert [each.id for each in left] == [e.id for e in added.data if e.id != middle]
    with pytest.raises(openai.NotFoundError) as caught:
        client.conversations.items.retrieve(middle, conversation_id=made.id)
    assert caught.value.code == "item_not_found"


def test_metadata_is_changed(client: OpenAI) -> None:
    made = client.conversations.create(metadata={"a": "1"})
    assert client.conversations.update(made.id, metadata={"b": "2"}).metadata == {"b": "2"}
    assert client.conversations.retrieve(made.id).metadata == {"b": "2"}


def test_it_is_encrypted_expires_and_is_erased(deployment: Deployment, client: OpenAI) -> None:
    made = client.conversations.create(items=[said("user", SECRET)], metadata={"who": SECRET})
    database = deployment.services.database
    with database.read() as session:
        rows = [
            *session.execute(text("select * from conversations where id = :id"), {"id": made.id}),
            *session.execute(
                text("select * from conversation_items where conversation_id = :id"),
                {"id": made.id},
            ),
        ]
    assert len(rows) == 2 and SECRET not in str(rows)
    later = deployment.services.clock.now() + timedelta(days=30, minutes=1)
    with database.transaction() as session:
        conversations.drop_expired(session, later - timedelta(minutes=5))
    client.conversations.retrieve(made.id)
    assert client.conversations.delete(made.id).deleted
    for act in (client.conversations.retrieve, client.conversations.delete):
        with pytest.raises(openai.NotFoundError):
            act(made.id)
    other = client.conversations.create(items=[said("user", "Hi")])
    with database.transaction() as session:
        conversations.drop_expired(session, later)
    with pytest.raises(openai.NotFoundError):
        client.conversations.retrieve(other.id)
    with database.read() as session:
        assert session.execute(text("select count(*) from conversation_items")).scalar() == 0


def test_another_organisation_finds_nothing(deployment: Deployment, client: OpenAI) -> None:
    made = client.conversations.create(items=[said("user", "Hi")])
    with deployment.services.database.transaction() as session:
        session.execute(
            text("update conversations set tenant_id = 'org_other' where id = :id"),
            {"id": made.id},
        )
    for act in (
        lambda: client.conversations.retrieve(made.id),
        lambda: client.conversations.update(made.id, metadata={}),
        lambda: client.conversations.delete(made.id),
        lambda: client.conversations.items.create(made.id, items=[said("user", "x")]),
        lambda: client.conversations.items.list(made.id),
        lambda: create(client, "Hi", conversation=made.id),
    ):
        with pytest.raises(openai.NotFoundError) as caught:
            act()
        assert caught.value.code == "conversation_not_found"


def test_nothing_is_appended_by_a_failed_request(client: OpenAI) -> None:
    made = client.conversations.create(items=[said("user", "Hi")])
    with pytest.raises(openai.BadRequestError):
        create(client, "x", conversation=made.id, temperature=9)
    assert len(list(client.conversations.items.list(made.id))) == 1


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"items": [{"type": "web_search_call"}]}, "input[0]"),
        ({"items": [said("user", "x")] * 21}, "items"),
        ({"items": "x"}, "items"),
        ({"metadata": {str(n): "x" for n in range(17)}}, "metadata"),
        ({"metadata": {"a": "x" * 513}}, "metadata[]"),
        ({"name": "x"}, "name"),
    ],
)
def test_what_is_wrong_is_named(client: OpenAI, body: Any, param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.conversations.create(extra_body=body)
    assert caught.value.param == param


def test_a_request_names_one_history(client: OpenAI) -> None:
    made = client.conversations.create()
    with pytest.raises(openai.BadRequestError) as caught:
        create(client, "x", conversation=made.id, previous_response_id="resp_x")
    assert caught.value.param == "conversation"
