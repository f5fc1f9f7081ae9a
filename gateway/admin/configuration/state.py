"""What the deployment has now, as a configuration document. Applying it changes nothing."""

from collections import Counter
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any

from sqlalchemy import Select, select
from sqlalchemy.orm import Session

from billing.accounts.tables import BillingAccount
from billing.notices import webhooks
from billing.notices.tables import Budget
from billing.pricing import price_terms, prices
from billing.pricing.pricing import ANY, PPM, in_force
from billing.pricing.tables import PriceVersionRow
from billing.subscriptions import subscriptions
from billing.subscriptions.tables import Plan
from core.money import decimal_of
from core.tenants import attachments, keys, limits, members, organisations, plan_store
from core.tenants.key_routing import CANARY, FALLBACK
from core.tenants.models import ApiKey, PlanRow, Tenant
from core.tenants.plans import LimitRule
from core.tenants.scope import TenantScope, scope_of_operator
from gateway.admin.configuration import document
from moderation.models import PolicyVersion
from moderation.policy import Policy

AMOUNTS = ("base_fee", "seat_fee", "included_usage", "minimum_commitment")


def all_plans() -> Select[Plan]:
    return select(Plan).order_by(Plan.name)


def tenant_named(name: str) -> Select[Tenant]:
    return select(Tenant).where(Tenant.name == name)


def price_rows(draft: prices.PriceDraft) -> Select[PriceVersionRow]:
    """Versions of the draft's scope and currency, the newest first."""
    return (
        select(PriceVersionRow)
        .where(
            PriceVersionRow.tenant_id == draft.tenant_id,
            PriceVersionRow.model == draft.model,
            PriceVersionRow.adapter == (draft.adapter or ANY),
            PriceVersionRow.currency == draft.currency,
        )
        .order_by(PriceVersionRow.effective_from.desc())
    )


class Names:
    """The projects and live keys of a tenant, by name and by id."""

    def __init__(self, session: Session, scope: TenantScope, now: datetime) -> None:
        projects = organisations.projects(session, scope)
        self.projects = {each.name: each for each in projects if each.archived_at is None}
        self.keys = [each for each in keys.all_of(session, scope) if keys.is_live(each, now)]
        # A rotated key and its successor are both live for a while.
        self.keys = [each for each in self.keys if each.rotated_to is None]
        self._counts = Counter(each.name for each in self.keys)
        names = {each.id: name for name, each in self.projects.items()}
        firsts = {each.first_id: self.name_of(each) for each in self.keys}
        self._by_id: Mapping[str, str] = {**names, **firsts, scope.tenant_id: ""}

    def name_of(self, key: ApiKey) -> str:
        """The id in place of a name that several keys have."""
        return key.name if self._counts[key.name] == 1 else key.id

    def key(self, name_or_id: str) -> ApiKey | None:
        found = [each for each in self.keys if name_or_id in (each.id, self.name_of(each))]
        return found[0] if found else None

    def has(self, kind: str, stored: str) -> bool:
        """False for what is attached to a key or project that has ended: nothing manages it."""
        return not stored or kind not in ("project", "key") or stored in self._by_id

    def target(self, stored: str) -> str:
        """The name of a stored target."""
        return self._by_id.get(stored, stored)

    def stored(self, session: Session, kind: str, name: str) -> str:
        """The id of the project or key that a file names; other targets are their own names."""
        if kind == "project" and name in self.projects:
            return self.projects[name].id
        if kind == "key" and (key := self.key(name)) is not None:
            return attachments.first_of(session, "key", key.id)
        return name


def read(session: Session, now: datetime, tenants: Iterable[Tenant]) -> document.Configuration:
    plans = session.scalars(select(PlanRow).order_by(PlanRow.name))
    fees = session.scalars(all_plans())
    return document.Configuration(
        limit_plans=[
            document.LimitPlan.model_validate(plan_of(session, each.name)) for each in plans
        ],
        billing_plans=[billing_plan(each) for each in fees],
        prices=prices_of(session, "", now),
        tenants=[tenant_of(session, each, now) for each in tenants],
    )


def plan_of(session: Session, name: str) -> dict[str, object]:
    return plan_store.describe(plan_store.find(session, name))


def billing_plan(row: Plan) -> document.BillingPlan:
    plain = set(document.BillingPlan.model_fields) - {*AMOUNTS, "commitment_interval"}
    amounts = {name: decimal_of(getattr(row, name)) for name in AMOUNTS}
    stated = {name: getattr(row, name) for name in plain} | amounts
    return document.BillingPlan.model_validate(stated | {"commitment_interval": row.committed_by})


def prices_of(session: Session, tenant_id: str, now: datetime) -> list[document.Price]:
    """Those in force, and those that begin later. Of past ones nothing is managed."""
    query = select(PriceVersionRow).where(PriceVersionRow.tenant_id == tenant_id)
    order = (PriceVersionRow.model, PriceVersionRow.adapter, PriceVersionRow.effective_from)
    shown = []
    for row in session.scalars(query.order_by(*order)):
        if row.effective_to is None or row.effective_to > now:
            shown.append(price_of(row, now))
    return shown


def price_of(row: PriceVersionRow, now: datetime) -> document.Price:
    rates, discount = price_terms.load(row.terms)
    stated: dict[str, object] = {
        "model": row.model,
        "currency": row.currency,
        "rates": price_terms.written(rates),
    }
    if row.adapter != ANY:
        stated["adapter"] = row.adapter
    if discount:
        stated["discount_percent"] = decimal_of(discount * (100 * 10**12 // PPM))
    if not in_force(row.effective_from, row.effective_to, now):
        stated["from"] = row.effective_from.isoformat()
    return document.Price.model_validate(stated)


def tenant_of(session: Session, tenant: Tenant, now: datetime) -> document.TenantPart:
    scope = scope_of_operator(tenant.id)
    names = Names(session, scope, now)
    stated: dict[str, object] = {
        name: getattr(tenant, name)
        for name in ("name", "display_name", "plan", "currency", "timezone")
    }
    if tenant.status in organisations.STATUSES:  # dunning sets and lifts `unpaid`
        stated["status"] = tenant.status
    stated |= {n: tenant.settings[n] for n in (FALLBACK, CANARY) if n in tenant.settings}
    account = session.get(BillingAccount, tenant.id)
    if account is not None:
        fields = document.Billing.model_fields
        stated["billing"] = document.Billing(**{name: getattr(account, name) for name in fields})
        stated["timezone"] = account.timezone
    if (held := subscription(session, tenant.id, now)) is not None:
        stated["subscription"] = held
    stated |= {
        "projects": sorted(names.projects),
        "labels": labels_of(names),
        "members": [
            document.Member(email=each.email, role=each.role, name=each.name)  # type: ignore[arg-type]
            for each in members.all_of(session, scope)
            if each.disabled_at is None
        ],
        "keys": [key_of(names, each) for each in names.keys],
        "limits": [
            document.Limit.model_validate(
                limits.describe(each) | {"target": names.target(each.target)}
            )
            for each in limits_of(session, scope, names)
        ],
        "budgets": [budget_of(names, each) for each in budgets_of(session, tenant.id, names)],
        "policies": [
            document.ModerationPolicy(
                level=each.level,  # type: ignore[arg-type]
                target=names.target(each.target),
                document=_sorted(Policy.from_dict(each.document).to_dict()),
            )
            for each in policies_of(session, tenant.id, names)
        ],
        "webhooks": [
            document.Webhook(url=each.url, events=each.events)
            for each in webhooks.of_tenant(session, scope)
            if each.format == "records" and set(each.events) <= set(webhooks.EVENTS)
        ],
        "prices": prices_of(session, tenant.id, now),
    }
    return document.TenantPart.model_validate(stated)


def subscription(session: Session, tenant_id: str, now: datetime) -> document.Subscription | None:
    """The one that runs, or the next that will."""
    held = subscriptions.read_subscriptions(session, [tenant_id]).get(tenant_id, [])
    for row, plan in held:
        if row.ends_at is None or row.ends_at > now:
            return document.Subscription(plan=plan.name, seats=row.seats)
    return None


def key_of(names: Names, key: ApiKey) -> document.Key:
    project = next((n for n, each in names.projects.items() if each.id == key.project_id), None)
    stated: dict[str, object] = {"name": key.name, "project": project or key.project_id}
    if names.name_of(key) != key.name:
        stated["id"] = key.id
    stated |= {"role": key.role, "allowed_ips": list(key.allowed_ips)}
    stated |= {
        name: key.scopes[name] for name in ("models", "adapters", "routes") if name in key.scopes
    }
    routing = key.routing or {}
    stated |= {name: routing[name] for name in (FALLBACK, CANARY) if name in routing}
    if key.expires_at is not None:
        stated["expires_at"] = key.expires_at.isoformat()
    return document.Key.model_validate(stated)


def labels_of(names: Names) -> dict[str, list[str]]:
    """By project, of those that have any."""
    return {name: each.label_keys for name, each in names.projects.items() if each.label_keys}


def limits_of(session: Session, scope: TenantScope, names: Names) -> list[LimitRule]:
    return [each for each in limits.own_rules(session, scope) if names.has(each.scope, each.target)]


def budgets_of(session: Session, tenant_id: str, names: Names) -> list[Budget]:
    query = select(Budget).where(Budget.tenant_id == tenant_id, Budget.ended_at.is_(None))
    rows = session.scalars(query.order_by(Budget.created_at, Budget.id))
    return [each for each in rows if names.has(each.scope, each.scope_id)]


def budget_of(names: Names, row: Budget) -> document.Budget:
    return document.Budget(
        name=row.name or row.id,
        cap=decimal_of(row.cap),
        scope=row.scope,  # type: ignore[arg-type]
        target=names.target(row.scope_id),
        window=row.window,  # type: ignore[arg-type]
        hard=row.hard,
        thresholds=list(row.thresholds),
        webhooks=list(row.webhooks),
        emails=list(row.emails),
    )


def policies_of(session: Session, tenant_id: str, names: Names) -> list[PolicyVersion]:
    query = select(PolicyVersion).where(
        PolicyVersion.tenant_id == tenant_id, PolicyVersion.retired_at.is_(None)
    )
    rows = session.scalars(query.order_by(PolicyVersion.level, PolicyVersion.target))
    return [each for each in rows if names.has(each.level, each.target)]


def _sorted(value: Any) -> Any:
    """Names in order: PostgreSQL gives those of a document back in an order of its own."""
    if isinstance(value, dict):
        return {name: _sorted(value[name]) for name in sorted(value)}
    return [_sorted(each) for each in value] if isinstance(value, list) else value
