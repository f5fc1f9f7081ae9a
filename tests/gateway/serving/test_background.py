"""Background responses with OpenAI's SDK: polled, streamed again, cancelled, failed, charged."""

import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI
from sqlalchemy import text

from tests.gateway.deployment import MODEL, Deployment, running_deployment
from tests.gateway.serving.test_stored_responses import create

SECRET = "xylophone marmalade"


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    with running_deployment(tmp_path_factory.mktemp("slow"), token_delay_s=0.02) as made:
        yield made


@pytest.fixture
def slow_client(slow: Deployment) -> Iterator[OpenAI]:
    url = f"{slow.url}/v1"
    with OpenAI(base_url=url, api_key=slow.key, max_retries=0, timeout=60) as made:
        yield made


def start(client: OpenAI, tokens: int = 20, **more: Any) -> Any:
    return client.responses.create(
        model=MODEL,
        input="Hello",
        max_output_tokens=tokens,
        background=True,
        extra_body={"ignore_eos": True},
        **more,
    )


def ended(client: OpenAI, response_id: str, timeout_s: float = 60) -> Any:
    deadline = time.monotonic() + timeout_s
    while True:
        found = client.responses.retrieve(response_id)
        if found.status not in ("queued", "in_progress"):
            return found
        assert time.monotonic() < deadline, f"{response_id} is still {found.status}"
        time.sleep(0.05)


def charged(deployment: Deployment, response_id: str) -> dict[str, Any]:
    return deployment.event(response_id.replace("resp_", "req_"))


def test_it_is_queued_then_completed_and_charged_as_any_other(
    slow: Deployment, slow_client: OpenAI
) -> None:
    made = start(slow_client, metadata={"run": "7"})
    assert (made.status, made.background, made.store) == ("queued", True, True)
    assert made.output == [] and made.usage is None and made.metadata == {"run": "7"}
    states = {slow_client.responses.retrieve(made.id).status for _ in range(5)}
    assert states <= {"queued", "in_progress", "incomplete"}
    done = ended(slow_client, made.id)
    assert done.status == "incomplete" and done.background is True
    assert done.created_at == made.created_at and done.usage.output_tokens == 20
    event = charged(slow, made.id)
    assert (event["output_tokens"], event["status"]) == (20, 200)
    assert event["input_tokens"] == done.usage.input_tokens
    listed: Any = slow_client.responses.input_items.list(made.id).data
    assert [each.content[0].text for each in listed] == ["Hello"]
    after = create(slow_client, "And?", previous_response_id=made.id)
    assert after.previous_response_id == made.id


def test_its_events_are_streamed_from_any_number(slow_client: OpenAI) -> None:
    stream = start(slow_client, tokens=30, stream=True)
    seen = []
    for event in stream:
        seen.append(event)
        if len(seen) == 8:
            break
    stream.close()  # the generation goes on
    response_id = seen[0].response.id
    rest = list(
        slow_client.responses.retrieve(
            response_id, stream=True, starting_after=seen[-1].sequence_number
        )
    )
    events = [*seen, *rest]
    assert [each.sequence_number for each in events] == list(range(len(events)))
    assert events[-1].type == "response.incomplete"
    told = "".join(each.delta for each in events if each.type == "response.output_text.delta")
    assert told == events[-1].response.output_text
    again = list(slow_client.responses.retrieve(response_id, stream=True))
    assert [each.to_dict() for each in again] == [each.to_dict() for each in events]
    read = slow_client.responses.retrieve(response_id)
    assert read.to_dict() == events[-1].response.to_dict()


def test_a_cancelled_one_keeps_and_charges_what_was_generated(
    slow: Deployment, slow_client: OpenAI
) -> None:
    made = start(slow_client, tokens=400)
    while slow_client.responses.retrieve(made.id).status == "queued":
        time.sleep(0.05)
    cancelled = slow_client.responses.cancel(made.id)
    assert cancelled.status == "cancelled"
    event = charged(slow, made.id)
    assert 0 < event["output_tokens"] < 400
    read = slow_client.responses.retrieve(made.id)
    assert read.status == "cancelled" and read.output_text
    assert read.usage is not None and read.usage.output_tokens == event["output_tokens"]
    assert slow_client.responses.cancel(made.id).status == "cancelled"
    assert len(list(slow_client.responses.retrieve(made.id, stream=True))) > 2


def test_one_of_the_foreground_cannot_be_cancelled_or_streamed_again(client: OpenAI) -> None:
    made = create(client, "Hi")
    with pytest.raises(openai.BadRequestError):
        client.responses.cancel(made.id)
    with pytest.raises(openai.BadRequestError) as caught:
        list(client.responses.retrieve(made.id, stream=True))
    assert caught.value.param == "stream"


def test_what_is_refused_at_once_is_refused_and_not_stored(
    deployment: Deployment, client: OpenAI
) -> None:
    def _stored() -> Any:
        with deployment.services.database.read() as session:
            return session.execute(text("select count(*) from stored_responses")).scalar()

    before = _stored()
    with pytest.raises(openai.BadRequestError) as caught:
        start(client, temperature=9)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as caught:
        start(client, store=False)
    assert caught.value.param == "background"
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model="nothing", input="x", background=True)
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model=MODEL, input="a " * 2000, background=True)
    assert caught.value.code == "context_length_exceeded"
    assert _stored() == before


def test_a_deleted_one_is_ended(slow: Deployment, slow_client: OpenAI) -> None:
    made = start(slow_client, tokens=400)
    slow_client.responses.delete(made.id)
    assert charged(slow, made.id)["output_tokens"] < 400
    with pytest.raises(openai.NotFoundError):
        slow_client.responses.retrieve(made.id)
    with slow.services.database.read() as session:
        query = text("select count(*) from stored_response_events where response_id = :id")
        assert session.execute(query, {"id": made.id}).scalar() == 0


def test_it_appends_to_its_conversation(slow_client: OpenAI) -> None:
    conversation = slow_client.conversations.create()
    made = start(slow_client, tokens=4, conversation=conversation.id)
    done = ended(slow_client, made.id)
    items: list[Any] = list(slow_client.conversations.items.list(conversation.id, order="asc"))
    assert items[0].content[0].text == "Hello"
    assert items[1].content[0].text == done.output_text


def test_it_is_not_built_on_while_it_runs(slow_client: OpenAI) -> None:
    made = start(slow_client, tokens=400)
    with pytest.raises(openai.BadRequestError) as caught:
        create(slow_client, "x", previous_response_id=made.id)
    assert caught.value.param == "previous_response_id"
    slow_client.responses.cancel(made.id)


def test_events_are_encrypted_at_rest(slow: Deployment, slow_client: OpenAI) -> None:
    done = ended(slow_client, start(slow_client, instructions=SECRET).id)
    with slow.services.database.read() as session:
        query = text("select sealed from stored_response_events where response_id = :id")
        rows = [bytes(row[0]) for row in session.execute(query, {"id": done.id})]
    assert rows and not any(b"response.created" in row or SECRET.encode() in row for row in rows)


def test_a_repeated_request_with_a_key_starts_one(slow: Deployment, slow_client: OpenAI) -> None:
    headers = {"Idempotency-Key": "background-once"}
    first, again = [start(slow_client, tokens=4, extra_headers=headers) for _ in range(2)]
    assert first.id == again.id
    assert ended(slow_client, first.id).status == "incomplete"


def test_a_stopped_gateway_fails_its_own_and_the_next_one_shows_it(tmp_path: Path) -> None:
    with running_deployment(tmp_path, token_delay_s=0.02) as deployment:
        key = deployment.key
        with OpenAI(base_url=f"{deployment.url}/v1", api_key=key, max_retries=0) as client:
            made = start(client, tokens=400)
            while client.responses.retrieve(made.id).status == "queued":
                time.sleep(0.05)
    with (
        running_deployment(tmp_path) as deployment,
        OpenAI(base_url=f"{deployment.url}/v1", api_key=key, max_retries=0) as client,
    ):
        event = charged(deployment, made.id)
        found = client.responses.retrieve(made.id)
        events = list(client.responses.retrieve(made.id, stream=True))
    assert found.status == "failed" and found.error is not None
    assert "stopped" in found.error.message and found.output_text
    assert found.usage is not None and found.usage.output_tokens == event["output_tokens"] > 0
    assert events[-1].type == "response.failed"


def test_one_whose_lease_has_run_out_fails(slow: Deployment, slow_client: OpenAI) -> None:
    made = ended(slow_client, start(slow_client, tokens=4).id)
    past = slow.services.clock.now() - timedelta(seconds=1)
    with slow.services.database.transaction() as session:
        session.execute(
            text(
                "update stored_responses set status = 'in_progress', lease_until = :past"
                " where id = :id"
            ),
            {"id": made.id, "past": past.replace(tzinfo=None)},
        )
    assert ended(slow_client, made.id).status == "failed"


def test_it_is_of_its_project_only(slow: Deployment, slow_client: OpenAI) -> None:
    made = start(slow_client, tokens=4)
    for method, path in (("GET", f"/{made.id}?stream=true"), ("POST", f"/{made.id}/cancel")):
        url = f"{slow.url}/v1/responses{path}"
        assert httpx.request(method, url).status_code == 401
    ended(slow_client, made.id)
    with slow.services.database.transaction() as session:
        session.execute(
            text("update stored_responses set tenant_id = 'org_other' where id = :id"),
            {"id": made.id},
        )
    for act in (
        lambda: slow_client.responses.cancel(made.id),
        lambda: list(slow_client.responses.retrieve(made.id, stream=True)),
    ):
        with pytest.raises(openai.NotFoundError):
            act()
