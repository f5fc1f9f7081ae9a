"""Single sign-on against an issuer of the test's own: the whole flow, and every way to cheat at it."""

import time
from collections.abc import Iterator
from dataclasses import dataclass

import httpx
import pytest

from core.clock import SystemClock
from core.errors import Unavailable
from core.tenants import members, sign_on
from core.tenants.scope import scope_of_operator
from gateway.edge.auth.open_id_connect import OpenIdConnect
from gateway.edge.auth.single_sign_on import IssuerClient
from tests.gateway.admin.issuer import CLIENT, SECRET, Issuer, generate_key, running
from tests.gateway.deployment import Deployment, running_deployment


@dataclass
class Place:
    deployment: Deployment
    issuer: Issuer


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    with running() as issuer:
        settings = {
            "oidc_issuer": issuer.url,
            "oidc_client_id": CLIENT,
            "oidc_client_secret": SECRET,
        }
        with running_deployment(tmp_path_factory.mktemp("sso"), settings=settings) as deployment:
            with deployment.services.database.transaction() as session:
                scope = scope_of_operator(deployment.tenant_id)
                fields = {"email": "ann@acme.example", "role": "finance"}
                members.add(session, scope, SystemClock(), **fields)
                sign_on.add_domain(session, scope, SystemClock(), "acme.example")
            yield Place(deployment, issuer)


@pytest.fixture
def browser(place: Place) -> Iterator[httpx.Client]:
    place.issuer.wrong = {}
    with httpx.Client(base_url=place.deployment.url, timeout=60) as made:
        yield made


def _go(browser: httpx.Client) -> httpx.Response:
    """To the issuer and back to the gateway, which answers."""
    begun = browser.get("/dashboard/sso/start")
    assert begun.status_code == 303, begun.text
    consent = httpx.get(begun.headers["location"], timeout=60)
    return browser.get(consent.headers["location"])


def test_a_member_of_the_tenant_s_domain_signs_in_and_has_its_role(
    place: Place, browser: httpx.Client
) -> None:
    answer = _go(browser)
    assert (answer.status_code, answer.headers["location"]) == (303, "/dashboard/")
    page = browser.get("/dashboard/costs")
    assert page.status_code == 200 and "ann@acme.example" in page.text
    assert browser.get("/dashboard/keys").status_code == 403  # finance does not see the keys
    cookie = answer.headers["set-cookie"]
    assert "HttpOnly" in cookie and "SameSite=lax" in cookie
    with place.deployment.services.database.read() as session:
        scope = scope_of_operator(place.deployment.tenant_id)
        assert any(each.oidc_subject for each in members.all_of(session, scope))


@pytest.mark.parametrize(
    "wrong",
    [
        {"aud": "another client"},
        {"iss": "http://evil.example"},
        {"nonce": "another's"},
        {"exp": int(time.time()) - 3_600},
    ],
)
def test_a_token_that_is_not_for_us_is_refused(
    place: Place, browser: httpx.Client, wrong: dict[str, object]
) -> None:
    place.issuer.wrong = wrong
    answer = _go(browser)
    assert answer.status_code == 401 and "set-cookie" not in answer.headers


def test_a_stranger_and_an_unverified_address_do_not_come_in(
    place: Place, browser: httpx.Client
) -> None:
    subject = place.issuer.subject
    place.issuer.subject = "subject-2"
    try:
        for claims in (
            {"email": "eve@evil.example", "email_verified": True},
            {"email": "ann@acme.example", "email_verified": False},
        ):
            place.issuer.wrong = claims
            answer = _go(browser)
            assert answer.status_code == 401, answer.text
    finally:
        place.issuer.subject = subject


def test_anothers_trip_cannot_be_finished_here(place: Place, browser: httpx.Client) -> None:
    begun = browser.get("/dashboard/sso/start")
    back = httpx.get(begun.headers["location"], timeout=60).headers["location"]
    with httpx.Client(base_url=place.deployment.url, timeout=60) as victim:
        assert victim.get(back).status_code == 401  # no cookie of its own
        victim.get("/dashboard/sso/start")
        assert victim.get(back).status_code == 401  # a cookie, but of another trip


def test_a_key_that_is_not_the_issuers_signs_nothing(place: Place, browser: httpx.Client) -> None:
    published = place.issuer.published
    place.issuer.published = [place.issuer.key]
    mine, place.issuer.key = place.issuer.key, generate_key()
    try:
        assert _go(browser).status_code == 401
    finally:
        place.issuer.key, place.issuer.published = mine, published


def test_keys_that_the_issuer_turned_are_read_again(place: Place, browser: httpx.Client) -> None:
    assert _go(browser).status_code == 303
    place.issuer.key = generate_key()
    assert _go(browser).status_code == 303


@pytest.mark.parametrize(
    "described",
    [
        {"token_endpoint": "file:///etc/passwd"},
        {"jwks_uri": "gopher://127.0.0.1/"},
        {"issuer": "http://another.example"},
        {"authorization_endpoint": ""},
        {"filler": "x" * (2 << 20)},  # nor fill its memory
    ],
    ids=["file", "gopher", "issuer", "nothing", "endless"],
)
def test_an_issuer_cannot_send_the_gateway_elsewhere(
    place: Place, described: dict[str, str]
) -> None:
    settings = place.deployment.services.settings
    place.issuer.described = described
    try:
        with pytest.raises(Unavailable):
            OpenIdConnect(IssuerClient.of(settings), SystemClock(), "seal").begin(
                "http://gateway.example/back"
            )
    finally:
        place.issuer.described = {}
