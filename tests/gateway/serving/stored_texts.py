"""An end user who sends a text through every surface, and a search for it in tables and files."""

import json
import time
import uuid
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import LargeBinary, select

from core.errors import NotFound
from core.sealing import Sealer
from core.tenants.models import Tenant
from migrations.tables import metadata
from tests.gateway.deployment import MODEL, Deployment

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


def in_tables(deployment: Deployment, words: str) -> list[str]:
    """`table.column` of each value in which the words are, encrypted ones opened."""
    found = []
    sealer = Sealer(deployment.services.operator_token)
    with deployment.services.database.read() as session:
        tenants = session.scalars(select(Tenant.id)).all()
        for table in metadata.sorted_tables:
            for row in session.execute(select(table)).mappings():
                for column in table.columns:
                    value = row[column.name]
                    if isinstance(column.type, LargeBinary) and column.name == "sealed":
                        value = opened(sealer, tenants, dict(row))
                    shown = value if isinstance(value, bytes) else str(value).encode()
                    if words.encode() in shown:
                        found.append(f"{table.name}.{column.name}")
    return found


def opened(sealer: Sealer, tenants: Sequence[str], row: dict[str, Any]) -> bytes:
    """Tried under every name that a row's text can have, with the key of each tenant."""
    if "response_id" in row:
        name = f"{row['response_id']}/{row['first']}"
    else:
        name = row["id"] if "id" in row else f"{row['conversation_id']}/{row['item_id']}"
    for tenant_id in tenants:
        try:
            found = sealer.open(tenant_id, name, row["sealed"])
        except NotFound:
            continue
        return zlib.decompress(found) if "response_id" in row else found
    pytest.fail(f"{name} cannot be opened, so nobody knows what is in it")


def in_files(folder: Path, words: str) -> list[str]:
    files = [each for each in folder.rglob("*") if each.is_file()]
    return [str(each.relative_to(folder)) for each in files if words.encode() in each.read_bytes()]
