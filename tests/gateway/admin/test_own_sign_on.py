"""A tenant's own issuer: who comes in by it, who does not, and when it is the only way."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import httpx
import pytest

from core.clock import SystemClock
from core.errors import Unavailable
from core.tenants import invitations, keys, members, sign_on, sign_on_connections
from core.tenants.organisations import create_project, create_tenant
from core.tenants.scope import TenantScope, scope_of_operator
from core.tenants.sign_on_connections import ConnectionDraft
from gateway.edge.auth.open_id_connect import OpenIdConnect
from gateway.edge.auth.single_sign_on import IssuerClient
from tests.gateway.admin.issuer import CLIENT, SECRET, Issuer, running
from tests.gateway.deployment import Deployment, running_deployment

PASSWORD = "a password of some length"


@dataclass
class Place:
    deployment: Deployment
    issuer: Issuer
    acme: TenantScope
    bolt: TenantScope
    owner_key: str

    def connect(self, **more: str | None) -> None:
        """Acme's connection as new, with nobody forced."""
        services = self.deployment.services
        draft = ConnectionDraft(
            issuer=self.issuer.url, client_id=CLIENT, client_secret=SECRET, **more
        )
        with services.database.transaction() as session:
            if sign_on_connections.of_tenant(session, self.acme.tenant_id) is not None:
                sign_on_connections.remove(session, self.acme, services.clock)
            sign_on_connections.put(session, self.acme, services.clock, draft)

    def members(self, scope: TenantScope) -> dict[str, str]:
        with self.deployment.services.database.read() as session:
            return {each.email: each.role for each in members.all_of(session, scope)}

    def api(self, method: str, path: str = "", **options: object) -> httpx.Response:
        headers = {"authorization": f"Bearer {self.owner_key}"}
        url = f"{self.deployment.url}/admin/v1/single-sign-on{path}"
        return httpx.request(method, url, headers=headers, timeout=60, **options)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    settings = {"webhook_networks": ("127.0.0.0/8",)}
    with (
        running() as issuer,
        running_deployment(tmp_path_factory.mktemp("own"), settings=settings) as deployment,
    ):
        clock, services = SystemClock(), deployment.services
        with services.database.transaction() as session:
            scopes = []
            for name in ("acme", "bolt"):
                scope = scope_of_operator(create_tenant(session, clock, name=name).id)
                sign_on.add_domain(session, scope, clock, f"{name}.example")
                scopes.append(scope)
            project = create_project(session, scopes[0], clock, name="default").id
            key = keys.issue(session, scopes[0], clock, project_id=project, name="k", role="owner")
        for email, role in (("ann@acme.example", "finance"), ("boss@acme.example", "owner")):
            hashed = members.hash_for(services.database, email, PASSWORD)
            with services.database.transaction() as session:
                members.add(session, scopes[0], clock, email=email, role=role, password_hash=hashed)
        yield Place(deployment, issuer, *scopes, key.secret)


@contextmanager
def person(place: Place, subject: str, **claims: object) -> Iterator[httpx.Client]:
    """Somebody whom the issuer signs in, without a word on whether the address is verified."""
    place.issuer.subject, place.issuer.claims = subject, claims
    with httpx.Client(base_url=place.deployment.url, timeout=60) as client:
        yield client


def go(browser: httpx.Client, **query: str) -> httpx.Response:
    begun = browser.get("/dashboard/sso/start", params=query)
    if begun.status_code != 303:
        return begun
    consent = httpx.get(begun.headers["location"], timeout=60)
    return browser.get(consent.headers["location"])


def test_a_member_comes_in_by_name_or_address_of_the_tenant(place: Place) -> None:
    place.connect()
    for chosen in ("acme", "ann@acme.example", place.acme.tenant_id):
        with person(place, "s-ann", email="ann@acme.example") as browser:
            answer = go(browser, tenant=chosen)
            assert (answer.status_code, answer.headers["location"]) == (303, "/dashboard/"), chosen
            assert "ann@acme.example" in browser.get("/dashboard/costs").text
    with person(place, "s-ann", email="ann@acme.example") as browser:
        assert go(browser).status_code == 404  # the deployment has no issuer
        assert go(browser, tenant="bolt").status_code == 404


@pytest.mark.parametrize(
    "claims",
    [
        {"email": "eve@evil.example"},
        {"email": "eve@bolt.example"},  # a domain of another tenant
        {"email": "eve@acme.example", "email_verified": False},
        {},
    ],
)
def test_an_address_of_no_own_domain_stays_out(place: Place, claims: dict[str, object]) -> None:
    place.connect(new_member_role="viewer")
    before = place.members(place.acme)
    with person(place, "s-eve", **claims) as browser:
        answer = go(browser, tenant="acme")
        assert answer.status_code == 401 and "tollhouse_session" not in answer.cookies
    assert place.members(place.acme) == before and place.members(place.bolt) == {}


def test_who_is_no_member_becomes_one_where_there_is_a_role_for_them(place: Place) -> None:
    place.connect()
    with person(place, "s-new", email="New@acme.example", name="Nel New") as browser:
        assert go(browser, tenant="acme").status_code == 401
        place.connect(new_member_role="developer")
        assert go(browser, tenant="acme").status_code == 303
    assert place.members(place.acme)["new@acme.example"] == "developer"
    with person(place, "s-other", email="new@acme.example") as browser:
        assert go(browser, tenant="acme").status_code == 401  # another account of the issuer
    services = place.deployment.services
    with services.database.transaction() as session:
        (member,) = [m for m in members.all_of(session, place.acme) if m.email[:3] == "new"]
        members.change(session, place.acme, services.clock, member.id, disabled=True)
    with person(place, "s-new", email="new@acme.example") as browser:
        assert go(browser, tenant="acme").status_code == 401


def test_a_sign_in_is_finished_by_the_issuer_that_began_it(place: Place) -> None:
    """Bolt's issuer is another one: what it says of Acme's people is not heard."""
    place.connect()
    services = place.deployment.services
    with running() as other:
        with services.database.transaction() as session:
            draft = ConnectionDraft(issuer=other.url, client_id=CLIENT, client_secret=SECRET)
            sign_on_connections.put(session, place.bolt, services.clock, draft)
        other.claims, other.subject = {"email": "ann@acme.example"}, "s-ann"
        with httpx.Client(base_url=place.deployment.url, timeout=60) as browser:
            assert go(browser, tenant="bolt").status_code == 401
            begun = browser.get("/dashboard/sso/start", params={"tenant": "bolt"})
            back = httpx.get(begun.headers["location"], timeout=60).headers["location"]
            browser.get("/dashboard/sso/start", params={"tenant": "acme"})
            assert browser.get(back).status_code == 401  # with Acme's cookie


def test_it_is_tested_forced_and_opened_again(place: Place) -> None:
    place.connect()
    untested = place.api(
        "POST", "/force", json={"forced": True, "break_glass": "boss@acme.example"}
    )
    assert untested.status_code == 409 and "never tested" in untested.text
    with person(place, "s-boss", email="boss@acme.example") as browser:
        tested = go(browser, tenant="acme", test="true")
        assert tested.headers["location"] == "/dashboard/single-sign-on?notice=sign-on-tested"
        assert "tollhouse_session" not in browser.cookies
    assert place.api("GET").json()["tested_at"] and place.api("GET").json()["has_secret"]
    assert SECRET not in place.api("GET").text
    for wrong in ("ann@acme.example", "nobody@acme.example", ""):
        refused = place.api("POST", "/force", json={"forced": True, "break_glass": wrong})
        assert refused.status_code == 400 and "not an owner with a password" in refused.text
    signed_in = _by_password(place, "ann@acme.example")
    assert signed_in.status_code == 303
    forced = place.api("POST", "/force", json={"forced": True, "break_glass": "boss@acme.example"})
    assert forced.status_code == 200 and forced.json()["forced"], forced.text
    cookie = {"cookie": f"tollhouse_session={signed_in.cookies['tollhouse_session']}"}
    ended = httpx.get(f"{place.deployment.url}/dashboard/costs", headers=cookie, timeout=60)
    assert ended.status_code in (302, 303, 307) and "sign-in" in ended.headers["location"]
    by_password = _by_password(place, "ann@acme.example")
    assert by_password.status_code == 401 and "asks for single sign-on" in by_password.text
    by_key = _sign_in(place, {"secret": place.owner_key})
    assert by_key.status_code == 401 and "asks for single sign-on" in by_key.text
    assert _by_password(place, "boss@acme.example").status_code == 303
    assert place.api("GET").status_code == 200  # keys of the API work on
    with person(place, "s-ann", email="ann@acme.example") as browser:
        assert go(browser, tenant="acme").status_code == 303
    assert not place.api("POST", "/force", json={"forced": False}).json()["forced"]
    assert _by_password(place, "ann@acme.example").status_code == 303
    other = {"issuer": place.issuer.url, "client_id": "another"}
    assert place.api("PUT", json=other).json()["tested_at"] is None
    assert place.api("DELETE").json()["issuer"] is None
    assert place.api("DELETE").status_code == 404


def test_an_invitation_connects_an_account_of_the_own_issuer(place: Place) -> None:
    place.connect()
    services = place.deployment.services
    with services.database.transaction() as session:
        made = members.add(
            session, place.acme, services.clock, email="guest@far.example", role="viewer"
        )
        link = invitations.invite(session, place.acme, services.clock, made.id)
    shown = httpx.get(f"{place.deployment.url}/dashboard/invitation?token={link.token}", timeout=60)
    assert "Sign in with your organisation" in shown.text
    with person(place, "s-guest", email="guest@far.example") as browser:
        assert go(browser, invitation=link.token).status_code == 303
        assert go(browser, tenant="acme").status_code == 303  # linked, whatever its domain


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"issuer": "http://10.1.2.3", "client_id": "c"}, "issuer"),
        ({"issuer": "http://169.254.169.254/latest", "client_id": "c"}, "issuer"),
        ({"issuer": "file:///etc/passwd", "client_id": "c"}, "issuer"),
        ({"issuer": "https://login.example.com?x=1", "client_id": "c"}, "issuer"),
        ({"issuer": "https://login.example.com", "client_id": " "}, "client_id"),
        (
            {"issuer": "https://login.example.com", "client_id": "c", "new_member_role": "owner"},
            "new_member_role",
        ),
    ],
)
def test_a_connection_that_cannot_be_is_refused(
    place: Place, body: dict[str, str], param: str
) -> None:
    answer = place.api("PUT", json=body)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param, answer.text


def test_a_name_that_leads_to_a_private_address_is_not_asked(place: Place) -> None:
    """As when it resolved to a public one while the connection was saved."""
    own = IssuerClient(place.issuer.url, CLIENT, SECRET, place.acme.tenant_id)
    with pytest.raises(Unavailable):
        OpenIdConnect(own, SystemClock(), "seal").begin("http://gateway.example/back")
    allowed = OpenIdConnect(own, SystemClock(), "seal", networks=("127.0.0.0/8",))
    assert allowed.begin("http://gateway.example/back").url.startswith(place.issuer.url)


def test_googles_accounts_come_in_by_their_organisation_alone() -> None:
    google = OpenIdConnect(
        IssuerClient("https://accounts.google.com", CLIENT, SECRET, "org_1"), SystemClock(), "seal"
    )
    verified = {"email": "ann@acme.example", "email_verified": True}
    assert google._email(verified) == ""
    assert google._email(verified | {"hd": "evil.example"}) == ""
    assert google._email(verified | {"hd": "acme.example"}) == "ann@acme.example"


def test_the_page_shows_what_to_paste_and_saves(place: Place) -> None:
    place.connect()
    with httpx.Client(base_url=place.deployment.url, timeout=60, follow_redirects=True) as browser:
        origin = {"origin": place.deployment.url}
        browser.post("/dashboard/sign-in", data={"secret": place.owner_key}, headers=origin)
        page = browser.get("/dashboard/single-sign-on").text
        assert f"{place.deployment.url}/dashboard/sso/callback" in page and "acme.example" in page
        assert re.search(r'href="/dashboard/sso/start\?tenant=\w+&(amp;)?test=true"', page)
        assert SECRET not in page and "Force single sign-on" not in page  # it is not tested
        form = {"act": "set", "issuer": "http://10.0.0.1", "client_id": "c"}
        refused = browser.post("/dashboard/single-sign-on", data=form, headers=origin)
        assert refused.status_code == 400 and "cannot be reached" in refused.text
        form |= {"issuer": place.issuer.url, "client_id": CLIENT, "new_member_role": "viewer"}
        saved = browser.post("/dashboard/single-sign-on", data=form, headers=origin)
        assert "The connection is saved." in saved.text
    with person(place, "s-jit", email="jit@acme.example") as browser:
        assert go(browser, tenant="acme").status_code == 303  # by the secret that was kept
    assert place.members(place.acme)["jit@acme.example"] == "viewer"


def _by_password(place: Place, email: str) -> httpx.Response:
    return _sign_in(place, {"email": email, "password": PASSWORD})


def _sign_in(place: Place, fields: dict[str, str]) -> httpx.Response:
    url = place.deployment.url
    return httpx.post(f"{url}/dashboard/sign-in", data=fields, headers={"origin": url}, timeout=60)
