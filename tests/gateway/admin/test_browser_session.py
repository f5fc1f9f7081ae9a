"""A dashboard session at /admin/v1: the member's own rights, from the dashboard's own pages alone."""

from urllib.parse import urlsplit

import httpx
import pytest

from gateway.admin.access import SESSION_COOKIE
from tests.gateway.admin.conftest import OPERATORS, Town


def signed_in(town: Town, secret: str) -> dict[str, str]:
    """The session's cookie, as the browser would hold it."""
    origin = str(town.client.base_url).rstrip("/")
    with httpx.Client(base_url=origin) as browser:
        answer = browser.post(
            "/dashboard/sign-in", data={"secret": secret}, headers={"origin": origin}
        )
        assert answer.status_code == 303, answer.text
        cookie = browser.cookies.get(SESSION_COOKIE)
    assert cookie
    return {"cookie": f"{SESSION_COOKIE}={cookie}"}


def origin_of(town: Town) -> str:
    parts = urlsplit(str(town.client.base_url))
    return f"{parts.scheme}://{parts.netloc}"


@pytest.mark.parametrize(
    ("role", "may"), [("owner", True), ("developer", False), ("viewer", False)]
)
def test_it_may_what_its_role_may(town: Town, role: str, may: bool) -> None:
    cookie = signed_in(town, town.acme.keys[role])
    headers = {**cookie, "origin": origin_of(town)}
    made = town.client.post(
        "/admin/v1/members",
        headers=headers,
        json={"email": f"{role}@acme.example", "name": "A", "role": "viewer"},
    )
    assert made.is_success if may else made.status_code == 403, made.text


def test_another_tenants_things_are_not_found(town: Town) -> None:
    cookie = signed_in(town, town.acme.keys["owner"])
    for named in (town.rival.id, town.rival.name):
        answer = town.client.get("/admin/v1/keys", headers=cookie, params={"tenant": named})
        assert answer.status_code == 404, answer.text


@pytest.mark.parametrize("origin", [None, "https://evil.example", "null", "http://127.0.0.1:1"])
def test_a_change_from_another_site_is_refused(town: Town, origin: str | None) -> None:
    cookie = signed_in(town, town.acme.keys["owner"])
    headers = {**cookie, **({"origin": origin} if origin else {})}
    body = {"email": "forged@acme.example", "name": "F", "role": "owner"}
    answer = town.client.post("/admin/v1/members", headers=headers, json=body)
    assert answer.status_code == 403, answer.text
    members = town.client.get("/admin/v1/members", headers=cookie).text
    assert "forged@acme.example" not in members


def test_a_session_that_was_ended_is_refused(town: Town) -> None:
    cookie = signed_in(town, town.acme.keys["owner"])
    assert town.client.get("/admin/v1/keys", headers=cookie).status_code == 200
    left = town.client.post("/dashboard/sign-out", headers={**cookie, "origin": origin_of(town)})
    assert left.status_code in (200, 303)
    assert town.client.get("/admin/v1/keys", headers=cookie).status_code == 401


def test_a_made_up_session_is_refused(town: Town) -> None:
    headers = {"cookie": f"{SESSION_COOKIE}={'0' * 43}"}
    assert town.client.get("/admin/v1/keys", headers=headers).status_code == 401


def test_a_session_opens_no_inference(town: Town) -> None:
    """Cookies ride along from any page that links here: they are no credential for what costs."""
    cookie = signed_in(town, town.acme.keys["owner"])
    body = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}
    for path in ("/v1/chat/completions", "/v1/batches", "/v1/embeddings"):
        headers = {**cookie, "origin": origin_of(town)}
        assert town.client.post(path, json=body, headers=headers).status_code == 401


def test_the_operators_session_is_the_operator(town: Town) -> None:
    cookie = signed_in(town, OPERATORS)
    answer = town.client.get("/admin/v1/tenants", headers=cookie)
    assert answer.status_code == 200 and town.rival.name in answer.text
