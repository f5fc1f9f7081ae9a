"""`tollhouse tenant|member|key|limit` in this process, on a database of the test's own."""

import io
import json
from typing import Any

import pytest

from billing.accounts.tables import BillingAccount
from core.clock import SystemClock
from core.database import Database
from core.tenants import keys
from gateway.cli.main import main


@pytest.fixture
def run(
    sqlite_database: Database, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Any:
    monkeypatch.setenv("TOLLHOUSE_DATABASE_URL", sqlite_database.url)

    def _run(*words: str, status: int = 0) -> Any:
        assert main([*words, "--json"]) == status
        shown = capsys.readouterr()
        return json.loads(shown.out) if status == 0 else shown.err

    return _run


def test_from_a_new_tenant_to_a_working_key(run: Any, sqlite_database: Database) -> None:
    made = run("tenant", "new", "acme", "--plan", "premium")
    assert made["plan"] == "premium" and made["project_id"].startswith("proj_")
    issued = run("key", "new", "--tenant", "acme", "--role", "admin", "--route", "/v1/*")
    with sqlite_database.read() as session:
        found = keys.find(session, issued["secret"], SystemClock().now())
    assert (found.tenant_id, found.role) == (made["id"], "admin")
    assert found.scopes.routes == frozenset({"/v1/*"})
    fresh = run("key", "rotate", issued["id"], "--tenant", "acme", "--overlap-hours", "1")
    assert fresh["secret"] != issued["secret"]
    assert run("key", "revoke", fresh["id"], "--tenant", "acme")["revoked_at"]
    listed = run("key", "list", "--tenant", "acme")
    assert {each["id"] for each in listed} == {issued["id"], fresh["id"]}
    assert issued["secret"] not in str(listed)


def test_members_and_their_passwords_come_by_stdin(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run("tenant", "new", "acme")
    monkeypatch.setattr("sys.stdin", io.StringIO("a long enough password\n"))
    words = ("member", "add", "ann@acme.example", "--tenant", "acme", "--role", "owner")
    made = run(*words, "--password-file", "-")
    assert made["password"] is True
    run("member", "add", "bob@acme.example", "--tenant", "acme")
    changed = run("member", "set", "bob@acme.example", "--tenant", "acme", "--role", "finance")
    assert changed["role"] == "finance"
    assert "last owner" in run(
        "member", "set", "ann@acme.example", "--tenant", "acme", "--disable", status=2
    )


def test_limits_are_set_beside_the_plan(run: Any) -> None:
    run("tenant", "new", "acme", "--plan", "free")
    where = ("--tenant", "acme", "--unit", "requests", "--per", "minute")
    run("limit", "set", "7", *where)
    own = [each for each in run("limit", "list", "--tenant", "acme") if each["own"]]
    assert [(each["unit"], each["limit"]) for each in own] == [("requests", 7)]
    run("limit", "remove", *where)
    assert not [each for each in run("limit", "list", "--tenant", "acme") if each["own"]]


def test_what_is_not_there_is_named(run: Any) -> None:
    assert "No tenant nobody" in run("key", "list", "--tenant", "nobody", status=2)
    run("tenant", "new", "acme")
    wrong = run("key", "new", "--tenant", "acme", "--project", "other", status=2)
    assert "no project 'other'" in wrong and "project-add" in wrong


def test_one_command_onboards_a_customer(
    run: Any, sqlite_database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("a long enough password\n"))
    words = ("tenant", "new", "hooli", "--currency", "EUR", "--timezone", "Europe/Berlin")
    tax = (
        "--legal-name",
        "Hooli SE",
        "--tax-region",
        "de",
        "--tax-id",
        "136 695 976",
        "--project",
        "live",
    )
    owner = ("--owner", "gavin@hooli.example", "--owner-password-file", "-", "--key", "first")
    made = run(*words, *tax, *owner)
    with sqlite_database.read() as session:
        found = keys.find(session, made["key"]["secret"], SystemClock().now())
        account = session.get_one(BillingAccount, made["id"])
    assert (found.project_id, found.currency) == (made["project_id"], "EUR")
    assert (account.currency, account.timezone) == ("EUR", "Europe/Berlin")
    assert (account.legal_name, account.tax_id) == ("Hooli SE", "DE136695976")
    assert made["owner"]["password"] is True and "EUR" in made["remarks"][0]
    assert "time zone" in run("tenant", "new", "late", "--timezone", "Mars/Base", status=2)


def test_a_key_is_revoked_and_rotated_by_its_id_alone(run: Any) -> None:
    run("tenant", "new", "acme")
    issued = run("key", "new", "--tenant", "acme")
    fresh = run("key", "rotate", issued["id"])
    assert run("key", "revoke", fresh["id"])["revoked_at"]
    assert "There is no key 'key_none'" in run("key", "revoke", "key_none", status=2)
    run("tenant", "new", "rival")
    assert "key" in run("key", "revoke", issued["id"], "--tenant", "rival", status=2)
