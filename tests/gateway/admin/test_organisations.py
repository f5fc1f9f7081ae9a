"""Organisations above organisations by API, command and page: who sees whose usage, and who may not."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import httpx
import pytest

from billing.pricing.prices import ensure_default_prices
from billing.rating.rating_worker import rate_all
from billing.usage.usage import record
from core.tenants.models import AuditEntry
from core.tenants.organisations import create_tenant
from core.tenants.roles import MEMBER_ROLES
from gateway.cli.main import main
from tests.dashboards.usage_events import usage_event
from tests.gateway.admin.conftest import OPERATORS, Town

SEES_COSTS = ("owner", "admin", "finance")


@pytest.fixture(scope="module")
def family(town: Town) -> Iterator[Town]:
    """`acme` above `rival` and `sister`; 1,000,000 input tokens of each of the two cost 0.15."""
    services = town.services
    with services.database.transaction() as session:
        sister = create_tenant(session, services.clock, name="sister").id
        price = ensure_default_prices(session, services.clock, "tiny").id
    for child in ("rival", "sister"):
        body = {"parent": "acme", "pays": "parent", "markup_percent": "20"}
        linked = town.as_operator("PUT", f"/admin/v1/tenants/{child}/parent", json=body)
        assert linked.status_code == 200, linked.text
        assert linked.json()["markup_percent"] == "20"
    with services.database.transaction() as session:
        now = services.clock.now() - timedelta(seconds=1)
        for tenant in (town.rival.id, sister):
            event = usage_event(
                now, price, tenant_id=tenant, input_tokens=1_000_000, output_tokens=0
            )
            record(session, [event], services.clock)
    rate_all(services.database, services.clock)
    yield town


def seen(town: Town, token: str, **params: str) -> list[tuple[str, str, str]]:
    day = f"{town.services.clock.now() - timedelta(days=1):%Y-%m-%d}"
    answer = town.call(
        "GET", "/admin/v1/organisations/usage", token, params={"from": day, **params}
    )
    assert answer.status_code == 200, answer.text
    rows = answer.json()["data"]
    return [(row["tenant"], row["amount"]["amount"], row["with_markup"]["amount"]) for row in rows]


@contextmanager
def signed_in(town: Town, secret: str) -> Iterator[httpx.Client]:
    url = str(town.client.base_url).rstrip("/")
    headers = {"origin": url}
    with httpx.Client(base_url=url, follow_redirects=True, timeout=60, headers=headers) as client:
        assert client.post("/dashboard/sign-in", data={"secret": secret}).status_code == 200
        yield client


@pytest.mark.parametrize("role", SEES_COSTS)
def test_a_parent_sees_its_children_and_a_child_nobody_but_itself(family: Town, role: str) -> None:
    assert seen(family, family.acme.keys[role]) == [
        ("rival", "0.15", "0.18"),
        ("sister", "0.15", "0.18"),
    ]
    assert seen(family, family.rival.keys[role]) == [("rival", "0.15", "0.15")]
    by_model = seen(family, family.acme.keys[role], by_model="true")
    assert len(by_model) == 2


@pytest.mark.parametrize("role", [each for each in MEMBER_ROLES if each not in SEES_COSTS])
def test_who_sees_no_costs_sees_none_of_the_children(family: Town, role: str) -> None:
    answer = family.call("GET", "/admin/v1/organisations/usage", family.acme.keys[role])
    assert answer.status_code == 403


def test_no_key_reaches_another_organisation_by_its_name(family: Town) -> None:
    for name in ("acme", "sister"):
        answer = family.call(
            "GET",
            "/admin/v1/organisations/usage",
            family.rival.keys["owner"],
            params={"tenant": name},
        )
        assert answer.status_code == 404, answer.text
    text = family.call("GET", "/admin/v1/organisations/usage", family.rival.keys["owner"]).text
    assert "acme" not in text and "sister" not in text


def test_a_wrong_link_is_refused_with_its_reason(family: Town) -> None:
    path = "/admin/v1/tenants/acme/parent"
    circle = family.as_operator("PUT", path, json={"parent": "rival"})
    assert circle.status_code == 409 and "below itself" in circle.text
    for body in (
        {},
        {"parent": "rival", "pays": "nobody"},
        {"parent": "rival", "markup_percent": "1e9"},
        {"parent": "rival", "markup_percent": "NaN"},
    ):
        assert family.as_operator("PUT", path, json=body).status_code in (400, 422), body
    assert family.as_operator("PUT", path, json={"parent": "nobody"}).status_code == 404
    assert family.as_operator("DELETE", path).status_code == 404
    own = family.call("PUT", path, family.acme.keys["owner"], json={"parent": "rival"})
    assert own.status_code == 403
    wrong = family.as_operator(
        "GET",
        "/admin/v1/organisations/usage",
        params={"tenant": "acme", "from": "2026-02-01", "to": "2026-01-01"},
    )
    assert wrong.status_code == 400 and "Swap" in wrong.text


def test_the_page_its_file_and_the_command_agree(
    family: Town, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    day = f"{family.services.clock.now() - timedelta(days=1):%Y-%m-%d}"
    with signed_in(family, family.acme.keys["admin"]) as client:
        page = client.get(f"/dashboard/organisations?from={day}")
        file = client.get(f"/dashboard/organisations?from={day}&format=csv").text.splitlines()
    assert page.status_code == 200 and "Usage by organisation" in page.text
    assert file[0].startswith("Organisation,Below,Paid by,Requests")
    assert file[1].startswith("rival,acme,its parent,1,1000000,0,0,0.15")
    assert file[1].endswith(",20,0.03 USD,0.18 USD")
    monkeypatch.setenv("TOLLHOUSE_DATABASE_URL", family.services.database.url)
    monkeypatch.setenv("TOLLHOUSE_DATA_DIR", str(family.services.settings.data_dir))
    assert main(["tenant", "children", "--tenant", "acme", "--from", day, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["tenant"], row["with_markup"]["amount"]) for row in rows] == [
        ("rival", "0.18"),
        ("sister", "0.18"),
    ]
    assert main(["tenant", "children", "--tenant", "acme"]) == 0
    assert "rival" in capsys.readouterr().out


def test_links_change_by_command_and_page_and_are_recorded(
    family: Town, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOLLHOUSE_DATABASE_URL", family.services.database.url)
    words = ["tenant", "parent", "--tenant", "sister", "acme", "--pays", "self", "--markup", "7.25"]
    assert main([*words, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["parent"], shown["pays"], shown["markup_percent"]) == ("acme", "self", "7.25")
    assert main(["tenant", "parent", "--tenant", "acme", "sister"]) != 0
    assert main(["tenant", "parent-remove", "--tenant", "sister", "--json"]) == 0
    capsys.readouterr()
    with signed_in(family, OPERATORS) as client:
        with family.services.database.read() as session:
            sister = session.query(AuditEntry).filter_by(action="organisation.link").all()
        assert {row.target for row in sister} == {"acme"}
        path = f"/dashboard/operator/tenants/{family.rival.id}/billing"
        assert "mark-up 20 %" in client.get(path).text
        wrong = client.post(path, data={"act": "parent", "parent": "rival", "pays": "self"})
        assert wrong.status_code in (400, 409) and "below itself" in wrong.text
        data = {"act": "parent", "parent": "acme", "pays": "self", "markup_percent": "5"}
        changed = client.post(path, data=data)
        assert "mark-up 5 %" in changed.text, changed.text[-2000:]
        removed = client.post(path, data={"act": "no_parent"})
        assert "mark-up 5 %" not in removed.text and removed.status_code == 200
    listed = family.as_operator("GET", "/admin/v1/organisation-links").json()["data"]
    assert listed == []
