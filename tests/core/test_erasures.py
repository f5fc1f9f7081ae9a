"""The erasure of an end user's stored texts, on both databases: theirs go and no other's, whatever wrote
the rows, and what nobody can read is counted."""

import json
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import func, select, update

from core import idempotency, storage
from core.batches import files, jobs
from core.batches.models import Batch, BatchLine, StoredFile
from core.clock import FakeClock
from core.database import Database
from core.erasures import erase_end_user
from core.idempotency import StoredResponse, StoredResponseRow
from core.responses import completions, records
from core.responses.conversations import Conversations
from core.responses.end_users import key_of, keys_of
from core.responses.models import (
    CompletionRecord,
    ConversationItemRecord,
    ConversationRecord,
    ResponseItemRecord,
    ResponseRecord,
)
from core.responses.records import Exchanged
from core.sealing import Sealer
from core.tenants.key_scopes import KeyScopes
from core.tenants.keys import Principal
from core.tenants.models import AuditEntry
from core.tenants.plans import Plan
from core.tenants.scope import scope_of_key, scope_of_operator

ANN, BO = "ann@example.com", "bo"
CHAT = "/v1/chat/completions"
TOKEN = Sealer("a token of the operator")
SAID = {"type": "message", "role": "user", "content": "xylophone"}


class Store:
    def __init__(self, database: Database, tenant_id: str = "acme") -> None:
        self.database = database
        self.clock = FakeClock()
        self.caller = Principal(
            scope=scope_of_key(tenant_id, "proj", "key", "owner"),
            tenant_name=tenant_id,
            key_id="key",
            project_id="proj",
            role="owner",
            scopes=KeyScopes(),
            allowed_ips=(),
            expires_at=None,
            plan=Plan("free", (), 1, 1),
            currency="USD",
            settings={},
        )

    def response(
        self,
        name: str,
        user: str | None,
        previous: str | None = None,
        *,
        safety_identifier: str | None = None,
    ) -> None:
        response = {"id": name, "output": [], "previous_response_id": previous, "user": user}
        response["safety_identifier"] = safety_identifier
        given = Exchanged(response | {"status": "completed"}, [SAID | {"id": f"msg_{name}"}])
        with self.database.transaction() as session:
            records.save(session, TOKEN, self.caller, given, self.clock.now())

    def completion(
        self, name: str, user: str | None, *, safety_identifier: str | None = None
    ) -> None:
        completion = {"id": name, "model": "m", "input_user": user}
        content = {"completion": completion, "messages": [SAID]}
        content["safety_identifier"] = safety_identifier
        with self.database.transaction() as session:
            completions.save(session, TOKEN, self.caller, content, self.clock.now())

    def conversation(self, *users: str | tuple[str, ...] | None) -> str:
        with self.database.transaction() as session:
            scope, now = self.caller.scope, self.clock.now()
            found = Conversations(session, TOKEN, scope, now)
            row = found.create(self.caller, {"a": "b"})
            for user in users:
                named = user if isinstance(user, tuple) else (user,) if user else ()
                found.add(row.id, [SAID], named)
            return row.id

    def answer(self, key: str, *users: str | None) -> None:
        tenant_id = self.caller.tenant_id
        with self.database.transaction() as session:
            name, _ = idempotency.claim(
                session,
                tenant_id=tenant_id,
                project_id="proj",
                key=key,
                route=CHAT,
                body=b"{}",
                now=self.clock.now(),
                longest=timedelta(seconds=60),
            )
            stored = StoredResponse(200, [], b"xylophone")
            named = tuple(user for user in users if user)
            idempotency.store_response(session, name, stored, keys_of(TOKEN, tenant_id, named))

    def erase(self, user: str, sealer: Sealer = TOKEN) -> dict[str, int]:
        scope = scope_of_operator(self.caller.tenant_id)
        erased = erase_end_user(self.database, scope, self.clock, sealer, user)
        return {kind: count for kind, count in erased.items() if count}

    def left(self, table: Any) -> int:
        with self.database.read() as session:
            return session.scalar(select(func.count()).select_from(table)) or 0

    def ids(self, table: Any) -> set[str]:
        with self.database.read() as session:
            return set(session.scalars(select(table.id)))


def test_theirs_go_and_no_other_does(database: Database) -> None:
    acme, other = Store(database), Store(database, "other")
    for number, user in enumerate((ANN, ANN, BO, None)):
        acme.response(f"r{number}", user, previous=f"r{number - 1}" if number else None)
        acme.completion(f"c{number}", user)
        acme.answer(f"k{number}", user)
    other.response("r9", ANN)
    other.completion("c9", ANN)
    other.answer("k9", ANN)
    alone, shared = acme.conversation(None, ANN), acme.conversation(ANN, BO, ANN)
    unnamed = acme.conversation(None)
    assert acme.erase(ANN) == {
        "responses": 2,
        "completions": 2,
        "conversations": 1,
        "conversation_items": 2,
        "idempotent_answers": 2,
    }
    assert acme.ids(ResponseRecord) == {"r2", "r3", "r9"}
    assert acme.left(ResponseItemRecord) == 3
    assert acme.ids(CompletionRecord) == {"c2", "c3", "c9"}
    assert acme.ids(ConversationRecord) == {shared, unnamed} and alone != shared
    assert acme.left(ConversationItemRecord) == 2 and acme.left(StoredResponseRow) == 3
    assert acme.erase(ANN) == {}
    with database.read() as session:
        used = storage.used(session, "acme")["conversations"]
        size = func.sum(func.length(ConversationRecord.sealed))
        items = func.sum(func.length(ConversationItemRecord.sealed))
        assert used == (session.scalar(select(size)) or 0) + (session.scalar(select(items)) or 0)
        logged = session.scalars(
            select(AuditEntry).where(AuditEntry.action == "end_user.erase_texts")
        ).all()
    assert logged[0].after is not None and logged[0].after["responses"] == 2
    assert ANN not in str(logged[0].after)


def test_a_request_with_two_names_is_found_by_either(database: Database) -> None:
    """As `user` and as `safety_identifier`, which may differ."""
    for first, second, erased in ((BO, ANN, ANN), (ANN, BO, ANN), (ANN, ANN, ANN)):
        store = Store(database)
        store.response("r", first, safety_identifier=second)
        store.completion("c", first, safety_identifier=second)
        store.answer("k", first, second)
        store.conversation((first, second))
        shared = store.conversation(BO, (first, second))
        body = {"user": first, "safety_identifier": second}
        line = {"custom_id": "1", "url": CHAT, "body": body}
        with database.transaction() as session:
            files.store(
                session,
                store.clock,
                tenant_id="acme",
                project_id="proj",
                key_id="key",
                filename="a.jsonl",
                purpose="batch",
                content=[json.dumps(line).encode()],
            )
        assert store.erase("somebody") == {}
        assert store.erase(erased) == {
            "responses": 1,
            "completions": 1,
            "conversations": 1,
            "conversation_items": 1,
            "idempotent_answers": 1,
            "file_lines": 1,
        }
        assert store.ids(ConversationRecord) == {shared}
        assert store.erase(BO) == {"conversations": 1}


def test_no_name_is_stored_in_plain(database: Database) -> None:
    acme, other = key_of(TOKEN, "acme", ANN), key_of(TOKEN, "other", ANN)
    assert len(acme) == len(other) == 64 and acme[:8] != other[:8] and acme[8:] != other[8:]
    assert key_of(TOKEN, "acme", None) == key_of(TOKEN, "acme", "") == ""
    store = Store(database)
    store.response("r", ANN)
    with database.read() as session:
        row = session.scalars(select(ResponseRecord)).one()
    assert row.end_user_key == acme


def test_rows_of_before_keys_were_written_are_opened(database: Database) -> None:
    store = Store(database)
    for number, user in enumerate((ANN, BO, None)):
        store.response(f"r{number}", user)
        store.completion(f"c{number}", user)
    old = store.conversation(BO)
    mixed = store.conversation(BO, ANN)
    with database.transaction() as session:
        for table in (ResponseRecord, CompletionRecord):
            session.execute(update(table).values(end_user_key=None))
        bo = key_of(TOKEN, "acme", BO)
        item = ConversationItemRecord
        session.execute(update(item).where(item.end_user_key == bo).values(end_user_key=None))
    assert store.erase(ANN) == {"responses": 1, "completions": 1, "conversation_items": 1}
    assert store.ids(ConversationRecord) == {old, mixed}, "of an unknown turn nobody is sure"
    assert store.erase(BO, Sealer("another token")) == {"unreadable": 4}
    assert store.erase(BO) == {"responses": 1, "completions": 1}


def test_another_operator_token_finds_no_row_and_says_so(database: Database) -> None:
    """The texts are unreadable with it, too; restored, it finds them."""
    store = Store(database)
    store.response("r", ANN)
    store.completion("c", ANN)
    store.completion("of nobody", None)
    store.conversation(ANN)
    store.answer("k", ANN)
    store.answer("of nobody", None)
    after = Sealer("the token after a rotation")
    assert store.erase(ANN, after) == {"idempotent_answers": 1, "unreadable": 3}
    assert store.left(StoredResponseRow) == 1, "answers are not encrypted, so theirs go"
    assert store.erase(ANN) == {"responses": 1, "completions": 1, "conversations": 1}


@pytest.mark.parametrize("route", [CHAT, "/v1/messages"])
def test_lines_of_batches_go_from_files_and_running_ones_fail(
    database: Database, route: str
) -> None:
    store = Store(database)

    def _body(user: str) -> bytes:
        named = {"metadata": {"user_id": user}} if route == "/v1/messages" else {"user": user}
        return _json(named)

    def _file(purpose: str, *lines: bytes) -> str:
        with database.transaction() as session:
            return files.store(
                session,
                store.clock,
                tenant_id="acme",
                project_id="proj",
                key_id="key",
                filename="a.jsonl",
                purpose=purpose,
                content=lines,
            ).id

    mark = b"\xef\xbb\xbf"
    requests = [
        b'{"custom_id": "%d", "url": "%s", "body": %s}\n' % (number, route.encode(), _body(user))
        for number, user in enumerate((ANN, BO, ANN))
    ]
    results = [b'{"custom_id": "%d", "response": {}}\n' % number for number in range(3)]
    given = _file("batch", mark + requests[0], *requests[1:], b"no json\n")
    output, kept = _file("batch_output", *results), _file("batch_output", *results)
    with database.transaction() as session:
        batch = jobs.create(
            session,
            store.caller.scope,
            store.clock,
            project_id="proj",
            endpoint=route,
            input_file_id=given,
            labels={},
        )
        lines = ((str(n), _body(user).decode()) for n, user in enumerate((ANN, BO, ANN)))
        jobs.start(session, batch, lines, "m", store.clock.now())
        jobs.record_results(session, batch, [jobs.LineResult(2, True, "xylophone", 1, 0, 1)])
        batch.output_file_id = output
    assert store.erase(ANN) == {"batch_lines": 2, "file_lines": 4}
    assert store.erase(ANN) == {}
    with database.read() as session:
        row = session.scalars(select(Batch)).one()
        assert (row.total, row.completed, row.failed) == (3, 0, 2)
        waiting = session.scalars(select(BatchLine).where(BatchLine.state == jobs.WAITING)).all()
        gone = session.scalars(select(BatchLine).where(BatchLine.state == jobs.FAILED)).all()
        assert [each.number for each in waiting] == [1]
        assert all("end_user_erased" in str(each.result) and each.body == "{}" for each in gone)
        content = {
            file.id: b"".join(files.content(session, file))
            for file in session.scalars(select(StoredFile))
        }
        sizes = {file.id: file.bytes for file in session.scalars(select(StoredFile))}
    assert content == {
        given: requests[1] + b"no json\n",
        output: results[1],
        kept: b"".join(results),
    }
    assert sizes == {name: len(each) for name, each in content.items()}


def _json(body: dict[str, Any]) -> bytes:
    return json.dumps({"model": "m", **body}).encode()
