"""All that is stored of a tenant leaves in one archive, and an erasure leaves nothing of it but the
books; what was erased comes back with no backup."""

import io
import json
import sqlite3
import threading
import time
import uuid
import zipfile
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import delete, select, update
from sqlalchemy.exc import DBAPIError

from billing.adjustments.organisation_links import LinkDraft, set_parent
from billing.audit import reconcile
from billing.invoicing import invoice_run
from billing.invoicing.tables import Invoice
from billing.notices import webhooks
from billing.usage import label_rollups, origin_rollups, service_rollups
from billing.usage.batch_claims import claim_batches
from billing.usage.tables import (
    DailyEndUserUsage,
    HourlyLabelUsage,
    LabelSet,
    ParkedEvent,
    UsageBatch,
    UsageEventRow,
)
from core.clock import FakeClock, SystemClock
from core.database import Database
from core.errors import Conflict
from core.settings import Settings
from core.tenants import keys, organisations
from core.tenants.models import AuditEntry, Tenant
from core.tenants.scope import scope_of_operator
from gateway.admin.stored_data.journal import FOLDER
from gateway.admin.stored_data.stored_data import StoredData
from gateway.admin.stored_data.tables import FATES, SECRET, Deleted, Emptied, Kept, Operators
from gateway.cli.doctor.check import Health
from gateway.cli.doctor.storage import erasures
from gateway.cli.main import main
from gateway.metering.spool_watch import wait_until_shipped
from migrations.tables import metadata
from tests.billing.conftest import deployment_of
from tests.gateway.deployment import MODEL, Deployment, running_deployment
from tests.gateway.serving.stored_texts import (
    CHAT,
    WRITTEN,
    Person,
    in_files,
    in_tables,
    send_everything,
)

TOKEN = "an operator's token of a test"
SETTINGS = {"admin_token": TOKEN}


def operator(deployment: Deployment, path: str, body: Any) -> httpx.Response:
    headers = {"authorization": f"Bearer {TOKEN}"}
    return httpx.post(f"{deployment.url}{path}", json=body, headers=headers, timeout=60)


def tenant_of(deployment: Deployment, name: str, word: str) -> Deployment:
    """A tenant with a key, whose every name and text has the word."""
    made = operator(
        deployment,
        "/admin/v1/tenants",
        {
            "name": name,
            "display_name": f"Firm {word}",
            "project": f"p-{word}",
            "owner": {"email": f"{word}@example.com", "name": word},
        },
    )
    assert made.status_code == 201, made.text
    shown = made.json()
    tenant_id, project = shown["id"], shown["project_id"]
    with deployment.services.database.transaction() as session:
        scope, clock = scope_of_operator(tenant_id), SystemClock()
        organisations.set_label_keys(session, scope, clock, project, [word])
        key = keys.issue(session, scope, clock, project_id=project, name=word, role="owner")
        secret = key.secret
    return replace(deployment, key=secret, tenant_id=tenant_id)


def fill(own: Deployment, word: str) -> None:
    """What an owner can store beside requests."""

    def _send(method: str, path: str, body: Any, **more: str) -> None:
        url, headers = f"{own.url}{path}", own.headers | more
        answer = httpx.request(method, url, json=body, headers=headers, timeout=60)
        assert answer.is_success, (path, answer.text)

    said = [{"role": "user", "content": word}]
    chat = {"model": MODEL, "messages": said, "max_tokens": 2}
    ids = {"x-request-id": word, "x-client-request-id": word}
    _send("POST", CHAT, chat, **ids, **{"x-tollhouse-labels": f"{word}={word}"})
    mail = f"b-{word}@example.com"
    _send("POST", "/admin/v1/prompts", {"name": word, "messages": said})
    _send("POST", "/admin/v1/members", {"email": mail, "role": "viewer"})
    _send("POST", "/admin/v1/budgets", {"name": word, "cap": "5"})
    _send("PUT", "/admin/v1/policies?level=tenant", {"input": {"deny": [word]}})
    with own.services.database.transaction() as session:
        scope = scope_of_operator(own.tenant_id)
        webhooks.add(session, scope, SystemClock(), f"https://{word}.example.com/in")


def test_every_table_has_a_fate() -> None:
    assert set(FATES) == set(metadata.tables)
    for name, fate in FATES.items():
        table = metadata.tables[name]
        if isinstance(fate, Operators):
            continue
        through = fate.through if isinstance(fate, Kept | Deleted) else {}
        assert "tenant_id" in table.c or name == "tenants" or through, name
        for column, parent in through.items():
            assert column in table.c and "id" in metadata.tables[parent].c, (name, column)
        if isinstance(fate, Emptied):
            assert set(fate.columns) <= set(table.c.keys()), name
        if isinstance(fate, Kept | Emptied):
            assert fate.why


def test_nothing_of_an_erased_tenant_is_left_but_the_books(tmp_path: Path) -> None:
    word = f"w{uuid.uuid4().hex[:12]}"
    with running_deployment(tmp_path, settings=SETTINGS) as deployment:
        own = tenant_of(deployment, f"firm-{word}", word)
        person, other = Person(own), Person(deployment)
        person.text = f"{person.text} {word}"
        send_everything(person)
        send_everything(other)
        fill(own, word)
        wait_until_shipped(deployment.services.settings)
        before = in_tables(deployment, other.text)
        labelled = {"projects.label_keys", "usage_events.labels", "label_sets.labels"}
        assert set(in_tables(own, word)) > WRITTEN | labelled, "the search finds what is there"

        answer = httpx.post(f"{own.url}/admin/v1/tenant/export", headers=own.headers, timeout=60)
        assert answer.headers["content-type"] == "application/zip", answer.text
        _check_archive(answer.content, word, person, other)

        path = f"/admin/v1/tenants/{own.tenant_id}/erase"
        body = {"confirm": f"firm-{word}"}
        refused = operator(deployment, path, body)
        assert refused.status_code == 409 and "--status closed" in refused.text
        _close(deployment, own)
        wrong = operator(deployment, path, {"confirm": "demo"})
        assert wrong.status_code == 400 and f"firm-{word}" in wrong.text
        done = operator(deployment, path, body)
        assert done.status_code == 200, done.text

        assert in_tables(own, person.text) == in_tables(own, person.name) == []
        books = in_tables(own, word)
        assert books == ["billing_accounts.legal_name"], "to whom invoices are, which the law keeps"
        assert sorted(in_tables(deployment, other.text)) == sorted(before)
        assert other.ask("POST", CHAT, other.chat())
        _wait_until_unknown(own)
        erased, kept = done.json()["erased"], done.json()["kept"]
        assert erased["stored_responses"] and erased["file_chunks"] and erased["usage_events"]
        assert set(kept) == {n for n, f in FATES.items() if isinstance(f, Kept | Emptied)}
        with deployment.services.database.read() as session:
            row = session.get_one(Tenant, own.tenant_id)
            assert row.name.startswith("erased-") and row.settings == {}
            logged = session.scalars(
                select(AuditEntry.action).where(AuditEntry.tenant_id == own.tenant_id)
            ).all()
        assert "tenant.erase" in logged and "member.add" in logged
        assert operator(deployment, path, {"confirm": row.name}).status_code == 200, "again"
    assert in_files(tmp_path, person.text) == in_files(tmp_path, person.name) == []
    assert in_files(tmp_path, word) == ["tollhouse.db"]


def _close(deployment: Deployment, own: Deployment) -> None:
    with deployment.services.database.transaction() as session:
        session.get_one(Tenant, own.tenant_id).status = "closed"


def _wait_until_unknown(own: Deployment) -> None:
    """A gateway may know a key until its next look at what was revoked."""
    for _ in range(100):
        if httpx.get(f"{own.url}/v1/models", headers=own.headers).status_code == 401:
            return
        time.sleep(0.1)
    raise AssertionError("the key of an erased tenant still works")


def _check_archive(content: bytes, word: str, person: Person, other: Person) -> None:
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        assert archive.testzip() is None
        texts = {name: archive.read(name) for name in archive.namelist()}
    with_word = {name for name, text in texts.items() if person.text.encode() in text}
    expected = {
        f"tables/{name.partition('.')[0]}.jsonl" for name in WRITTEN if "file_chunks" not in name
    }
    assert expected <= with_word, expected - with_word
    assert any(name.startswith("files/") for name in with_word)
    named = ("members", "api_keys", "budgets", "webhook_endpoints", "usage_events", "tenants")
    for name in (*named, "label_sets", "projects"):
        assert word.encode() in texts[f"tables/{name}.jsonl"], name
    assert not any(
        other.text.encode() in text or other.name.encode() in text for text in texts.values()
    )
    for name, text in texts.items():
        if name.startswith("tables/"):
            rows = [json.loads(line) for line in text.splitlines()]
            assert not any(SECRET & row.keys() for row in rows), name


def test_what_was_erased_does_not_come_back_with_a_backup(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An end user of one tenant, and another tenant whole, are erased after the backup was taken."""
    word = f"w{uuid.uuid4().hex[:12]}"
    data = tmp_path / "data"
    backup, live = tmp_path / "backup.db", data / "tollhouse.db"
    with running_deployment(data, settings=SETTINGS) as deployment:
        own = tenant_of(deployment, f"firm-{word}", word)
        person, erin, bob = Person(own), Person(deployment), Person(deployment)
        for each in (person, erin, bob):
            send_everything(each)
        fill(own, word)
        wait_until_shipped(deployment.services.settings)
        with closing(sqlite3.connect(live)) as source, closing(sqlite3.connect(backup)) as target:
            source.backup(target)
        erin.ask("POST", "/admin/v1/erasures", {"end_user": erin.name})
        _close(deployment, own)
        path = f"/admin/v1/tenants/firm-{word}/erase"
        assert operator(deployment, path, {"confirm": f"firm-{word}"}).status_code == 200
        kept = in_tables(deployment, bob.text)
    for suffix in ("-wal", "-shm"):
        live.with_name(live.name + suffix).unlink(missing_ok=True)
    backup.replace(live)

    monkeypatch.setenv("TOLLHOUSE_DATA_DIR", str(data))
    monkeypatch.setenv("TOLLHOUSE_ADMIN_TOKEN", TOKEN)
    names = (person.text, person.name, erin.name, erin.text)
    assert all(in_files(data, each) for each in names), "the backup has them"
    clock: Any = None
    found = erasures(Settings(), clock)
    assert found.health is Health.BAD and "tollhouse recover" in found.next_step, found
    capsys.readouterr()
    assert main(["recover", "--dry-run", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["erased"]) == 2
    assert main(["recover", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["erased"]) == 2
    assert erasures(Settings(), clock).health is Health.GOOD
    assert main(["recover", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["erased"] == []
    with running_deployment(data, settings=SETTINGS) as again:
        assert [in_tables(again, each) for each in names] == [[]] * len(names)
        assert sorted(in_tables(again, bob.text)) == sorted(kept)
    for each in names:
        assert in_files(data, each) == [], each


def test_an_erasure_under_another_token_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with running_deployment(tmp_path, settings=SETTINGS) as deployment:
        Person(deployment).ask("POST", "/admin/v1/erasures", {"end_user": "ann"})
        with deployment.services.database.transaction() as session:
            session.connection().exec_driver_sql("drop trigger append_only_audit_log_delete")
            session.connection().exec_driver_sql("delete from audit_log")
    (entry,) = (tmp_path / "restore" / FOLDER).iterdir()
    assert b"ann" not in entry.read_bytes()
    monkeypatch.setenv("TOLLHOUSE_DATA_DIR", str(tmp_path))
    monkeypatch.setenv("TOLLHOUSE_ADMIN_TOKEN", "another token of the operator")
    clock: Any = None
    found = erasures(Settings(), clock)
    assert found.health is Health.BAD and "TOLLHOUSE_ADMIN_TOKEN" in found.next_step
    assert main(["recover", "--json"]) == 1
    assert "TOLLHOUSE_ADMIN_TOKEN" in capsys.readouterr().out


def test_both_databases_empty_the_books_of_names_and_refuse_changes_again(
    database: Database, tmp_path: Path
) -> None:
    made = deployment_of(database, FakeClock())
    made.record(
        made.event(end_user="ann", client_request_id="hers", labels="team=ann"),
        made.event(end_user="bo"),
    )
    made.clock.advance(days=40)
    invoice_run.run(database, made.clock)
    service_rollups.sum_all(database, made.clock)
    scope = scope_of_operator("acme")
    with database.transaction() as session:
        name = organisations.get_tenant(session, scope).name
        organisations.change_tenant(session, scope, made.clock, status="closed")
        sums = reconcile.audit(session).as_json()
        for table in (LabelSet, HourlyLabelUsage):
            assert session.scalars(select(table.labels)).all() == ["team=ann"]
    data = StoredData.of(database, Settings(data_dir=tmp_path), made.clock, TOKEN)
    erased = data.erase_tenant(scope, name)
    assert erased["usage_events"] == 2 and erased["audit_log"], erased
    with database.transaction() as session:
        rows = session.execute(
            select(UsageEventRow.end_user, UsageEventRow.client_request_id, UsageEventRow.labels)
        ).all()
        assert rows == [(None, None, None)] * 2
        for table in (LabelSet, HourlyLabelUsage):
            assert session.scalars(select(table.labels)).all() == []
        assert session.scalars(select(DailyEndUserUsage.end_user)).all() == [""]
        assert reconcile.audit(session).as_json() == sums, "no sum changes"
        assert session.scalars(select(Invoice)).all()
    with database.read() as session:
        assert data.journal.pending(session) == ([], [])
    for table in (AuditEntry, UsageEventRow):
        with pytest.raises(DBAPIError, match="append-only"), database.transaction() as session:
            session.execute(update(table).values(tenant_id="other"))


def test_what_is_summed_during_an_erasure_brings_no_name_back(
    database: Database, tmp_path: Path
) -> None:
    made = deployment_of(database, FakeClock())
    made.record(made.event(end_user="ann", labels="team=ann"))
    made.rate()
    scope = scope_of_operator("acme")
    with database.transaction() as session:
        organisations.change_tenant(session, scope, made.clock, status="closed")
    data = StoredData.of(database, Settings(data_dir=tmp_path), made.clock, TOKEN)
    erasing = threading.Thread(target=data.erase_tenant, args=(scope, "acme"))
    with database.transaction() as session:
        taken = claim_batches(session, UsageBatch.summed_at.is_(None), most_events=10)
        assert taken
        for rollups in (origin_rollups, label_rollups):
            rollups.add(session, UsageEventRow.batch_id.in_(taken), origin_rollups.SUMS)
        session.flush()
        erasing.start()
        erasing.join(1)
        assert erasing.is_alive(), "it waits"
    erasing.join(30)
    with database.read() as session:
        assert session.scalars(select(DailyEndUserUsage.end_user)).all() == [""]
        assert session.scalars(select(HourlyLabelUsage.labels)).all() == []


def test_a_tenant_with_parked_usage_or_children_is_not_erased(
    database: Database, tmp_path: Path
) -> None:
    made = deployment_of(database, FakeClock())
    made.record(made.event(price_version="gone"))
    scope = scope_of_operator("acme")
    with database.transaction() as session:
        organisations.change_tenant(session, scope, made.clock, status="closed")
    data = StoredData.of(database, Settings(data_dir=tmp_path), made.clock, TOKEN)
    with pytest.raises(Conflict, match="parked"):
        data.erase_tenant(scope, "acme")
    with database.transaction() as session:
        session.execute(delete(ParkedEvent))
    made.tenant("child")
    with database.transaction() as session:
        set_parent(session, made.clock, LinkDraft("child", "acme", "self", "0", "operator"))
    with pytest.raises(Conflict, match="parent of 1"):
        data.erase_tenant(scope, "acme")
    assert not (tmp_path / "restore" / FOLDER).exists(), "nothing is noted"
