"""Onboarding: a new customer with everything a first request and a first invoice need.

One transaction makes the tenant, its billing account, its first project, its owner and its first key.
The page, the admin API and the command line call it.
"""

from dataclasses import dataclass, field
from typing import Any

from sqlalchemy.orm import Session

from billing.accounts.accounts import ensure_account
from billing.accounts.tax_ids import check_region, check_tax_id
from billing.periods import zone_of
from billing.pricing import prices
from billing.pricing.pricing import in_force
from core.clock import Clock
from core.errors import BadRequest
from core.tenants import keys, members, organisations
from core.tenants.keys import IssuedKey
from core.tenants.models import Member, Project, Tenant
from core.tenants.passwords import PasswordHash
from core.tenants.scope import scope_of_operator


@dataclass(frozen=True, slots=True)
class BillingDetails:
    """Whom and where the invoices are for. `tax_region` is a code of ISO 3166, such as DE or US-NY."""

    legal_name: str = ""
    address: str = ""
    email: str = ""
    tax_id: str = ""
    tax_region: str = ""
    tax_exempt: bool = False


@dataclass(frozen=True, slots=True)
class Owner:
    """The first member. Without a password, for single sign-on only."""

    email: str
    name: str = ""
    password_hash: PasswordHash | None = None  # what `members.hash_for` returned


@dataclass(frozen=True, slots=True)
class Customer:
    """What the operator enters. `plan` is the plan of limits; `key` names the first key, if any."""

    name: str
    display_name: str = ""
    plan: str = "standard"
    currency: str = "USD"
    timezone: str = "UTC"
    billing: BillingDetails = field(default_factory=BillingDetails)
    owner: Owner | None = None
    project: str = "default"
    key: str = ""


@dataclass(frozen=True, slots=True)
class Onboarded:
    tenant: Tenant
    project: Project
    owner: Member | None
    key: IssuedKey | None
    remarks: tuple[str, ...]  # what still keeps requests from being served

    def describe(self) -> dict[str, Any]:
        """For the API and the command line; with the key's secret, which is shown only here."""
        shown = organisations.describe(self.tenant) | {"project_id": self.project.id}
        if self.owner is not None:
            shown["owner"] = members.describe(self.owner)
        if self.key is not None:
            shown["key"] = {"id": self.key.id, "secret": self.key.secret}
        return shown | {"remarks": list(self.remarks)}


def onboard(session: Session, clock: Clock, customer: Customer, actor: str) -> Onboarded:
    """BadRequest or Conflict names what is wrong; nothing is stored then."""
    zone_of(customer.timezone)
    tenant = organisations.create_tenant(
        session,
        clock,
        name=customer.name,
        display_name=customer.display_name,
        plan=customer.plan,
        currency=customer.currency,
        timezone=customer.timezone,
        actor=actor,
    )
    _open_account(session, clock, tenant, customer.billing)
    scope = scope_of_operator(tenant.id, actor)
    project = organisations.create_project(session, scope, clock, name=customer.project)
    owner, key = None, None
    if customer.owner is not None:
        owner = members.add(
            session,
            scope,
            clock,
            email=customer.owner.email,
            role="owner",
            name=customer.owner.name,
            password_hash=customer.owner.password_hash,
        )
    if customer.key:
        if len(customer.key) > 120:
            raise BadRequest("The key's name is longer than 120 characters.", param="key")
        key = keys.issue(session, scope, clock, project_id=project.id, name=customer.key)
    return Onboarded(tenant, project, owner, key, _remarks(session, clock, tenant))


def _open_account(session: Session, clock: Clock, tenant: Tenant, details: BillingDetails) -> None:
    account = ensure_account(session, tenant.id, clock.now())
    account.legal_name = details.legal_name or account.legal_name
    account.address, account.email = details.address, details.email
    account.tax_region = check_region(details.tax_region) if details.tax_region else ""
    account.tax_id = check_tax_id(details.tax_id, account.tax_region)
    account.tax_exempt = details.tax_exempt
    session.flush()


def _remarks(session: Session, clock: Clock, tenant: Tenant) -> tuple[str, ...]:
    now = clock.now()
    priced = any(
        version.currency == tenant.currency
        and version.tenant_id == ""
        and in_force(version.effective_from, version.effective_to, now)
        for version in prices.load_price_book(session).versions
    )
    if priced:
        return ()
    return (
        f"No price in {tenant.currency} is in force: requests are refused until one is set, with "
        f"`tollhouse price set --currency {tenant.currency}`.",
    )
