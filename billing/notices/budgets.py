"""Spending limits from budgets and wallets, and alerts on budget thresholds.

The limiter's counters hold the cost of running requests; this module supplies caps and spend, rated
and waiting to be rated.
Both only rise under one limit key. The key names the window, so no job has to reset anything. A
refunding correction therefore raises the cap of the window in which it is posted; a charging one
counts as spend.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from operator import attrgetter

from sqlalchemy import false, func, or_, select
from sqlalchemy.orm import Session

from billing.accounts.tables import BillingAccount
from billing.ledger.tables import CreditGrant
from billing.notices import outbox, signing, webhooks
from billing.notices.tables import Budget, OutboxMessage
from billing.periods import period_around, zone_of
from billing.rating.unrated import UnratedUsage
from billing.usage import label_rollups, retention
from billing.usage.reading import charged_sums
from billing.usage.rollups import ADJUSTMENT
from billing.usage.tables import Adjustment, Charge, HourlyUsage, UsageEventRow
from core import labels
from core.clock import Clock
from core.errors import BadRequest, DependencyDown
from core.ids import new_id
from core.money import Money, decimal_of
from core.outbound import check_address
from core.tenants import attachments
from core.tenants.models import Project

WINDOWS = ("day", "week", "month", "total")
SCOPES = ("tenant", "project", "key", "label")
_ALMOST = timedelta(hours=1) - timedelta(microseconds=1)
log = logging.getLogger("tollhouse.billing")


@dataclass(frozen=True, slots=True)
class MoneyLimit:
    """`spent_units` of `cap_units` picounits are spent, by all usage that is stored."""

    key: str
    cap_units: int
    spent_units: int
    currency: str
    kind: str  # budget | wallet


@dataclass(frozen=True, slots=True)
class Window:
    name: str  # part of the limit's key
    starts_at: datetime | None  # None: no start
    ends_at: datetime | None


class LimitReader:
    """The spending limits of many requests at one moment. A budget is read and summed once, however many
    keys and sets of labels it applies to. What is spent counts `unrated` usage too. Soft budgets, which
    only alert, are no limits."""

    def __init__(self, session: Session, at: datetime, unrated: UnratedUsage) -> None:
        self._session = session
        self._at = at
        self._unrated = unrated
        self._tenants: dict[str, _Budgets] = {}
        self._limits: dict[str, MoneyLimit] = {}  # by budget

    def of_key(self, tenant_id: str, project_id: str, key_id: str) -> list[MoneyLimit]:
        """Every limit that applies to a request of this key, but for those of its labels; `key_id` is
        that of the first key of its chain of rotations."""
        own = self._budgets(tenant_id)
        scopes = (("tenant", tenant_id), ("project", project_id), ("key", key_id))
        found = self._of(own, scopes)
        return found if own.wallet is None else [*found, own.wallet]

    def of_labels(self, tenant_id: str, given: str | None) -> list[MoneyLimit]:
        """Every limit of the labels `given`, in their canonical form."""
        if given is None:
            return []
        return self._of(self._budgets(tenant_id), [("label", each) for each in given.split(",")])

    def _budgets(self, tenant_id: str) -> "_Budgets":
        own = self._tenants.get(tenant_id)
        if own is None:
            own = self._tenants[tenant_id] = self._read(tenant_id)
        return own

    def _read(self, tenant_id: str) -> "_Budgets":
        session, at = self._session, self._at
        account, wallet = session.get(BillingAccount, tenant_id), None
        if account is not None and account.prepaid_only:
            waiting = self._unrated.spent({"tenant_id": {tenant_id}}, account.currency)
            wallet = wallet_limit(session, account, at, waiting)
        by_scope: dict[tuple[str, str], list[Budget]] = {}
        for budget in _hard_budgets(session, tenant_id, at):
            by_scope.setdefault((budget.scope, budget.scope_id), []).append(budget)
        return _Budgets(account.timezone if account else "UTC", wallet, by_scope)

    def _of(self, own: "_Budgets", scopes: Iterable[tuple[str, str]]) -> list[MoneyLimit]:
        chosen = [budget for scope in scopes for budget in own.by_scope.get(scope, ())]
        return [self._limit(each, own.zone) for each in sorted(chosen, key=attrgetter("id"))]

    def _limit(self, budget: Budget, zone: str) -> MoneyLimit:
        limit = self._limits.get(budget.id)
        if limit is None:
            window = window_of(budget.window, self._at, zone)
            limit = _limit_of(self._session, budget, window, self._unrated)
            self._limits[budget.id] = limit
        return limit


@dataclass(frozen=True, slots=True)
class _Budgets:
    """Of one tenant, the hard ones by scope and what it names."""

    zone: str
    wallet: MoneyLimit | None
    by_scope: Mapping[tuple[str, str], Sequence[Budget]]


def _limit_of(
    session: Session, budget: Budget, window: Window, unrated: UnratedUsage
) -> MoneyLimit:
    spent, back = spent_in(session, budget, window)
    owner = {"tenant_id": {budget.tenant_id}}
    if budget.scope == "project":
        owner["project_id"] = {budget.scope_id}
    if budget.scope == "key":
        owner["key_id"] = set(attachments.ids_of_chain(session, budget.scope_id))
    bounds = window.starts_at, window.ends_at
    label = budget.scope_id if budget.scope == "label" else ""
    spent += unrated.spent(owner, budget.currency, *bounds, label=label)
    return MoneyLimit(
        f"{budget.id}:{window.name}",
        budget.cap + back,
        spent,
        budget.currency,
        "budget",
    )


def hard_labels(session: Session) -> dict[str, frozenset[str]]:
    """By tenant, the labels that have a hard budget."""
    open_ = select(Budget.tenant_id, Budget.scope_id).where(
        Budget.scope == "label", Budget.hard, Budget.ended_at.is_(None)
    )
    found: dict[str, set[str]] = {}
    for tenant_id, label in session.execute(open_):
        found.setdefault(tenant_id, set()).add(label)
    return {tenant_id: frozenset(some) for tenant_id, some in found.items()}


def hard_limit_keys(session: Session, at: datetime) -> dict[str, list[str]]:
    """The keys of all limits that hold money for running requests at this moment, by tenant."""
    found: dict[str, list[str]] = {}
    rows = session.execute(
        select(Budget, BillingAccount.timezone)
        .outerjoin(BillingAccount, BillingAccount.tenant_id == Budget.tenant_id)
        .where(Budget.hard, Budget.ended_at.is_(None), Budget.created_at <= at)
    )
    for budget, zone in rows:
        window = window_of(budget.window, at, zone or "UTC")
        found.setdefault(budget.tenant_id, []).append(f"{budget.id}:{window.name}")
    for account in session.scalars(select(BillingAccount).where(BillingAccount.prepaid_only)):
        found.setdefault(account.tenant_id, []).append(_wallet_key(account))
    return found


def wallet_limit(
    session: Session, account: BillingAccount, at: datetime, unrated_units: int
) -> MoneyLimit:
    """All credit ever granted, against all that was used, expired or refunded, or is not rated."""
    gone_by_expiry = (CreditGrant.expires_at.is_not(None)) & (CreditGrant.expires_at <= at)
    row = session.execute(
        select(
            func.coalesce(func.sum(CreditGrant.granted), 0),
            func.coalesce(func.sum(CreditGrant.granted - CreditGrant.remaining), 0),
            func.coalesce(func.sum(CreditGrant.remaining).filter(gone_by_expiry), 0),
        ).where(
            CreditGrant.tenant_id == account.tenant_id, CreditGrant.currency == account.currency
        )
    ).one()
    spent = int(row[1]) + int(row[2]) + unrated_units
    return MoneyLimit(_wallet_key(account), int(row[0]), spent, account.currency, "wallet")


def _wallet_key(account: BillingAccount) -> str:
    return f"wallet:{account.tenant_id}:{account.currency}"


def create(
    session: Session,
    clock: Clock,
    *,
    tenant_id: str,
    scope: str,
    scope_id: str,
    cap: Money,
    window: str = "month",
    hard: bool = True,
    thresholds: tuple[int, ...] = (50, 80, 100),
    webhooks: tuple[str, ...] = (),
    emails: tuple[str, ...] = (),
    name: str = "",
) -> Budget:
    if scope not in SCOPES or window not in WINDOWS:
        raise BadRequest(
            f"scope is {scope!r} and window is {window!r}.",
            next_step=f"Use scope {' or '.join(SCOPES)} and window {' or '.join(WINDOWS)}.",
        )
    if cap.units <= 0 or any(not 0 < each <= 1000 for each in thresholds):
        raise BadRequest(
            "The cap must be above zero, and each threshold 1 to 1000 percent.", param="cap"
        )
    for url in webhooks:
        check_address(url)
    account = session.get(BillingAccount, tenant_id)
    if account is not None and account.currency != cap.currency:
        raise BadRequest(
            f"The account is in {account.currency}, the budget in {cap.currency}.",
            next_step=f"Give the cap in {account.currency}.",
            code="currency_mismatch",
        )
    created = Budget(
        id=new_id("bud"),
        tenant_id=tenant_id,
        scope=scope,
        scope_id=_scope_id(session, scope, scope_id),
        name=name,
        currency=cap.currency,
        cap=cap.units,
        window=window,
        hard=hard,
        thresholds=sorted(set(thresholds)),
        webhooks=list(webhooks),
        emails=list(emails),
        created_at=clock.now(),
        webhook_secret=signing.new_secret() if webhooks else None,
    )
    session.add(created)
    session.flush()
    return created


def _scope_id(session: Session, scope: str, scope_id: str) -> str:
    if scope == "label":
        return labels.check_label(scope_id, "scope_id")
    return attachments.first_of(session, scope, scope_id)


def window_of(kind: str, at: datetime, timezone: str) -> Window:
    """The window that contains `at`. Windows start at local midnight, weeks on Monday."""
    if kind == "total":
        return Window("total", None, None)
    if kind == "month":
        start, end = period_around(at, 1, timezone)
        return Window(f"{start.astimezone(zone_of(timezone)):%Y-%m}", start, end)
    local = at.astimezone(zone_of(timezone))
    first = local.date() - timedelta(days=local.weekday() if kind == "week" else 0)
    after = first + timedelta(days=7 if kind == "week" else 1)
    start, end = (
        datetime(day.year, day.month, day.day, tzinfo=zone_of(timezone)) for day in (first, after)
    )
    return Window(f"{first:%Y-%m-%d}", start.astimezone(UTC), end.astimezone(UTC))


def spent_in(session: Session, budget: Budget, window: Window) -> tuple[int, int]:
    """(spent, refunded) picounits: rated usage plus charging corrections, and refunding corrections.
    Corrections name neither key nor label, so their budgets do not include them. Whole hours come
    from the roll-ups; where local midnight is inside an hour of UTC, its part comes from the charges.
    """
    table, changed = HourlyUsage, Adjustment
    if budget.scope == "label":
        owner = {"tenant_id": budget.tenant_id, "currency": budget.currency}
        bounds = window.starts_at, window.ends_at
        return label_rollups.spent(session, budget.scope_id, owner, *bounds), 0
    used = select(func.coalesce(func.sum(table.amount), 0)).where(
        table.tenant_id == budget.tenant_id,
        table.currency == budget.currency,
        table.kind != ADJUSTMENT,
    )
    taken = func.coalesce(func.sum(changed.amount).filter(changed.amount > 0), 0)
    given = func.coalesce(func.sum(-changed.amount).filter(changed.amount < 0), 0)
    corrected = select(taken, given).where(
        changed.tenant_id == budget.tenant_id, changed.currency == budget.currency
    )
    partly = 0
    if budget.scope == "project":
        used = used.where(table.project_id == budget.scope_id)
        corrected = corrected.where(changed.project_id == budget.scope_id)
    if budget.scope == "key":
        chain = attachments.ids_of_chain(session, budget.scope_id)
        used = used.where(table.key_id.in_(chain))
        corrected = corrected.where(false())
    if window.starts_at is not None and window.ends_at is not None:
        first, last = _hour(window.starts_at + _ALMOST), _hour(window.ends_at)
        used = used.where(table.at >= first, table.at < last)
        partly = _charged_between(session, budget, window.starts_at, first)
        partly += _charged_between(session, budget, last, window.ends_at)
        corrected = corrected.where(
            changed.created_at >= window.starts_at, changed.created_at < window.ends_at
        )
    more, back = session.execute(corrected).one()
    return int(session.scalar(used) or 0) + partly + int(more), int(back)


def _charged_between(session: Session, budget: Budget, start: datetime, end: datetime) -> int:
    """Picounits of a part of an hour. Where its rows are gone or their store does not answer, those of
    the whole hour: a hard budget never lets more through."""
    if start >= end:
        return 0
    event, table = UsageEventRow, HourlyUsage
    own = [event.tenant_id == budget.tenant_id, event.occurred_at >= start, event.occurred_at < end]
    rolled = [table.tenant_id == budget.tenant_id, table.at == _hour(start)]
    if budget.scope == "project":
        own.append(event.project_id == budget.scope_id)
        rolled.append(table.project_id == budget.scope_id)
    if budget.scope == "key":
        chain = attachments.ids_of_chain(session, budget.scope_id)
        own.append(event.key_id.in_(chain))
        rolled.append(table.key_id.in_(chain))
    dropped = retention.latest_retention(session)
    if dropped is None or dropped.kept_from <= start:
        try:
            found = charged_sums(session, [Charge.currency], [Charge.amount], own)
        except DependencyDown as error:
            log.warning("budget %s counts a whole hour: %s", budget.id, error.message)
        else:
            return sum(amount for currency, amount in found if currency == budget.currency)
    whole = select(func.coalesce(func.sum(table.amount), 0)).where(
        *rolled, table.currency == budget.currency, table.kind != ADJUSTMENT
    )
    return int(session.scalar(whole) or 0)


def _hour(at: datetime) -> datetime:
    return at.replace(minute=0, second=0, microsecond=0)


def tenants_with_budgets(session: Session) -> list[str]:
    open_ = select(Budget.tenant_id).where(Budget.ended_at.is_(None)).distinct()
    return list(session.scalars(open_.order_by(Budget.tenant_id)))


def send_alerts(session: Session, clock: Clock, tenant_id: str | None = None) -> int:
    """Queue an alert at each threshold that a window reaches, of one tenant or of all; returns the
    number of new ones. Of several that are reached at once, the highest one alone is worth a message.
    """
    now = clock.now()
    chosen = select(Budget).where(Budget.ended_at.is_(None)).order_by(Budget.id)
    if tenant_id is not None:
        chosen = chosen.where(Budget.tenant_id == tenant_id)
    budgets = session.scalars(chosen).all()
    zones = {
        row[0]: row[1]
        for row in session.execute(select(BillingAccount.tenant_id, BillingAccount.timezone))
    }
    queued = 0
    for budget in budgets:
        if not budget.webhooks and not budget.emails:
            continue
        window = window_of(budget.window, now, zones.get(budget.tenant_id, "UTC"))
        spent, back = spent_in(session, budget, window)
        reached = [
            percent for percent in budget.thresholds if (spent - back) * 100 >= budget.cap * percent
        ]
        if reached and not _passed(session, budget, window, max(reached)):
            queued += _alert(session, budget, window, max(reached), spent - back, now)
    return queued


def _passed(session: Session, budget: Budget, window: Window, percent: int) -> bool:
    """Whether a message reported this threshold or a higher one, before a refund lowered the spend."""
    told = OutboxMessage.dedupe
    causes = [f"{budget.id}:{window.name}:{each}:" for each in budget.thresholds if each >= percent]
    query = select(OutboxMessage.id).where(
        OutboxMessage.tenant_id == budget.tenant_id,
        or_(*(told.startswith(cause, autoescape=True) for cause in causes)),
    )
    return session.scalar(query.limit(1)) is not None


def _alert(
    session: Session, budget: Budget, window: Window, percent: int, spent: int, now: datetime
) -> int:
    payload = {
        "event": "budget.threshold",
        "budget_id": budget.id,
        "name": budget.name,
        "tenant_id": budget.tenant_id,
        "scope": budget.scope,
        "scope_id": budget.scope_id,
        "applies_to": _applies_to(session, budget),
        "window": window.name,
        "threshold_percent": percent,
        "spent": decimal_of(spent),
        "cap": decimal_of(budget.cap),
        "currency": budget.currency,
        "hard": budget.hard,
    }
    subject = f"Budget {budget.name or budget.id} has reached {percent} % of its cap"
    key = f"{budget.id}:{window.name}:{percent}"
    notifications = [
        webhooks.Notification(budget.tenant_id, "budget.threshold", subject, key, payload)
    ]
    return webhooks.notify(session, notifications, now) + outbox.put(
        session,
        tenant_id=budget.tenant_id,
        subject=subject,
        payload=payload,
        dedupe=key,
        webhooks=budget.webhooks,
        emails=budget.emails,
        signer=budget.id if budget.webhook_secret else None,
        now=now,
    )


def _applies_to(session: Session, budget: Budget) -> str:
    if budget.scope == "label":
        return f"the label {budget.scope_id}"
    if budget.scope == "key":
        chain = attachments.chain_of(session, budget.scope_id)
        return f"the key {chain[-1].name}" if chain else "a key"
    project = session.get(Project, budget.scope_id) if budget.scope == "project" else None
    return f"the project {project.name}" if project is not None else "the organisation"


def _hard_budgets(session: Session, tenant_id: str, at: datetime) -> list[Budget]:
    return list(
        session.scalars(
            select(Budget)
            .where(
                Budget.tenant_id == tenant_id,
                Budget.hard,
                Budget.created_at <= at,
                Budget.ended_at.is_(None) | (Budget.ended_at > at),
            )
            .order_by(Budget.id)
        )
    )
