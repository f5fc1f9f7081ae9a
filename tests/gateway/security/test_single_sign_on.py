"""Single sign-on across tenants: no tenant can capture an account by adding its e-mail address."""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta

import httpx
import pytest
from sqlalchemy.orm import Session

from core.clock import FakeClock, SystemClock
from core.database import Database
from core.errors import Conflict, Forbidden, Unauthenticated
from core.tenants import invitations, members, organisations, sign_on
from core.tenants.access import Actor, scope_for
from core.tenants.scope import TenantScope, scope_of_operator
from core.tenants.sign_on import ExternalIdentity, authenticate
from tests.gateway.admin.issuer import CLIENT, SECRET, running
from tests.gateway.deployment import running_deployment

VICTIM = "vera@victim.example"


@dataclass
class Tenants:
    session: Session
    clock: FakeClock
    victim: TenantScope
    attacker: TenantScope

    def add(self, scope: TenantScope, email: str = VICTIM, role: str = "viewer") -> str:
        return members.add(self.session, scope, self.clock, email=email, role=role).id

    def sign_in(
        self, subject: str, email: str = "", *, invitation: str = "", tenant: str = ""
    ) -> str:
        identity = ExternalIdentity(subject, email, invitation, tenant)
        return authenticate(self.session, self.clock, identity).id


@pytest.fixture
def tenants(database: Database, clock: FakeClock) -> Iterator[Tenants]:
    with database.transaction() as session:
        scopes = [
            scope_of_operator(organisations.create_tenant(session, clock, name=name).id)
            for name in ("victim", "attacker")
        ]
        yield Tenants(session, clock, *scopes)


def test_an_address_that_another_tenant_added_captures_nobody(tenants: Tenants) -> None:
    tenants.add(tenants.attacker)
    with pytest.raises(Unauthenticated, match="not linked"):
        tenants.sign_in("issuer#vera", VICTIM)
    own = tenants.add(tenants.victim)
    sign_on.add_domain(tenants.session, tenants.victim, tenants.clock, "victim.example")
    assert tenants.sign_in("issuer#vera", VICTIM) == own
    assert tenants.sign_in("issuer#vera", "renamed@victim.example") == own


def test_an_unverified_address_of_an_own_domain_links_nothing(tenants: Tenants) -> None:
    tenants.add(tenants.victim)
    sign_on.add_domain(tenants.session, tenants.victim, tenants.clock, "victim.example")
    with pytest.raises(Unauthenticated, match="not linked"):
        tenants.sign_in("issuer#vera", "")


def test_a_linked_member_is_not_taken_over_by_the_address(tenants: Tenants) -> None:
    own = tenants.add(tenants.victim)
    sign_on.add_domain(tenants.session, tenants.victim, tenants.clock, "victim.example")
    assert tenants.sign_in("issuer#vera", VICTIM) == own
    with pytest.raises(Unauthenticated, match="not linked"):
        tenants.sign_in("issuer#another", VICTIM)


def test_a_domain_belongs_to_one_tenant(tenants: Tenants) -> None:
    sign_on.add_domain(tenants.session, tenants.victim, tenants.clock, "Victim.example")
    with pytest.raises(Conflict, match="another tenant"):
        sign_on.add_domain(tenants.session, tenants.attacker, tenants.clock, "victim.example")


def test_an_invitation_links_whoever_holds_its_token_once_and_in_time(tenants: Tenants) -> None:
    own = tenants.add(tenants.victim, "shared@other.example")
    token = invitations.invite(tenants.session, tenants.victim, tenants.clock, own).token
    with pytest.raises(Unauthenticated, match="expired or was used"):
        tenants.sign_in("issuer#vera", invitation=token[:-1] + "x")
    assert tenants.sign_in("issuer#vera", invitation=token) == own
    with pytest.raises(Unauthenticated, match="expired or was used"):
        tenants.sign_in("issuer#mallory", invitation=token)
    late = invitations.invite(tenants.session, tenants.victim, tenants.clock, own).token
    tenants.clock.advance(invitations.LIFETIME.total_seconds() + 1)
    with pytest.raises(Unauthenticated, match="expired or was used"):
        tenants.sign_in("issuer#mallory", invitation=late)


def test_an_account_that_accepted_a_foreign_invitation_still_reaches_its_own_tenant(
    tenants: Tenants,
) -> None:
    """The capture was for good, because one subject was linked to one member only."""
    lure = tenants.add(tenants.attacker)
    token = invitations.invite(tenants.session, tenants.attacker, tenants.clock, lure).token
    assert tenants.sign_in("issuer#vera", invitation=token) == lure
    own = tenants.add(tenants.victim)
    token = invitations.invite(tenants.session, tenants.victim, tenants.clock, own).token
    tenants.clock.advance(timedelta(minutes=1).total_seconds())
    assert tenants.sign_in("issuer#vera", invitation=token) == own
    assert tenants.sign_in("issuer#vera", VICTIM) == own
    assert tenants.sign_in("issuer#vera", tenant="attacker") == lure


def test_two_members_of_a_tenant_are_not_linked_to_one_account(tenants: Tenants) -> None:
    first, second = (tenants.add(tenants.victim, f"{n}@victim.example") for n in "ab")
    token = invitations.invite(tenants.session, tenants.victim, tenants.clock, first).token
    tenants.sign_in("issuer#vera", invitation=token)
    token = invitations.invite(tenants.session, tenants.victim, tenants.clock, second).token
    with pytest.raises(Unauthenticated, match="already linked"):
        tenants.sign_in("issuer#vera", invitation=token)


def test_a_role_cannot_invite_a_member_of_a_higher_role(tenants: Tenants) -> None:
    owner = tenants.add(tenants.victim, role="owner")
    tenant_id = tenants.victim.tenant_id
    admin = scope_for(Actor("mem_admin", "admin", tenant_id, None), tenant_id)
    with pytest.raises(Forbidden, match="owner"):
        invitations.invite(tenants.session, admin, tenants.clock, owner)


def test_an_invitation_survives_the_trip_to_the_issuer(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    with running() as issuer:
        settings = {
            "oidc_issuer": issuer.url,
            "oidc_client_id": CLIENT,
            "oidc_client_secret": SECRET,
        }
        with running_deployment(tmp_path_factory.mktemp("sso"), settings=settings) as deployment:
            with deployment.services.database.transaction() as session:
                scope = scope_of_operator(deployment.tenant_id)
                fields = {"email": issuer.claims["email"], "role": "viewer"}
                member = members.add(session, scope, SystemClock(), **fields).id
            with httpx.Client(base_url=deployment.url, timeout=60) as browser:
                assert _trip(browser, "/dashboard/sso/start").status_code == 401
                made = browser.post(
                    f"/admin/v1/members/{member}/invitation", headers=deployment.headers
                )
                assert made.status_code == 201, made.text
                token = made.json()["url"].partition("token=")[2]
                start = f"/dashboard/sso/start?invitation={token}"
                assert start in browser.get(made.json()["url"]).text
                assert _trip(browser, start).status_code == 303
                assert issuer.claims["email"] in browser.get("/dashboard/").text
                assert _trip(browser, "/dashboard/sso/start").status_code == 303


def _trip(browser: httpx.Client, start: str) -> httpx.Response:
    begun = browser.get(start)
    assert begun.status_code == 303, begun.text
    return browser.get(httpx.get(begun.headers["location"], timeout=60).headers["location"])
