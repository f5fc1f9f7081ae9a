"""A new customer from one form to a first answer; one-time secrets; refused forms keep what was typed."""

import re
from contextlib import closing

import httpx
from sqlalchemy import func, select

from core.tenants.models import ApiKey, Project, Tenant
from tests.dashboards.browser_client import browser
from tests.gateway.deployment import MODEL, Deployment

CUSTOMER = {
    "act": "create",
    "name": "globex",
    "display_name": "Globex",
    "plan": "premium",
    "currency": "USD",
    "timezone": "Europe/Berlin",
    "legal_name": "Globex GmbH",
    "tax_region": "",
    "owner": "hank@globex.example",
    "password": "a long enough password",
    "project": "production",
    "key": "first",
}


def key_in(page: str) -> str:
    found = re.search(r'id="once">(th_\w+)<', page)
    assert found is not None, page[:3000]
    return found[1]


def ask(deployment: Deployment, secret: str) -> httpx.Response:
    body = {"model": MODEL, "max_tokens": 2, "messages": [{"role": "user", "content": "hi"}]}
    headers = {"authorization": f"Bearer {secret}"}
    return httpx.post(f"{deployment.url}/v1/chat/completions", json=body, headers=headers)


def count(deployment: Deployment, table: type) -> int:
    with deployment.services.database.read() as session:
        return session.scalar(select(func.count()).select_from(table)) or 0


def test_one_form_makes_a_customer_whose_first_key_answers(
    deployment: Deployment, operator: httpx.Client
) -> None:
    made = operator.post("/dashboard/operator/tenants", data=CUSTOMER)
    assert made.status_code == 200 and "was created" in made.text
    secret = key_in(made.text)
    assert ask(deployment, secret).status_code == 200
    again = operator.get(str(made.url))
    assert secret not in again.text and 'id="once"' not in again.text  # a reload
    with closing(browser(deployment)) as owner:
        fields = {"email": CUSTOMER["owner"], "password": CUSTOMER["password"]}
        assert owner.post("/dashboard/sign-in", data=fields).status_code == 200
        assert "production" in owner.get("/dashboard/projects").text


def test_a_refused_form_keeps_what_was_typed(
    deployment: Deployment, operator: httpx.Client
) -> None:
    before = count(deployment, Tenant)
    wrong = CUSTOMER | {"name": "Not A Slug", "owner": "ada@acme.example"}
    answer = operator.post("/dashboard/operator/tenants", data=wrong)
    assert answer.status_code == 400
    assert "is not a valid name" in answer.text and 'role="alert"' in answer.text
    for typed in ("Not A Slug", "ada@acme.example", "Globex GmbH"):
        assert f'value="{typed}"' in answer.text, typed
    assert CUSTOMER["password"] not in answer.text
    assert re.search(r'value="premium" selected', answer.text)
    assert count(deployment, Tenant) == before


def test_a_reload_after_a_new_key_makes_no_second_one(deployment: Deployment) -> None:
    with closing(browser(deployment, deployment.key)) as owner:
        page = owner.get("/dashboard/keys").text
        project = re.search(r'<option value="(proj_[^"]+)"', page)
        assert project is not None
        fields = {"act": "create", "name": "ci", "project_id": project[1], "role": "developer"}
        before = count(deployment, ApiKey)
        made = owner.post("/dashboard/keys", data=fields)
        assert made.history and made.history[0].status_code == 303  # a reload is a GET
        secret = key_in(made.text)
        assert count(deployment, ApiKey) == before + 1
        assert secret not in owner.get(str(made.url)).text
        assert "httponly" in made.history[0].headers["set-cookie"].lower()


def test_a_project_is_made_and_archived_on_its_page(deployment: Deployment) -> None:
    with closing(browser(deployment, deployment.key)) as owner:
        made = owner.post("/dashboard/projects", data={"act": "create", "name": "lab"})
        assert "The project was created." in made.text and ">lab<" in made.text
        twice = owner.post("/dashboard/projects", data={"act": "create", "name": "lab"})
        assert twice.status_code == 409 and 'value="lab"' in twice.text
        with deployment.services.database.read() as session:
            project = session.scalars(select(Project.id).where(Project.name == "lab")).one()
        fields = {"act": "archive", "project": project, "confirm": "wrong"}
        assert owner.post("/dashboard/projects", data=fields).status_code == 400
        gone = owner.post("/dashboard/projects", data=fields | {"confirm": "lab"})
        assert "The project was archived." in gone.text and ">archived<" in gone.text


def test_the_admin_api_makes_the_same_customer(deployment: Deployment) -> None:
    headers = {"authorization": f"Bearer {deployment.services.operator_token}"}
    body = {
        "name": "initech",
        "currency": "USD",
        "owner": {"email": "bill@initech.example"},
        "project": "main",
        "key": "first",
    }
    url = f"{deployment.url}/admin/v1/tenants"
    made = httpx.post(url, json=body, headers=headers)
    assert made.status_code == 201, made.text
    shown = made.json()
    assert shown["owner"]["role"] == "owner" and shown["remarks"] == []
    assert ask(deployment, shown["key"]["secret"]).status_code == 200
    euros = httpx.post(url, json={"name": "rhine", "currency": "EUR"}, headers=headers).json()
    assert "EUR" in euros["remarks"][0] and "project_id" in euros and "key" not in euros
    tenants = count(deployment, Tenant)
    wrong = {"name": "late", "owner": {"email": "not an address"}, "key": "first"}
    assert httpx.post(url, json=wrong, headers=headers).status_code == 400
    assert count(deployment, Tenant) == tenants  # all or nothing
