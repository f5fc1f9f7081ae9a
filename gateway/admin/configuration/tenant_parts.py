"""The lists of a tenant in a configuration: projects, members, keys, limits, budgets and the rest."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from billing.accounts.accounts import ensure_account
from billing.notices import budgets, webhooks
from billing.notices.tables import Budget
from billing.subscriptions import subscriptions
from core.errors import BadRequest
from core.money import Money, decimal_of, units_of
from core.tenants import audit, key_changes, key_scopes, keys, limits, members, organisations
from core.tenants.key_changes import KeyChange
from core.tenants.key_routing import CANARY, FALLBACK
from core.tenants.models import Project
from core.tenants.plans import LimitRule, Scope, Unit
from core.tenants.scope import TenantScope
from gateway.admin.configuration import document, prices, state
from gateway.admin.configuration.changes import Change, Work, shown
from gateway.edge.decoding import parse_datetime
from moderation import policies
from moderation.policy import Policy

K = TypeVar("K")


class TenantParts:
    """The lists of one tenant. Later ones may name what earlier ones made."""

    def __init__(self, work: Work, place: str, scope: TenantScope) -> None:
        self._work, self._place, self._scope = work, place, scope
        self._session, self._clock = work.session, work.clock

    def in_order(self) -> Iterable[tuple[str, Callable[..., None]]]:
        names = "projects labels members keys limits budgets policies webhooks prices subscription"
        return [(name, getattr(self, name)) for name in names.split()]

    def projects(self, wanted: list[str]) -> None:
        document.once(wanted, f"{self._place}: project")
        have = self._names().projects
        for name in wanted:
            if name not in have:
                self._added(f"project {name}")
                organisations.create_project(self._session, self._scope, self._clock, name=name)
        for name in self._unnamed(have, wanted):
            self._ended(f"project {name}")
            organisations.archive_project(self._session, self._scope, self._clock, have[name].id)

    def labels(self, wanted: dict[str, list[str]]) -> None:
        own = self._names().projects
        have = state.labels_of(self._names())
        for name, keys_ in wanted.items():
            if name not in own:
                raise BadRequest(
                    f"{self._place}: labels name the project {name}, which does not exist.",
                    next_step="State it under projects.",
                )
            self._set_labels(own[name], keys_, have.get(name, []))
        for name in self._unnamed(have, list(wanted)):
            self._set_labels(own[name], [], have[name])

    def _set_labels(self, project: Project, wanted: list[str], have: list[str]) -> None:
        before, after = {"labels": have}, {"labels": sorted(wanted)}
        if self._differs(f"project {project.name}", before, after):
            organisations.set_label_keys(
                self._session, self._scope, self._clock, project.id, wanted
            )

    def members(self, wanted: list[document.Member]) -> None:
        document.once([each.email.lower() for each in wanted], f"{self._place}: member")
        have = {each.email: each for each in members.all_of(self._session, self._scope)}
        for each in wanted:
            place, address = f"member {each.email}", each.email.strip().lower()
            if address not in have:
                self._added(place)
                members.add(
                    self._session,
                    self._scope,
                    self._clock,
                    email=address,
                    role=each.role,
                    name=each.name,
                )
                continue
            row = have[address]
            before = {"role": row.role, "name": row.name, "disabled": row.disabled_at is not None}
            stated = {n: v for n, v in each.stated().items() if n in before} | {"disabled": False}
            if "name" in each.model_fields_set:
                stated["name"] = each.name
            if self._differs(place, before, stated):
                changed: dict[str, Any] = {
                    name: stated[name] for name in stated if before[name] != stated[name]
                }
                members.change(self._session, self._scope, self._clock, row.id, **changed)
        enabled = {address for address, row in have.items() if row.disabled_at is None}
        for address in self._unnamed(enabled, [each.email.strip().lower() for each in wanted]):
            self._ended(f"member {address}")
            members.change(self._session, self._scope, self._clock, have[address].id, disabled=True)

    def keys(self, wanted: list[document.Key]) -> None:
        document.once([each.id or each.name for each in wanted], f"{self._place}: key")
        names = self._names()
        kept = set()
        for each in wanted:
            have = names.key(each.id or each.name)
            if have is None:
                self._new_key(names, each)
                continue
            kept.add(have.id)
            self._change_key(f"key {each.name}", state.key_of(names, have), have.id, each)
        for key in names.keys:
            if self._work.prune and key.id not in kept:
                self._ended(f"key {names.name_of(key)}")
                keys.revoke(self._session, self._scope, self._clock, key.id)

    def _new_key(self, names: state.Names, wanted: document.Key) -> None:
        if wanted.id is not None:
            raise BadRequest(f"key {wanted.name} has the id {wanted.id}, which no live key has.")
        if wanted.project not in names.projects:
            raise BadRequest(
                f"key {wanted.name} names the project {wanted.project}, which does not exist.",
                next_step="State it under projects.",
            )
        if not wanted.secret_file:
            raise BadRequest(
                f"key {wanted.name} is new, and nothing says where its secret goes.",
                next_step="State secret_file, or issue the key with `tollhouse key new`.",
            )
        listed = {name: getattr(wanted, name) for name in ("models", "adapters", "routes")}
        scopes = {name: frozenset(each) for name, each in listed.items() if each is not None}
        routing = {name: getattr(wanted, name) for name in (FALLBACK, CANARY)}
        issued = keys.issue(
            self._session,
            self._scope,
            self._clock,
            project_id=names.projects[wanted.project].id,
            name=wanted.name,
            role=wanted.role,
            scopes=key_scopes.KeyScopes(**scopes),
            allowed_ips=tuple(wanted.allowed_ips),
            expires_at=parse_datetime(wanted.expires_at, "expires_at")
            if wanted.expires_at
            else None,
            routing={name: each for name, each in routing.items() if each is not None},
        )
        self._added(f"key {wanted.name}")
        self._work.keep(self._place, wanted.secret_file, issued.secret)

    def _change_key(self, place: str, have: document.Key, id: str, wanted: document.Key) -> None:
        before, stated = have.model_dump(), wanted.stated()
        for name in ("models", "adapters", "routes", "allowed_ips"):
            if isinstance(listed := stated.get(name), list):
                stated[name] = sorted(listed) if name != "allowed_ips" else listed
        if isinstance(written := stated.get("expires_at"), str):
            stated["expires_at"] = parse_datetime(written, "expires_at").isoformat()
        fixed = ("project", "role", "allowed_ips", "expires_at")
        for name in fixed:
            if name in stated and stated[name] != before[name]:
                raise BadRequest(
                    f"{place}: {name} is {before[name]!r}, and cannot change.",
                    next_step="State a key of another name; then end this one.",
                )
        changed = {n: stated[n] for n in stated if n not in (*fixed, "id", "secret_file")}
        if self._differs(place, before, changed):
            scopes = {name: changed[name] for name in key_scopes.NAMES if name in changed}
            routing = {name: changed[name] for name in (FALLBACK, CANARY) if name in changed}
            key_changes.change(
                self._session,
                self._scope,
                self._clock,
                id,
                KeyChange(scopes=scopes or None, routing=routing or None),
            )

    def limits(self, wanted: list[document.Limit]) -> None:
        names = self._names()
        have = {each.slot: each for each in state.limits_of(self._session, self._scope, names)}
        rules = [self._rule(names, each) for each in wanted]
        document.once([f"{r.name} {r.target}".strip() for r in rules], f"{self._place}: limit")
        for rule in rules:
            was = have.get(rule.slot)
            place = f"limit {rule.name} {names.target(rule.target)}".strip()
            if was == rule:
                continue
            if was is None:
                self._added(place, rule.limit)
            else:
                before = {"limit": was.limit, "shadow": was.shadow}
                self._differs(place, before, {"limit": rule.limit, "shadow": rule.shadow})
            limits.set_rule(self._session, self._scope, self._clock, rule)
        for slot in self._unnamed(have, [rule.slot for rule in rules]):
            self._ended(f"limit {have[slot].name} {names.target(have[slot].target)}".strip())
            limits.remove_rule(self._session, self._scope, self._clock, have[slot])

    def _rule(self, names: state.Names, wanted: document.Limit) -> LimitRule:
        target = names.stored(self._session, wanted.scope, wanted.target)
        return LimitRule(
            Scope(wanted.scope),
            Unit(wanted.unit),
            wanted.limit,
            wanted.period_s,
            target,
            wanted.shadow,
        )

    def budgets(self, wanted: list[document.Budget]) -> None:
        document.once([each.name for each in wanted], f"{self._place}: budget")
        names = self._names()
        rows = state.budgets_of(self._session, self._scope.tenant_id, names)
        have = {each.name or each.id: each for each in rows}
        for each in wanted:
            place, row = f"budget {each.name}", have.get(each.name)
            if row is None:
                self._added(place, each.cap)
            else:
                before = state.budget_of(names, row).model_dump()
                stated = each.stated() | {"cap": decimal_of(units_of(each.cap))}
                if not self._differs(place, before, stated):
                    continue
                self._end_budget(row)
            self._new_budget(names, each)
        for name in self._unnamed(have, [each.name for each in wanted]):
            self._ended(f"budget {name}")
            self._end_budget(have[name])

    def _new_budget(self, names: state.Names, wanted: document.Budget) -> None:
        account = ensure_account(self._session, self._scope.tenant_id, self._clock.now())
        target = names.stored(self._session, wanted.scope, wanted.target)
        if wanted.scope != "tenant" and target == wanted.target:
            raise BadRequest(
                f"budget {wanted.name} names no {wanted.scope} that exists: {target!r}."
            )
        made = budgets.create(
            self._session,
            self._clock,
            tenant_id=self._scope.tenant_id,
            scope=wanted.scope,
            scope_id=self._scope.tenant_id if wanted.scope == "tenant" else target,
            cap=Money(units_of(wanted.cap), account.currency),
            window=wanted.window,
            hard=wanted.hard,
            thresholds=tuple(wanted.thresholds),
            webhooks=tuple(wanted.webhooks),
            emails=tuple(wanted.emails),
            name=wanted.name,
        )
        self._record("budget.create", made.id, wanted.model_dump())

    def _end_budget(self, row: Budget) -> None:
        row.ended_at = self._clock.now()
        self._session.flush()
        self._record("budget.end", row.id, None)

    def policies(self, wanted: list[document.ModerationPolicy]) -> None:
        names = self._names()
        rows = state.policies_of(self._session, self._scope.tenant_id, names)
        have = {(each.level, names.target(each.target)): each for each in rows}
        stated = [(each.level, each.target) for each in wanted]
        document.once([" ".join(each).strip() for each in stated], f"{self._place}: policy")
        for each in wanted:
            row = have.get((each.level, each.target))
            version = Policy.from_dict(each.document).version
            if row is not None and row.version == version:
                continue
            place = f"policy of {each.level} {each.target}".strip()
            self._work.changes.append(
                Change(f"{self._place}, {place}", row.version if row else None, version)
            )
            target = names.stored(self._session, each.level, each.target) or None
            policies.put(
                self._session,
                self._scope,
                self._clock,
                each.document,
                level=each.level,
                target=target,
            )
        for level, target in self._unnamed(have, stated):
            self._ended(f"policy of {level} {target}".strip())
            stored = have[level, target].target
            policies.retire(self._session, self._scope, self._clock, level=level, target=stored)

    def webhooks(self, wanted: list[document.Webhook]) -> None:
        document.once([each.url for each in wanted], f"{self._place}: webhook")
        rows = webhooks.of_tenant(self._session, self._scope)
        have = {each.url: each for each in rows if set(each.events) <= set(webhooks.EVENTS)}
        for each in wanted:
            row = have.get(each.url)
            if row is not None and (
                row.events == each.events or "events" not in each.model_fields_set
            ):
                continue
            if row is not None:
                self._differs(
                    f"webhook {each.url}", {"events": row.events}, {"events": each.events}
                )
                row.events = list(each.events)
                self._record("webhook.change", row.id, {"events": row.events})
                continue
            if not each.secret_file:
                raise BadRequest(
                    f"webhook {each.url} is new, and nothing says where its secret goes.",
                    next_step="State secret_file, which gets the secret that signs its messages.",
                )
            made = webhooks.add(self._session, self._scope, self._clock, each.url, each.events)
            self._added(f"webhook {each.url}")
            self._work.keep(self._place, each.secret_file, made.secret)
        for url in self._unnamed(have, [each.url for each in wanted]):
            self._ended(f"webhook {url}")
            webhooks.remove(self._session, self._scope, self._clock, have[url].id)

    def prices(self, wanted: list[document.Price]) -> None:
        prices.apply(self._work, self._scope.tenant_id, f"{self._place}, price", wanted)

    def subscription(self, wanted: document.Subscription | None) -> None:
        now = self._clock.now()
        have = state.subscription(self._session, self._scope.tenant_id, now)
        if wanted is None or wanted == have:
            return
        place = f"{self._place}, subscription"
        self._work.changes.append(Change(place, have and shown(have), shown(wanted)))
        subscriptions.subscribe(
            self._session, self._scope.tenant_id, wanted.plan, now, wanted.seats, now=now
        )
        self._record("subscription.change", self._scope.tenant_id, wanted.model_dump())

    def _names(self) -> state.Names:
        return state.Names(self._session, self._scope, self._clock.now())

    def _differs(
        self, place: str, before: Mapping[str, object], after: Mapping[str, object]
    ) -> bool:
        return self._work.differs(f"{self._place}, {place}", before, after)

    def _added(self, place: str, value: object = "") -> None:
        self._work.added(f"{self._place}, {place}", value)

    def _ended(self, place: str) -> None:
        self._work.ended(f"{self._place}, {place}")

    def _unnamed(self, have: Iterable[K], wanted: Sequence[K]) -> list[K]:
        """What is to end: nothing, unless unnamed entries are pruned."""
        return [each for each in have if each not in wanted] if self._work.prune else []

    def _record(self, action: str, target: str, after: dict[str, Any] | None) -> None:
        audit.record(
            self._session, self._scope, self._clock, action, target, before=None, after=after
        )
