"""An organisation reports its own usage with its own key, and the operator from a file."""

import json
from datetime import UTC, datetime
from pathlib import Path

import httpx
import pytest
from sqlalchemy import select

from billing.usage.tables import UsageEventRow
from core.clock import SystemClock
from core.tenants import keys
from core.tenants.key_scopes import KeyScopes
from core.tenants.organisations import create_project
from core.tenants.roles import MEMBER_ROLES
from core.tenants.scope import scope_of_operator
from gateway.cli.main import main
from tests.gateway.admin.conftest import OPERATORS, Firm, Town

EVENT = {
    "specversion": "1.0",
    "type": "generation",
    "id": "1",
    "source": "scanner",
    "data": {"model": "pages", "requests": 7},
}
FORM = {"content-type": "application/cloudevents+json"}


@pytest.fixture(scope="module", autouse=True)
def priced(town: Town) -> None:
    price = {"model": "pages", "terms": {"request": "0.01"}}
    assert town.as_operator("POST", "/admin/v1/prices", json=price).status_code == 201


def send(town: Town, token: str, body: object) -> httpx.Response:
    headers = {**FORM, "authorization": f"Bearer {token}"}
    return town.client.post("/v1/events", content=json.dumps(body), headers=headers)


def restricted(town: Town, firm: Firm, *routes: str) -> keys.IssuedKey:
    with town.services.database.transaction() as session:
        return keys.issue(
            session,
            scope_of_operator(firm.id),
            SystemClock(),
            project_id=firm.project_id,
            name="reports",
            role="owner",
            scopes=KeyScopes(routes=frozenset(routes)),
        )


def stored(town: Town, event_id: str) -> UsageEventRow:
    with town.services.database.read() as session:
        rows = select(UsageEventRow).where(UsageEventRow.client_request_id == event_id)
        return session.scalars(rows).one()


def test_a_key_of_this_route_alone_reports_and_does_nothing_else(town: Town) -> None:
    key = restricted(town, town.acme, "/v1/events")
    assert send(town, key.secret, EVENT).json() == {"stored": 1, "duplicates": 0}
    batch = [EVENT, EVENT | {"id": "2", "subject": "acme"}]
    assert send(town, key.secret, batch).json() == {"stored": 1, "duplicates": 1}
    row = stored(town, "2")
    assert (row.tenant_id, row.key_id, row.quantity) == (town.acme.id, key.id, 7)
    assert town.call("GET", "/admin/v1/invoices", key.secret).status_code == 403
    other = restricted(town, town.acme, "/v1/chat/completions")
    assert send(town, other.secret, EVENT).status_code == 403


@pytest.mark.parametrize("role", MEMBER_ROLES)
def test_only_who_may_write_usage_reports(town: Town, role: str) -> None:
    found = send(town, town.rival.keys[role], EVENT | {"id": f"of {role}"})
    assert found.status_code == (200 if role == "owner" else 403), found.text


def test_nobody_reports_for_another_organisation(town: Town) -> None:
    for subject in (town.acme.id, town.acme.name):
        found = send(town, town.rival.keys["owner"], EVENT | {"id": "x", "subject": subject})
        assert found.status_code == 400
        assert found.json()["error"]["message"].startswith(
            f"Event 'x' of 'scanner' is refused: there is no tenant '{subject}'."
        )
    assert send(town, "sk-wrong", EVENT).status_code == 401


def test_a_key_of_a_project_reports_for_that_project(town: Town) -> None:
    scope = scope_of_operator(town.acme.id)
    with town.services.database.transaction() as session:
        create_project(session, scope, SystemClock(), name="second")
    granted = {"role": "developer", "obj": "usage", "act": "write"}
    assert town.as_operator("POST", "/admin/v1/roles", json=granted).status_code in (200, 201)
    own = town.acme.keys["developer"]
    assert send(town, own, EVENT | {"id": "own"}).json() == {"stored": 1, "duplicates": 0}
    assert stored(town, "own").project_id == town.acme.project_id
    foreign = EVENT | {"id": "p", "data": {"model": "pages", "project": "second", "requests": 1}}
    refused = send(town, own, foreign)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "data.project"
    whole = send(town, town.acme.keys["owner"], foreign)
    assert whole.json() == {"stored": 1, "duplicates": 0}


def test_a_wrong_event_is_refused_by_name(town: Town) -> None:
    owner = town.acme.keys["owner"]
    misspelt = send(town, owner, EVENT | {"id": "m", "data": {"model": "pgs", "requests": 1}})
    assert misspelt.status_code == 400
    assert "no price of 'pgs'" in misspelt.json()["error"]["message"]
    assert "The operator sets prices" in misspelt.json()["error"]["message"]
    changed = send(town, owner, EVENT | {"data": {"model": "pages", "requests": 8}})
    assert changed.status_code == 409 and changed.json()["error"]["code"] == "event_differs"
    many = send(town, owner, [EVENT] * 1001)
    assert many.status_code == 400


def test_the_operator_reports_from_a_file(
    town: Town, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOLLHOUSE_DATA_DIR", str(town.services.settings.data_dir))
    monkeypatch.setenv("TOLLHOUSE_ADMIN_TOKEN", OPERATORS)
    time = datetime.now(UTC).isoformat()
    events = [EVENT | {"id": f"f{n}", "subject": "acme", "time": time} for n in range(3)]

    def _report(text: str) -> tuple[int, str, str]:
        file = tmp_path / "events"
        file.write_text(text)
        code = main(["usage", "report", str(file), "--json"])
        return code, *capsys.readouterr()

    lines = "".join(json.dumps(each) + "\n" for each in events[:2])
    code, out, _ = _report(lines)
    assert code == 0 and json.loads(out) == {"stored": 2, "duplicates": 0}
    code, out, _ = _report(json.dumps(events))
    assert code == 0 and json.loads(out) == {"stored": 1, "duplicates": 2}
    for wrong, problem in (
        (lines + "nonsense", "Event 3 of the file is refused: it is not JSON"),
        (json.dumps(EVENT), "Event 1 of the file is refused: subject: Field required"),
        (json.dumps([*events, 5]), "Event 4 of the file is refused"),
    ):
        code, _, told = _report(wrong)
        assert code == 2 and problem in told
    assert main(["usage", "report", str(tmp_path / "absent")]) == 2
    assert "cannot be read" in capsys.readouterr().err
