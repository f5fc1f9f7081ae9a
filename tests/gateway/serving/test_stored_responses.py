"""Stored responses with OpenAI's SDK: chained, read, listed, deleted, encrypted, and off by a setting."""

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI
from sqlalchemy import text

from core.responses import records
from tests.gateway.deployment import MODEL, Deployment

SECRET = "xylophone marmalade"


def prompt_of(deployment: Deployment) -> str:
    codec = deployment.services.catalog.first().codec
    assert codec is not None
    return codec.decode(list(deployment.engine.submitted[-1].prompt), special=True)


def create(client: OpenAI, given: Any, **more: Any) -> Any:
    return client.responses.create(model=MODEL, input=given, max_output_tokens=4, **more)


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_builds_on_the_one_before(
    deployment: Deployment, client: OpenAI, stream: bool
) -> None:
    if stream:
        events = list(create(client, "My name is Ada.", stream=True))
        assert [each.sequence_number for each in events] == list(range(len(events)))
        first = events[-1].response
        assert events[0].response.store is True
    else:
        first = create(client, "My name is Ada.")
    assert first.store is True and first.previous_response_id is None
    second = create(
        client, [{"role": "user", "content": "Who am I?"}], previous_response_id=first.id
    )
    assert second.previous_response_id == first.id
    third = create(client, "Say it.", previous_response_id=second.id, instructions="Be brief.")
    prompt = prompt_of(deployment)
    places = [
        prompt.index(each) for each in ("Be brief.", "My name is Ada.", "Who am I?", "Say it.")
    ]
    assert places == sorted(places)
    assert first.output_text in prompt and prompt.count("My name is Ada.") == 1
    read = client.responses.retrieve(third.id)
    assert read.to_dict() == third.to_dict()
    listed: Any = client.responses.input_items.list(second.id, order="asc").data
    assert [each.content[0].text for each in listed] == ["Who am I?"]


def test_the_ai_sdks_references_to_items_are_followed(
    deployment: Deployment, client: OpenAI
) -> None:
    first = create(client, "My dog is Rex.")
    reference: Any = {"type": "item_reference", "id": first.output[0].id}
    asked: Any = [{"role": "user", "content": "My dog is Rex."}, reference]
    create(client, [*asked, {"role": "user", "content": "And now?"}])
    assert first.output_text in prompt_of(deployment)
    with pytest.raises(openai.NotFoundError) as caught:
        create(client, [{"type": "item_reference", "id": "msg_nothing"}])
    assert caught.value.code == "item_not_found"


def test_store_false_stores_nothing(deployment: Deployment, client: OpenAI) -> None:
    answer = create(client, "Hi", store=False)
    assert answer.store is False
    with pytest.raises(openai.NotFoundError) as caught:
        client.responses.retrieve(answer.id)
    assert caught.value.code == "response_not_found"
    with pytest.raises(openai.BadRequestError) as refused:
        create(client, "Hi", previous_response_id=answer.id)
    assert refused.value.code == "previous_response_not_found"
    assert refused.value.param == "previous_response_id" and answer.id in str(refused.value)


def test_a_response_is_erased_for_good(deployment: Deployment, client: OpenAI) -> None:
    made = create(client, "Hi")
    client.responses.delete(made.id)
    for act in (client.responses.retrieve, client.responses.delete):
        with pytest.raises(openai.NotFoundError):
            act(made.id)
    with deployment.services.database.read() as session:
        for table, column in (("stored_responses", "id"), ("stored_response_items", "response_id")):
            query = text(f"select count(*) from {table} where {column} = :id")
            assert session.execute(query, {"id": made.id}).scalar() == 0


def test_texts_are_encrypted_at_rest_and_expire(deployment: Deployment, client: OpenAI) -> None:
    made = create(client, f"Tell me of {SECRET}.")
    database = deployment.services.database
    with database.read() as session:
        query = text("select * from stored_responses where id = :id")
        (row,) = session.execute(query, {"id": made.id}).mappings()
    assert SECRET.encode() not in bytes(row["sealed"]) and SECRET not in str(row)
    later = deployment.services.clock.now() + timedelta(days=30, minutes=1)
    with database.transaction() as session:
        records.drop_expired(session, later - timedelta(minutes=5))
    client.responses.retrieve(made.id)
    with database.transaction() as session:
        records.drop_expired(session, later)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(made.id)


def test_another_organisation_finds_nothing(deployment: Deployment, client: OpenAI) -> None:
    made = create(client, "Hi")
    with deployment.services.database.transaction() as session:
        session.execute(
            text("update stored_responses set tenant_id = 'org_other' where id = :id"),
            {"id": made.id},
        )
    for act in (
        lambda: client.responses.retrieve(made.id),
        lambda: client.responses.delete(made.id),
        lambda: create(client, [{"type": "item_reference", "id": made.output[0].id}]),
    ):
        with pytest.raises(openai.NotFoundError):
            act()
    with pytest.raises(openai.BadRequestError, match="not found"):
        create(client, "Hi", previous_response_id=made.id)


@pytest.fixture
def never_stores(deployment: Deployment) -> Iterator[None]:
    def _set(settings: dict[str, Any]) -> None:
        answer = httpx.patch(
            f"{deployment.url}/admin/v1/tenant",
            json={"settings": settings},
            headers=deployment.headers,
        )
        assert answer.status_code == 200, answer.text
        deployment.services.key_cache.poll()

    _set({"store_responses": False})
    yield
    _set({"store_responses": None})


@pytest.mark.usefixtures("never_stores")
def test_an_organisation_may_store_nothing(client: OpenAI) -> None:
    answer = create(client, "Hi")
    assert answer.store is False
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(answer.id)
    with pytest.raises(openai.BadRequestError) as caught:
        create(client, "Hi", store=True)
    assert caught.value.param == "store"


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"conversation": {"name": "x"}}, "conversation"),
        ({"metadata": {"a" * 65: "x"}}, "metadata"),
        ({"include": ["mood"]}, "include"),
        ({"extra_body": {"store": "yes"}}, "store"),
        ({"extra_body": {"previous_response_id": 7}}, "previous_response_id"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(client: OpenAI, more: Any, named: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        create(client, "Hi", **more)
    assert caught.value.param == named


def test_a_repeated_request_is_stored_once(deployment: Deployment, client: OpenAI) -> None:
    headers = {"Idempotency-Key": "stored-once"}
    first = create(client, "Hi", extra_headers=headers)
    again = create(client, "Hi", extra_headers=headers)
    assert again.id == first.id
    assert client.responses.retrieve(first.id).output_text == first.output_text


def test_reasoning_in_the_history_is_taken(deployment: Deployment, client: OpenAI) -> None:
    reasoning: Any = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "x"}
    asked: Any = [{"role": "user", "content": "Hi"}, reasoning, {"role": "user", "content": "So?"}]
    create(client, asked, include=["reasoning.encrypted_content"])
    assert "So?" in prompt_of(deployment)
