"""A name and a text, sent through every surface, are found nowhere after the erasure of their end user:
in no table, whose encrypted columns are opened, and in no file of the data directory."""

import json
import threading
import time
import uuid
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import LargeBinary, select

from core.errors import NotFound, TollhouseError
from core.responses.end_users import end_users_of
from core.sealing import Sealer
from gateway.admin.erasures import MOST_ERASURES
from gateway.formats.registry import inference_surfaces
from gateway.metering.spool_watch import wait_until_shipped
from migrations.tables import metadata
from tests.gateway.deployment import MODEL, Deployment, running_deployment

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
ENDED = ("completed", "incomplete", "failed", "cancelled", "expired")
MINUTE_S = 60
WRITTEN = {
    "conversation_items.sealed",
    "conversations.sealed",
    "file_chunks.content",
    "idempotency_records.response",
    "stored_completions.sealed",
    "stored_response_events.sealed",
    "stored_responses.sealed",
}


class Person:
    """An end user of the demo tenant, with words of their own."""

    def __init__(self, deployment: Deployment) -> None:
        self.name = f"erin-{uuid.uuid4().hex}@example.com"
        self.text = f"xylophone {uuid.uuid4().hex}"
        self._deployment = deployment

    def ask(self, method: str, path: str, body: Any = None, **more: Any) -> Any:
        headers = self._deployment.headers | more.pop("headers", {})
        url = f"{self._deployment.url}{path}"
        answer = httpx.request(method, url, json=body, headers=headers, timeout=60, **more)
        assert answer.is_success, answer.text
        is_json = answer.headers["content-type"].startswith("application/json")
        return answer.json() if is_json else answer.content

    def chat(self, **more: Any) -> dict[str, Any]:
        return {"model": MODEL, "messages": self._messages(), "max_tokens": 3, **more}

    def response(self, **more: Any) -> dict[str, Any]:
        return {"model": MODEL, "input": self.text, "max_output_tokens": 16, **more}

    def message(self) -> dict[str, Any]:
        return self.chat(metadata={"user_id": self.name})

    def _messages(self) -> list[dict[str, str]]:
        return [{"role": "user", "content": self.text}]

    def wait(self, path: str, until: Callable[[Any], bool]) -> Any:
        deadline = time.monotonic() + MINUTE_S
        while not until(found := self.ask("GET", path)):
            assert time.monotonic() < deadline, found
            time.sleep(0.05)
        return found

    def upload(self, *lines: dict[str, Any]) -> str:
        content = b"".join(json.dumps(each).encode() + b"\n" for each in lines)
        sent = {"file": ("in.jsonl", content)}
        return str(self.ask("POST", "/v1/files", data={"purpose": "batch"}, files=sent)["id"])

    def batch(self, *lines: dict[str, Any]) -> Any:
        made = self.ask(
            "POST",
            "/v1/batches",
            {
                "input_file_id": self.upload(*lines),
                "endpoint": CHAT,
                "completion_window": "24h",
            },
        )
        return self.wait(f"/v1/batches/{made['id']}", lambda batch: batch["status"] in ENDED)


def line(name: str, body: dict[str, Any]) -> dict[str, Any]:
    return {"custom_id": name, "method": "POST", "url": CHAT, "body": body}


def send_everything(person: Person) -> None:
    """Through every surface, with each field that names an end user."""
    user = {"user": person.name}
    person.ask("POST", CHAT, person.chat(store=True, **user))
    person.ask("POST", CHAT, person.chat(store=True, stream=True, **user))
    person.ask("POST", CHAT, person.chat(store=True, safety_identifier=person.name))
    person.ask("POST", "/v1/completions", {"model": MODEL, "prompt": person.text, **user})
    first = person.ask("POST", RESPONSES, person.response(instructions=person.text, **user))
    person.ask("POST", RESPONSES, person.response(previous_response_id=first["id"], **user))
    person.ask("POST", RESPONSES, person.response(safety_identifier=person.name))
    later = person.ask(
        "POST", RESPONSES, person.response(background=True, instructions=person.text, **user)
    )
    person.wait(f"{RESPONSES}/{later['id']}", lambda found: found["status"] in ENDED)
    said = {"type": "message", "role": "user", "content": person.text}
    talk = person.ask(
        "POST", "/v1/conversations", {"items": [said], "metadata": {"of": person.text}}
    )
    person.ask("POST", RESPONSES, person.response(conversation=talk["id"], store=False, **user))
    person.ask("POST", MESSAGES, person.message())
    for path, body in (
        (CHAT, person.chat(**user)),
        (RESPONSES, person.response(metadata={"of": person.text}, **user)),
        (MESSAGES, person.message()),
    ):
        person.ask("POST", path, body, headers={"idempotency-key": uuid.uuid4().hex})
    batch = person.batch(line("mine", person.chat(**user)), line("same", person.chat(**user)))
    assert batch["status"] == "completed", batch
    asked = {"requests": [{"custom_id": "mine", "params": person.message()}]}
    made = person.ask("POST", f"{MESSAGES}/batches", asked)
    path = f"{MESSAGES}/batches/{made['id']}"
    person.wait(path, lambda found: found["processing_status"] == "ended")


def erase(deployment: Deployment, person: Person) -> dict[str, int]:
    """After the usage of all requests is stored, as the guide says."""
    wait_until_shipped(deployment.services.settings)
    found: dict[str, int] = person.ask("POST", "/admin/v1/erasures", {"end_user": person.name})
    return found


def in_tables(deployment: Deployment, words: str) -> list[str]:
    """`table.column` of each value in which the words are, encrypted ones opened."""
    found = []
    sealer = Sealer(deployment.services.operator_token)
    with deployment.services.database.read() as session:
        for table in metadata.sorted_tables:
            for row in session.execute(select(table)).mappings():
                for column in table.columns:
                    value = row[column.name]
                    if isinstance(column.type, LargeBinary) and column.name == "sealed":
                        value = opened(sealer, deployment.tenant_id, dict(row))
                    shown = value if isinstance(value, bytes) else str(value).encode()
                    if words.encode() in shown:
                        found.append(f"{table.name}.{column.name}")
    return found


def opened(sealer: Sealer, tenant_id: str, row: dict[str, Any]) -> bytes:
    """Tried under every name that a row's text can have."""
    if "response_id" in row:
        name = f"{row['response_id']}/{row['first']}"
        return zlib.decompress(sealer.open(tenant_id, name, row["sealed"]))
    name = row["id"] if "id" in row else f"{row['conversation_id']}/{row['item_id']}"
    try:
        return sealer.open(tenant_id, name, row["sealed"])
    except NotFound:
        pytest.fail(f"{name} cannot be opened, so nobody knows what is in it")


def in_files(folder: Path, words: str) -> list[str]:
    files = [each for each in folder.rglob("*") if each.is_file()]
    return [str(each.relative_to(folder)) for each in files if words.encode() in each.read_bytes()]


def test_what_an_end_user_sent_is_found_nowhere_after_their_erasure(tmp_path: Path) -> None:
    with running_deployment(tmp_path) as own:
        erin, bob = Person(own), Person(own)
        send_everything(erin)
        send_everything(bob)
        for person in (erin, bob):
            assert set(in_tables(own, person.text)) == WRITTEN, "the search finds what is there"
        before = sorted(in_tables(own, bob.text))
        erased = erase(own, erin)
        assert in_tables(own, erin.text) == in_tables(own, erin.name) == []
        assert sorted(in_tables(own, bob.text)) == before, "nothing of another goes"
        assert erased["responses"] == 5 and erased["completions"] == 3, erased
        assert (erased["conversations"], erased["idempotent_answers"]) == (1, 3)
        assert erased["file_lines"] == 6 and erased["unreadable"] == 0
        assert set(erase(own, erin).values()) == {0}
    for words in (erin.text, erin.name):
        assert in_files(tmp_path, words) == []


def test_all_surfaces_name_the_end_user_alike() -> None:
    """The reader of raw bodies, which idempotent requests and batches use, and each surface's own."""
    texts = {
        CHAT: {"messages": [{"role": "user", "content": "Hi"}]},
        MESSAGES: {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1},
        RESPONSES: {"input": "Hi"},
        "/v1/completions": {"prompt": "Hi"},
        "/v1/embeddings": {"input": "Hi"},
        "/v1/rerank": {"query": "Hi", "documents": ["a"]},
        "/v1/score": {"text_1": "Hi", "text_2": "a"},
    }
    fields: list[dict[str, Any]] = [
        {},
        {"user": "ann"},
        {"user": ""},
        {"safety_identifier": "bo"},
        {"user": "ann", "safety_identifier": "bo"},
        {"metadata": {"user_id": "cy"}},
    ]
    compared = 0
    for surface in inference_surfaces():
        for more in fields:
            body = {"model": MODEL, **texts[surface.route], **more}
            try:
                request = surface.parse(json.dumps(body).encode())
            except TollhouseError:
                continue  # a field that the surface does not have
            if request.extra_fields:
                continue  # one that it passes on, unread, where the operator lists it
            read = dict.fromkeys((request.end_user, request.safety_identifier))
            names = tuple(name for name in read if name)
            assert end_users_of(surface.route, body) == names, (surface, more)
            compared += 1
    assert compared >= 20


def test_erasures_of_a_tenant_beyond_its_queue_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go, begun = threading.Event(), threading.Semaphore(0)

    def _erase(*_given: object) -> dict[str, int]:
        begun.release()
        assert go.wait(MINUTE_S)
        return {"responses": 1}

    monkeypatch.setattr("gateway.admin.billing.routes.erase_everywhere", _erase)
    with running_deployment(tmp_path) as deployment, ThreadPoolExecutor(MOST_ERASURES + 1) as pool:

        def _post(_: int) -> httpx.Response:
            url, body = f"{deployment.url}/admin/v1/erasures", {"end_user": "ann"}
            answer = httpx.post(url, json=body, headers=deployment.headers, timeout=MINUTE_S)
            if answer.status_code != 200:
                go.set()
            return answer

        answers = list(pool.map(_post, range(MOST_ERASURES + 1)))
        assert begun.acquire(timeout=MINUTE_S)
    statuses = sorted(each.status_code for each in answers)
    assert statuses == [200] * MOST_ERASURES + [429]
    [refused] = [each for each in answers if each.status_code == 429]
    assert refused.json()["error"]["code"] == "too_many_erasures"
    assert int(refused.headers["retry-after"]) >= 1
