"""Files and batches by OpenAI's SDK: run behind all others, limited, metered, and kept over restarts."""

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from anthropic import Anthropic
from openai import OpenAI
from sqlalchemy import select, update

from core.batches.models import Batch, BatchLine
from core.clock import SystemClock
from core.tenants import keys
from core.tenants.models import ApiKey
from core.tenants.scope import scope_of_operator
from gateway.serving.batches.input_file import validate as checked_input
from tests.gateway.deployment import MODEL, Deployment, running_deployment
from tests.gateway.formats.test_openapi_conformance import check, document

__all__ = ["document"]
CHAT = "/v1/chat/completions"


def line(name: str, url: str = CHAT, **body: Any) -> dict[str, Any]:
    asked = {"model": MODEL, "messages": [{"role": "user", "content": name}], "max_tokens": 3}
    return {"custom_id": name, "method": "POST", "url": url, "body": {**asked, **body}}


def jsonl(*lines: dict[str, Any]) -> bytes:
    return b"".join(json.dumps(each).encode() + b"\n" for each in lines)


def upload(client: OpenAI, content: bytes) -> str:
    return client.files.create(file=("in.jsonl", content), purpose="batch").id


def start(client: OpenAI, *lines: dict[str, Any], endpoint: Any = CHAT) -> Any:
    return client.batches.create(
        input_file_id=upload(client, jsonl(*lines)),
        endpoint=endpoint,
        completion_window="24h",
        metadata={"run": "nightly"},
    )


def wait(
    client: OpenAI, batch_id: str, until: Callable[[Any], bool] = lambda b: b.status in ENDED
) -> Any:
    deadline = time.monotonic() + 60
    while not until(found := client.batches.retrieve(batch_id)):
        assert time.monotonic() < deadline, found
        time.sleep(0.05)
    return found


ENDED = ("completed", "failed", "expired", "cancelled")


def lines_of(client: OpenAI, file_id: str | None) -> list[dict[str, Any]]:
    assert file_id is not None
    return [json.loads(each) for each in client.files.content(file_id).text.splitlines()]


def test_a_batch_runs_through_the_pipeline_and_gives_output_and_errors(
    deployment: Deployment, client: OpenAI
) -> None:
    wrong = line("b", temperature=9)
    batch = start(client, line("a"), wrong, line("c", url=CHAT))
    assert batch.status == "validating" and batch.metadata == {"run": "nightly"}
    done = wait(client, batch.id)
    assert done.status == "completed" and done.model == MODEL
    counts = done.request_counts
    assert (counts.total, counts.completed, counts.failed) == (3, 2, 1)
    out = lines_of(client, done.output_file_id)
    assert [each["custom_id"] for each in out] == ["a", "c"]
    for each in out:
        assert each["response"]["status_code"] == 200 and each["error"] is None
        assert each["response"]["body"]["choices"][0]["message"]["content"]
    errors = lines_of(client, done.error_file_id)
    assert [each["custom_id"] for each in errors] == ["b"]
    assert errors[0]["response"]["status_code"] == 400
    assert errors[0]["response"]["body"]["error"]["param"] == "temperature"
    mine = deployment.events(2, batch_job=batch.id)
    assert len(mine) == 2
    assert {event["request_id"] for event in mine} == {
        each["response"]["request_id"] for each in out
    }
    assert done.usage.input_tokens == sum(event["input_tokens"] for event in mine)
    assert done.usage.output_tokens == sum(event["output_tokens"] for event in mine) == 6
    assert all(event["route"] == CHAT and event["status"] == 200 for event in mine)
    with deployment.services.database.read() as session:
        left = session.scalars(select(BatchLine).where(BatchLine.batch_id == batch.id)).all()
    assert not left, "what a batch said is in its files alone"


@pytest.mark.parametrize(
    ("endpoint", "body"),
    [
        ("/v1/completions", {"prompt": "Once", "max_tokens": 2}),
        ("/v1/responses", {"input": "Hi", "max_output_tokens": 2}),
    ],
)
def test_other_endpoints(client: OpenAI, endpoint: str, body: dict[str, Any]) -> None:
    asked = {"custom_id": "x", "method": "POST", "url": endpoint, "body": {"model": MODEL, **body}}
    done = wait(client, start(client, asked, endpoint=endpoint).id)
    assert done.request_counts.completed == 1 and done.usage.output_tokens == 2


def test_every_step_is_passed_and_the_line_goes_behind_all_others(
    deployment: Deployment, client: OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = deployment.steps(monkeypatch)
    batch = start(client, line("alone"))
    wait(client, batch.id)
    assert [step for step in steps if step != "principal"] == ["reserve", "screen", "open", "close"]
    assert "principal" in steps
    assert deployment.engine.submitted[-1].priority == -1


def without_null(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def test_the_objects_are_as_openais_document_says(
    document: dict[str, Any], deployment: Deployment, client: OpenAI
) -> None:
    done = wait(client, start(client, line("a")).id)
    get = lambda path: httpx.get(f"{deployment.url}{path}", headers=deployment.headers).json()  # noqa: E731
    # OpenAI's API writes null where there is no value yet; its document knows no null.
    check(document, "Batch", without_null(get(f"/v1/batches/{done.id}")))
    listed = get("/v1/batches")
    check(document, "ListBatchesResponse", listed | {"data": [*map(without_null, listed["data"])]})
    check(document, "OpenAIFile", get(f"/v1/files/{done.input_file_id}"))
    check(document, "OpenAIFile", get(f"/v1/files/{done.output_file_id}"))
    check(document, "ListFilesResponse", get("/v1/files"))


def test_files_are_listed_read_and_deleted(client: OpenAI) -> None:
    content = jsonl(line("x")) * 20_000  # over some pieces
    made = client.files.create(
        file=("big.jsonl", content),
        purpose="batch",
        expires_after={"anchor": "created_at", "seconds": 3600},
    )
    assert made.bytes == len(content) and made.filename == "big.jsonl"
    assert made.expires_at == made.created_at + 3600
    assert client.files.content(made.id).content == content
    assert made.id in [each.id for each in client.files.list(purpose="batch")]
    page = client.files.list(limit=1)
    assert len(page.data) == 1 and page.has_more
    assert client.files.delete(made.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(made.id)


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (b"", "empty_file"),
        (b"\n\n", "empty_file"),
        (b"not json\n", "invalid_json_line"),
        (b"[1]\n", "invalid_json_line"),
        (b"\xff\xfe\n", "invalid_json_line"),
        (jsonl(line("a"), line("a")), "duplicate_custom_id"),
        (jsonl(line("")), "invalid_custom_id"),
        (jsonl({**line("a"), "method": "GET"}), "invalid_method"),
        (jsonl(line("a", url="/v1/embeddings")), "mismatched_url"),
        (jsonl(line("a", stream=True)), "invalid_body"),
        (jsonl({**line("a"), "body": "x"}), "invalid_body"),
    ],
)
def test_a_wrong_file_fails_the_batch_and_runs_nothing(
    deployment: Deployment, client: OpenAI, content: bytes, code: str
) -> None:
    before = len(deployment.engine.submitted)
    made = client.batches.create(
        input_file_id=upload(client, content), endpoint=CHAT, completion_window="24h"
    )
    failed = wait(client, made.id)
    assert failed.status == "failed" and failed.errors.data[0].code == code
    assert len(deployment.engine.submitted) == before


def test_a_batch_has_at_most_fifty_thousand_lines() -> None:
    many = (json.dumps(line(str(i))).encode() for i in range(50_001))
    found = checked_input(many, CHAT, 1 << 20)
    assert [error["code"] for error in found.errors] == ["too_many_requests"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"endpoint": "/v1/moderations"}, "endpoint"),
        ({"completion_window": "1h"}, "completion_window"),
        ({"metadata": {str(i): "x" for i in range(17)}}, "metadata"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 9}}, "output_expires_after"),
        ({"surprise": 1}, "surprise"),
    ],
)
def test_wrong_batches_are_refused_by_name(
    deployment: Deployment, client: OpenAI, body: dict[str, Any], param: str
) -> None:
    given = {"input_file_id": "file_x", "endpoint": CHAT, "completion_window": "24h", **body}
    answer = httpx.post(f"{deployment.url}/v1/batches", json=given, headers=deployment.headers)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param


def test_wrong_uploads_are_refused(deployment: Deployment, client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="purpose"):
        client.files.create(file=("x", b"x"), purpose="assistants")
    for form in ({"data": {"purpose": "batch"}}, {"content": b"x"}):
        answer = httpx.post(f"{deployment.url}/v1/files", headers=deployment.headers, **form)  # type: ignore[arg-type]
        assert answer.status_code == 400, answer.text


def test_a_file_over_the_bound_is_a_413_and_leaves_nothing(tmp_path: Path) -> None:
    with running_deployment(tmp_path, settings={"max_file_mb": 1}) as deployment:
        form = {"files": {"file": ("x", b"x" * (1 << 20) + b"y" * 9)}, "data": {"purpose": "batch"}}
        answer = httpx.post(f"{deployment.url}/v1/files", headers=deployment.headers, **form)  # type: ignore[arg-type]
        assert answer.status_code == 413, answer.text
        listed = httpx.get(f"{deployment.url}/v1/files", headers=deployment.headers).json()
        assert listed["data"] == []


def test_another_project_sees_nothing(deployment: Deployment, client: OpenAI) -> None:
    done = wait(client, start(client, line("a")).id)
    from core.tenants import organisations

    with deployment.services.database.transaction() as session:
        scope = scope_of_operator(deployment.tenant_id)
        project = organisations.create_project(
            session, scope, SystemClock(), name=f"other-{time.monotonic_ns()}"
        )
        other = keys.issue(session, scope, SystemClock(), project_id=project.id, name="other")
    with OpenAI(base_url=f"{deployment.url}/v1", api_key=other.secret, max_retries=0) as stranger:
        assert stranger.files.list().data == [] and stranger.batches.list().data == []
        for act in (
            lambda: stranger.files.retrieve(done.output_file_id),
            lambda: stranger.files.content(done.output_file_id),
            lambda: stranger.files.delete(done.input_file_id),
            lambda: stranger.batches.retrieve(done.id),
            lambda: stranger.batches.cancel(done.id),
            lambda: start_of(stranger, done.input_file_id),
        ):
            with pytest.raises(openai.NotFoundError):
                act()


def start_of(client: OpenAI, file_id: str) -> Any:
    return client.batches.create(input_file_id=file_id, endpoint=CHAT, completion_window="24h")


@pytest.fixture
def slow(tmp_path: Path) -> Iterator[tuple[Deployment, OpenAI]]:
    with (
        running_deployment(
            tmp_path, token_delay_s=0.05, settings={"batch_concurrency": 2}
        ) as deployment,
        OpenAI(base_url=f"{deployment.url}/v1", api_key=deployment.key, max_retries=0) as client,
    ):
        yield deployment, client


def many(number: int, tokens: int = 3) -> list[dict[str, Any]]:
    return [line(f"n{i}", max_tokens=tokens) for i in range(number)]


def test_a_cancelled_batch_keeps_what_it_has_and_stops(slow: tuple[Deployment, OpenAI]) -> None:
    deployment, client = slow
    batch = start(client, *many(200))
    wait(client, batch.id, lambda found: found.request_counts.completed > 0)
    assert client.batches.cancel(batch.id).status in ("cancelling", "cancelled")
    done = wait(client, batch.id)
    assert done.status == "cancelled" and 0 < done.request_counts.completed < 200
    out, left = lines_of(client, done.output_file_id), lines_of(client, done.error_file_id)
    assert len(out) == done.request_counts.completed
    assert done.request_counts.completed + done.request_counts.failed == 200
    assert {each["error"]["code"] for each in left} == {"batch_cancelled"}
    assert sorted(each["custom_id"] for each in out + left) == sorted(f"n{i}" for i in range(200))
    sent = len(deployment.engine.submitted)
    time.sleep(0.3)
    assert len(deployment.engine.submitted) == sent
    with pytest.raises(openai.ConflictError) as told:
        client.batches.cancel(start_ended(client))
    assert told.value.code == "batch_ended"


def start_ended(client: OpenAI) -> str:
    return str(wait(client, start(client, line("a")).id).id)


def test_at_its_end_what_did_not_run_has_expired(slow: tuple[Deployment, OpenAI]) -> None:
    deployment, client = slow
    batch = start(client, *many(100))
    wait(client, batch.id, lambda found: found.request_counts.completed > 0)
    with deployment.services.database.transaction() as session:
        late = SystemClock().now() - timedelta(seconds=1)
        session.execute(update(Batch).where(Batch.id == batch.id).values(expires_at=late))
    done = wait(client, batch.id)
    counts = done.request_counts
    assert done.status == "expired" and counts.completed + counts.failed == 100
    errors = lines_of(client, done.error_file_id)
    assert errors[-1]["response"] is None and errors[-1]["error"]["code"] == "batch_expired"
    out = lines_of(client, done.output_file_id)
    assert sorted(each["custom_id"] for each in out + errors) == sorted(f"n{i}" for i in range(100))


def test_a_batch_cancelled_before_its_first_line_lists_them_all(
    slow: tuple[Deployment, OpenAI],
) -> None:
    _, client = slow
    batch = start(client, *many(40))
    client.batches.cancel(batch.id)
    done = wait(client, batch.id)
    assert done.status == "cancelled" and done.request_counts.total == 40
    out = lines_of(client, done.output_file_id) if done.output_file_id else []
    assert len(out) + len(lines_of(client, done.error_file_id)) == 40


def test_each_request_of_a_message_batch_has_a_result(slow: tuple[Deployment, OpenAI]) -> None:
    deployment, _ = slow
    params: Any = {"model": MODEL, "max_tokens": 3, "messages": [{"role": "user", "content": "Hi"}]}
    with Anthropic(base_url=deployment.url, api_key=deployment.key, max_retries=0) as claude:
        for end in ("canceled", "expired"):
            made = claude.messages.batches.create(
                requests=[{"custom_id": f"n{i}", "params": params} for i in range(60)]
            )
            while claude.messages.batches.retrieve(made.id).request_counts.succeeded == 0:
                time.sleep(0.05)
            if end == "canceled":
                claude.messages.batches.cancel(made.id)
            else:
                own = made.id.replace("msgbatch_", "batch_")
                with deployment.services.database.transaction() as session:
                    late = SystemClock().now() - timedelta(seconds=1)
                    session.execute(update(Batch).where(Batch.id == own).values(expires_at=late))
            while (batch := claude.messages.batches.retrieve(made.id)).processing_status != "ended":
                time.sleep(0.05)
            told = Counter(each.result.type for each in claude.messages.batches.results(made.id))
            counts = batch.request_counts
            assert told == {"succeeded": counts.succeeded, end: getattr(counts, end)}
            assert sum(told.values()) == 60 and counts.errored == counts.processing == 0


def test_a_file_with_a_byte_order_mark_is_read(client: OpenAI) -> None:
    raw = "\ufeff" + "\r\n".join(json.dumps(line(name)) for name in "ab") + "\r\n"
    file = client.files.create(file=("b.jsonl", raw.encode()), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
    assert wait(client, batch.id).request_counts.completed == 2


def test_fields_without_a_value_are_null(deployment: Deployment, client: OpenAI) -> None:
    batch = start(client, line("a"))
    found = httpx.get(f"{deployment.url}/v1/batches/{batch.id}", headers=deployment.headers).json()
    empty = {"errors", "cancelled_at", "expired_at", "failed_at", "error_file_id"}
    assert {name for name in empty if found.get(name, "absent") is None} == empty
    wait(client, batch.id)


def test_a_revoked_keys_batch_runs_no_further(slow: tuple[Deployment, OpenAI]) -> None:
    deployment, client = slow
    batch = start(client, *many(60))
    wait(client, batch.id, lambda found: found.request_counts.completed > 0)
    with deployment.services.database.transaction() as session:
        now = SystemClock().now()
        session.execute(update(ApiKey).values(revoked_at=now))
    deadline = time.monotonic() + 60
    while True:
        with deployment.services.database.read() as session:
            found = session.get_one(Batch, batch.id)
        if found.status == "completed":
            break
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert found.failed > 0 and found.completed + found.failed == 60


def test_a_batch_waits_for_a_busy_gateway(
    slow: tuple[Deployment, OpenAI], monkeypatch: pytest.MonkeyPatch
) -> None:
    deployment, client = slow
    deployment.call(deployment.engine.die)
    batch = start(client, *many(3))
    time.sleep(1.5)
    assert client.batches.retrieve(batch.id).request_counts.failed == 0
    deployment.engine._alive = True
    done = wait(client, batch.id)
    assert (done.request_counts.completed, done.request_counts.failed) == (3, 0)


def _billed(deployment: Deployment, batch_id: str) -> set[str]:
    events = deployment.events(0, batch_job=batch_id)
    return {e["request_id"] for e in events if e["output_tokens"] == 3}


def test_a_restart_goes_on_where_it_was(tmp_path: Path) -> None:
    settings = {"batch_concurrency": 2}
    with running_deployment(tmp_path, token_delay_s=0.02, settings=settings) as deployment:
        key = deployment.key
        with OpenAI(base_url=f"{deployment.url}/v1", api_key=key, max_retries=0) as client:
            batch = start(client, *many(60))
            wait(client, batch.id, lambda found: found.request_counts.completed > 3)
    with running_deployment(tmp_path, settings=settings) as again:
        secret = again.key or key
        with OpenAI(base_url=f"{again.url}/v1", api_key=secret, max_retries=0) as client:
            done = wait(client, batch.id)
            out = lines_of(client, done.output_file_id)
        assert (done.status, done.request_counts.completed) == ("completed", 60)
        assert [each["custom_id"] for each in out] == [f"n{i}" for i in range(60)]
        told = {each["response"]["request_id"] for each in out}
        # The lines that the restart broke off have a waived event each, beside those of the 60.
        deadline = time.monotonic() + 60
        while not told <= (billed := _billed(again, batch.id)) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert told <= billed
