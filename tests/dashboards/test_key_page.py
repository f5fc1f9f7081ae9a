"""A key's page: what it may use, from where and until when, changed after it was made."""

import re
from datetime import UTC, datetime

import httpx

from core.tenants import keys
from core.tenants.models import ApiKey
from tests.gateway.deployment import MODEL, Deployment

LIST = "/dashboard/keys"


def made(deployment: Deployment, browser: httpx.Client, **more: str) -> ApiKey:
    page = browser.get(LIST).text
    project = re.search(r'<option value="(proj_[^"]+)"', page)
    assert project is not None
    fields = {"act": "create", "name": "laptop", "project_id": project[1]} | more
    answer = browser.post(LIST, data=fields)
    secret = re.search(r'id="once">(th_\w+)<', answer.text)
    assert secret is not None, re.findall(r'role="alert">([^<]+)', answer.text)
    services = deployment.services
    with services.database.read() as session:
        found = keys.find(session, secret[1], services.clock.now())
        return session.get_one(ApiKey, found.key_id)


def again(deployment: Deployment, key: ApiKey) -> ApiKey:
    with deployment.services.database.read() as session:
        return session.get_one(ApiKey, key.id)


def typed(page: str) -> dict[str, str]:
    """The values of the form that changes the key."""
    form = page[page.index('id="change"') :].partition("</form>")[0]
    found = re.findall(r'<input name="(\w+)" type="\w+" value="([^"]*)"', form)
    assert len(found) == 8
    return dict(found)


def test_every_bound_is_set_shown_changed_and_removed(
    deployment: Deployment, owner: httpx.Client
) -> None:
    key = made(
        deployment,
        owner,
        models=MODEL,
        routes="/v1/chat/completions, /v1/models",
        allowed_ips="127.0.0.1, 203.0.113.0/24",
        expires_at="2999-01-31",
        fallback="off",
        canary=f"{MODEL}={MODEL}:5",
    )
    assert f'href="{LIST}/{key.id}"' in owner.get(LIST).text
    path = f"{LIST}/{key.id}"
    shown = typed(owner.get(path).text)
    assert shown == {
        "name": "laptop",
        "models": MODEL,
        "adapters": "",
        "routes": "/v1/chat/completions, /v1/models",
        "allowed_ips": "127.0.0.1/32, 203.0.113.0/24",
        "expires_at": "2999-01-31",
        "fallback": "off",
        "canary": f"{MODEL}={MODEL}:5",
    }
    changed = shown | {"act": "change", "name": "desktop", "routes": "/v1/*", "allowed_ips": ""}
    assert "The key was changed." in owner.post(path, data=changed).text
    now = again(deployment, key)
    assert (now.name, now.scopes["routes"], now.allowed_ips) == ("desktop", ["/v1/*"], [])
    assert now.scopes["models"] == [MODEL] and now.expires_at == datetime(2999, 1, 31, tzinfo=UTC)
    emptied = dict.fromkeys(shown, "") | {"act": "change", "name": "desktop"}
    assert "The key was changed." in owner.post(path, data=emptied).text
    now = again(deployment, key)
    assert (now.scopes, now.routing, now.allowed_ips, now.expires_at) == ({}, {}, [], None)


def test_what_is_wrong_is_refused_and_kept_in_the_form(
    deployment: Deployment, owner: httpx.Client
) -> None:
    key = made(deployment, owner)
    path = f"{LIST}/{key.id}"
    shown = typed(owner.get(path).text) | {"act": "change"}
    for field, value, said in (
        ("name", "", "0 characters"),
        ("models", "tinny", "tinny"),
        ("adapters", "nobody", "which does not exist"),
        ("routes", "/v2/*", "which no route matches"),
        ("allowed_ips", "300.1.1.1", "not an IP address"),
        ("expires_at", "2001-01-01", "is past"),
        ("expires_at", "soon", "not a day"),
        ("fallback", "small", "not a fallback setting"),
        ("canary", f"{MODEL}={MODEL}:900", "canary"),
    ):
        refused = owner.post(path, data=shown | {field: value})
        assert refused.status_code == 400, (field, value, refused.status_code)
        assert said in refused.text and f'value="{value}"' in refused.text, (field, value)
    assert again(deployment, key).scopes == {}
    assert owner.get(f"{LIST}/key_nothing").status_code == 404


def test_a_field_that_nobody_touched_stays_as_it_is(
    deployment: Deployment, owner: httpx.Client
) -> None:
    """Though the form shows less: a day of an instant, and nothing for a list of nothing."""
    key = made(deployment, owner)
    instant = datetime(2999, 5, 6, 7, 8, 9, tzinfo=UTC)
    with deployment.services.database.transaction() as session:
        row = session.get_one(ApiKey, key.id)
        row.expires_at, row.scopes = instant, {"adapters": []}
    path = f"{LIST}/{key.id}"
    shown = typed(owner.get(path).text) | {"act": "change", "name": "other"}
    assert "The key was changed." in owner.post(path, data=shown).text
    now = again(deployment, key)
    assert (now.name, now.expires_at, now.scopes) == ("other", instant, {"adapters": []})


def test_a_service_account_belongs_to_nobody_and_an_ended_key_stays_ended(
    deployment: Deployment, owner: httpx.Client
) -> None:
    key = made(deployment, owner, owner="service", name="crawler")
    path = f"{LIST}/{key.id}"
    assert key.member_id is None and "a service account" in owner.get(path).text
    assert owner.post(path, data={"act": "revoke", "key_id": key.id, "confirm": "crawler"})
    page = owner.get(path).text
    assert ">revoked<" in page and 'id="change"' not in page
    late = owner.post(path, data={"act": "change", "name": "x"})
    assert late.status_code == 409 and "has ended" in late.text
    body = {"expires_at": "2999-01-01T00:00:00Z"}
    api = owner.patch(
        f"{deployment.url}/admin/v1/keys/{key.id}", json=body, headers=deployment.headers
    )
    assert api.status_code == 409 and "has ended" in api.json()["error"]["message"]


def test_the_api_changes_the_same(deployment: Deployment, owner: httpx.Client) -> None:
    key = made(deployment, owner)
    route = f"{deployment.url}/admin/v1/keys/{key.id}"
    body = {"name": "api", "allowed_ips": ["10.0.0.0/8"], "expires_at": "2999-01-01T00:00:00Z"}
    answer = owner.patch(route, json=body, headers=deployment.headers)
    assert answer.status_code == 200, answer.text
    shown = answer.json()
    assert (shown["name"], shown["allowed_ips"]) == ("api", ["10.0.0.0/8"])
    assert shown["expires_at"].startswith("2999-01-01")
    freed = owner.patch(route, json={"expires_at": None}, headers=deployment.headers).json()
    assert (freed["expires_at"], freed["allowed_ips"]) == (None, ["10.0.0.0/8"])
    for wrong in ({"expires_at": "2999-01-01T00:00:00"}, {"expires_at": "2001-01-01T00:00:00Z"}):
        assert owner.patch(route, json=wrong, headers=deployment.headers).status_code == 400
