"""Billing accounts of tenants: their creation, their locks and their periods."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime

from sqlalchemy import bindparam, select
from sqlalchemy.orm import Session

from billing.accounts import references
from billing.accounts.tables import BillingAccount, BillingPeriod, Seller
from billing.periods import period_around, zone_of
from core.database import insert_new
from core.errors import BadRequest, NotFound
from core.ids import new_id
from core.tenants.models import Tenant

DEFAULT_SELLER_ID = "house"
# Built once: every posting runs them.
_WANTED = BillingAccount.tenant_id.in_(bindparam("wanted", expanding=True))
_KNOWN = select(BillingAccount.tenant_id).where(_WANTED)
_LOCKED = (
    select(BillingAccount)
    .where(_WANTED)
    .order_by(BillingAccount.tenant_id)
    .with_for_update()
    .execution_options(populate_existing=True)
)


def ensure_accounts(session: Session, tenant_ids: Iterable[str], now: datetime) -> None:
    """Create missing accounts, in the tenant's currency and time zone."""
    wanted = set(tenant_ids)
    known = set(session.scalars(_KNOWN, {"wanted": list(wanted)}))
    missing = wanted - known
    if not missing:
        return
    ensure_seller(session)
    tenants = {t.id: t for t in session.scalars(select(Tenant).where(Tenant.id.in_(missing)))}
    rows = []
    for tenant_id in sorted(missing):
        tenant = tenants.get(tenant_id)
        rows.append(
            {
                "tenant_id": tenant_id,
                "seller_id": DEFAULT_SELLER_ID,
                "currency": tenant.currency if tenant else "USD",
                "timezone": tenant.timezone if tenant else "UTC",
                "legal_name": tenant.display_name if tenant else tenant_id,
                "created_at": now,
                "anchor_day": 1,
                "anchored_at": None,
                "address": "",
                "email": "",
                "tax_id": "",
                "tax_region": "",
                "postal_code": "",
                "tax_exempt": False,
                "collection": "manual",
                "status": "active",
                "prepaid_only": False,
                "payment_reference": references.of_customer(tenant_id),
                "payment_terms_days": None,
                "payment_methods": None,
                "limits_set": None,
                "limits_before": None,
            }
        )
    insert_new(session, BillingAccount.__table__, rows, "tenant_id")  # type: ignore[arg-type]


def ensure_seller(session: Session) -> Seller:
    insert_new(session, Seller.__table__, [_default_seller()], "id")  # type: ignore[arg-type]
    return session.get_one(Seller, DEFAULT_SELLER_ID)


def ensure_account(session: Session, tenant_id: str, now: datetime) -> BillingAccount:
    ensure_accounts(session, [tenant_id], now)
    account = session.get(BillingAccount, tenant_id)
    assert account is not None
    return account


def lock_accounts(session: Session, tenant_ids: Iterable[str]) -> dict[str, BillingAccount]:
    """Lock in the order of tenant ids. Serializes rating, closing and re-rating of a tenant."""
    rows = session.scalars(_LOCKED, {"wanted": list(set(tenant_ids))})
    return {account.tenant_id: account for account in rows}


def lock_account(session: Session, tenant_id: str) -> BillingAccount:
    found = lock_accounts(session, [tenant_id])
    if tenant_id not in found:
        raise NotFound(
            f"Tenant {tenant_id} has no billing account.",
            next_step="Send a request with one of its keys: its first usage creates the account.",
        )
    return found[tenant_id]


def set_anchor(session: Session, account: BillingAccount, day: int, now: datetime) -> None:
    """Start periods on this day of the month after the current one; the first may be short."""
    if not 1 <= day <= 31:
        raise BadRequest(f"anchor_day is {day}; it must be 1 to 31.", param="anchor_day")
    Periods(session).around(account, now)  # creates the current period with its old bounds
    account.anchor_day, account.anchored_at = day, now


def set_timezone(session: Session, account: BillingAccount, name: str, now: datetime) -> None:
    zone_of(name)
    Periods(session).around(account, now)
    account.timezone, account.anchored_at = name, now


@dataclass
class Periods:
    """Finds or creates tenants' billing periods. Hold the tenants' locks while using it."""

    session: Session
    _known: dict[str, list[tuple[datetime, datetime, BillingPeriod]]] = field(default_factory=dict)
    _loaded_from: dict[str, datetime] = field(
        default_factory=dict
    )  # every period that ends later is loaded

    def load(self, tenant_ids: Iterable[str], since: datetime) -> None:
        """Load the periods that end after `since`, in one query for all tenants."""
        wanted = set(tenant_ids)
        for tenant_id in wanted:
            self._known.setdefault(tenant_id, [])
            self._loaded_from[tenant_id] = since
        rows = self.session.scalars(
            select(BillingPeriod)
            .where(BillingPeriod.tenant_id.in_(wanted), BillingPeriod.ends_at > since)
            .execution_options(populate_existing=True)
        )
        for row in rows:
            self._remember(row)

    def around(self, account: BillingAccount, at: datetime) -> BillingPeriod:
        """The period that contains `at`. A new period never overlaps an existing one."""
        for start, end, period in self._known.get(account.tenant_id, ()):
            if start <= at < end:
                return period
        found, (start, end), whole = self._at(account, at)
        if found is not None:
            return self._remember(found)
        created = BillingPeriod(
            id=new_id("per"), tenant_id=account.tenant_id, starts_at=start, ends_at=end
        )
        if (start, end) != whole:
            created.whole_from, created.whole_to = whole
        self.session.add(created)
        return self._remember(created)

    def bounds(self, account: BillingAccount, at: datetime) -> tuple[datetime, datetime]:
        """Start and end of the period that `around` returns; nothing is created."""
        found, bounds, _ = self._at(account, at)
        return bounds if found is None else (found.starts_at, found.ends_at)

    def _at(
        self, account: BillingAccount, at: datetime
    ) -> tuple[BillingPeriod | None, tuple[datetime, datetime], tuple[datetime, datetime]]:
        """The period, or None and what is free of the whole month around `at`."""
        whole = start, end = period_around(at, account.anchor_day, account.timezone)
        for period in self._near(account.tenant_id, start, end):
            if period.starts_at <= at < period.ends_at:
                return period, (period.starts_at, period.ends_at), whole
            if period.ends_at <= at:
                start = max(start, period.ends_at)
            else:
                end = min(end, period.starts_at)
        return None, (start, end), whole

    def _near(self, tenant_id: str, start: datetime, end: datetime) -> list[BillingPeriod]:
        since = self._loaded_from.get(tenant_id)
        if since is not None and since <= start:
            known = self._known[tenant_id]
            return [each for begins, ends, each in known if ends > start and begins < end]
        rows = self.session.scalars(
            select(BillingPeriod).where(
                BillingPeriod.tenant_id == tenant_id,
                BillingPeriod.ends_at > start,
                BillingPeriod.starts_at < end,
            )
        )
        return list(rows)

    def _remember(self, period: BillingPeriod) -> BillingPeriod:
        known = self._known.setdefault(period.tenant_id, [])
        known.append((period.starts_at, period.ends_at, period))
        return period

    def billed_in(
        self, account: BillingAccount, usage: BillingPeriod, now: datetime
    ) -> BillingPeriod:
        """The period on whose invoice usage is billed: its own, or the first open one after it."""
        if usage.closed_at is None:
            return usage
        period = self.around(account, max(now, usage.ends_at))
        while period.closed_at is not None:
            period = self.around(account, period.ends_at)
        return period


def _default_seller() -> dict[str, object]:
    return {
        "id": DEFAULT_SELLER_ID,
        "name": "Tollhouse",
        "address": "",
        "tax_id": "",
        "tax_region": "",
        "bank_details": "",
        "footer": "",
        "number_prefix": "TH",
        "next_number": 1,
        "next_credit_note": 1,
    }


def timezone_of(session: Session, tenant_id: str) -> str:
    """Of the tenant's billing periods; UTC before its first usage."""
    account = session.get(BillingAccount, tenant_id)
    return account.timezone if account is not None else "UTC"
