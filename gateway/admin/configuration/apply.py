"""Makes the deployment what a configuration says, in one transaction: all of it, or nothing.

A field that the file leaves out stays as it is, and so does an entry that it does not name, unless
entries are pruned: then those of a list that the file states are ended if the file does not name them.
Tenants, plans and prices are never removed.
"""

from collections.abc import Callable
from typing import Any, TypeVar

from billing.accounts.accounts import ensure_account, lock_account
from billing.adjustments import account_changes, onboarding
from billing.subscriptions import subscriptions
from core.errors import BadRequest, TollhouseError
from core.money import units_of
from core.tenants import audit, organisations, plan_store
from core.tenants.key_routing import CANARY, FALLBACK
from core.tenants.models import Tenant
from core.tenants.scope import TenantScope, scope_of_operator
from gateway.admin.configuration import document, prices, state
from gateway.admin.configuration.changes import ACTOR, Work, each_once
from gateway.admin.configuration.tenant_parts import TenantParts

T = TypeVar("T")


class Application:
    """One application of a document; `work` has what came of it."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._session, self._clock = work.session, work.clock

    def run(self, wanted: document.Configuration) -> None:
        """BadRequest names the entry that cannot be applied."""
        for plan in each_once(wanted.limit_plans, "limit plan", lambda each: each.name):
            self._at(f"limit plan {plan.name}", self._limit_plan, plan)
        for fees in each_once(wanted.billing_plans, "billing plan", lambda each: each.name):
            self._at(f"billing plan {fees.name}", self._billing_plan, fees)
        prices.apply(self._work, "", "price", wanted.prices)
        for tenant in each_once(wanted.tenants, "tenant", lambda each: each.name):
            self._at(f"tenant {tenant.name}", self._tenant, tenant)

    def _at(self, place: str, act: Callable[[str, T], None], entry: T) -> None:
        try:
            act(place, entry)
        except TollhouseError as error:
            named = error.message if error.message.startswith(("tenant ", "limit plan ")) else None
            raise BadRequest(
                named or f"{place}: {error.message}", next_step=error.next_step, param=error.param
            ) from None

    def _limit_plan(self, place: str, wanted: document.LimitPlan) -> None:
        organisations.check_slug(wanted.name)
        plan = plan_store.from_body(wanted.name, wanted.model_dump(exclude={"name"}))
        have = plan_store.all_of(self._session).get(wanted.name)
        after = plan_store.describe(plan)
        if have is None:
            self._work.added(place)
        elif not self._work.differs(place, plan_store.describe(have), after):
            return
        plan_store.save(self._session, self._clock, ACTOR, plan)

    def _billing_plan(self, place: str, wanted: document.BillingPlan) -> None:
        rows = {each.name: each for each in self._session.scalars(state.all_plans())}
        stated = _amounts(wanted)
        if wanted.name not in rows:
            fields = {name: getattr(wanted, name) for name in document.BillingPlan.model_fields}
            fields |= {name: units_of(getattr(wanted, name)) for name in state.AMOUNTS}
            subscriptions.create_plan(self._session, self._clock.now(), fields)
            self._work.added(place)
            return
        have = _amounts(state.billing_plan(rows[wanted.name]))
        for name in stated:
            if have[name] != stated[name]:
                raise BadRequest(
                    f"{name} is {have[name]}, and plans never change.",
                    next_step="Give the new terms another name.",
                )

    def _tenant(self, place: str, wanted: document.TenantPart) -> None:
        tenant = self._session.scalars(state.tenant_named(wanted.name)).one_or_none()
        if tenant is None:
            tenant = self._new_tenant(place, wanted)
        scope = scope_of_operator(tenant.id, ACTOR)
        self._tenant_fields(place, scope, tenant, wanted)
        parts = TenantParts(self._work, place, scope)
        for name, apply in parts.in_order():
            if name in wanted.model_fields_set:
                apply(getattr(wanted, name))

    def _new_tenant(self, place: str, wanted: document.TenantPart) -> Tenant:
        first = wanted.projects[0] if wanted.projects else "default"
        customer = onboarding.Customer(
            wanted.name,
            wanted.display_name,
            wanted.plan,
            wanted.currency,
            wanted.timezone,
            project=first,
        )
        made = onboarding.onboard(self._session, self._clock, customer, ACTOR)
        self._work.added(place)
        self._work.added(f"{place}, project {first}")
        return made.tenant

    def _tenant_fields(
        self, place: str, scope: TenantScope, tenant: Tenant, wanted: document.TenantPart
    ) -> None:
        stated = wanted.stated()
        have = {name: getattr(tenant, name) for name in ("display_name", "plan", "status")}
        changed: dict[str, Any] = {name: stated[name] for name in have if name in stated}
        if self._work.differs(place, have, changed):
            organisations.change_tenant(self._session, scope, self._clock, **changed)
        routing = {name: stated[name] for name in (FALLBACK, CANARY) if name in stated}
        settings = {name: tenant.settings.get(name) for name in routing}
        if self._work.differs(place, settings, routing):
            organisations.change_tenant(self._session, scope, self._clock, settings=routing)
        account = ensure_account(self._session, tenant.id, self._clock.now())
        if "currency" in stated and stated["currency"] != account.currency:
            raise BadRequest(
                f"the tenant is billed in {account.currency}, which cannot change.",
                next_step="Make another tenant for the other currency.",
            )
        billing = dict(wanted.billing.stated()) if wanted.billing else {}
        if "timezone" in stated:
            billing["timezone"] = stated["timezone"]
        account = lock_account(self._session, tenant.id)
        before = {name: getattr(account, name) for name in billing}
        if self._work.differs(place, before, billing):
            account_changes.change(self._session, account, billing, self._clock.now())
            audit.record(
                self._session,
                scope,
                self._clock,
                "billing.change",
                tenant.id,
                before=before,
                after=billing,
            )


def _amounts(plan: document.BillingPlan) -> dict[str, object]:
    """What the file states of a plan, with amounts as picounits, so that 5 and "5.00" are equal."""
    stated = plan.stated()
    return stated | {
        name: units_of(getattr(plan, name)) for name in state.AMOUNTS if name in stated
    }
